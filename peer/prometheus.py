"""What a process tells Prometheus of its peers: GET /metrics, served by prometheus_client.

It is served from a thread of that library's, and looked up in the event loop, so that one that
stands still is seen: `panmesh_live` is then 0, and nothing else is told of the peers. All names
begin with `panmesh_`, but for the library's own of the process (`process_...`).

prometheus_client is an extra; only a process that is asked for metrics imports this module.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from peer.errors import UserError
from peer.network.address import HostPort
from peer.vitals import Vitals

log = logging.getLogger(__name__)

PATIENCE = 2.0
"""Seconds in which the event loop must say how its peers are."""
LAG_INTERVAL = 0.5
"""Seconds between two looks at how late the event loop is."""
LAGS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds of the histogram of that, in seconds."""

Look = Callable[[], Sequence[Vitals]]
"""Returns how all peers of the process are; called in the event loop."""


@asynccontextmanager
async def metrics_served(address: HostPort, look: Look) -> AsyncIterator[None]:
    """Serve the metrics of this process's peers for as long as the block runs.

    Raises UserError when the address cannot be bound.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    lag = Histogram(
        "panmesh_loop_lag_seconds",
        "How late the event loop is.",
        buckets=LAGS,
        registry=registry,
    )
    registry.register(PeersCollector(look, asyncio.get_running_loop()))
    try:
        server, thread = start_http_server(address.port, address.host, registry)
    except OSError as error:
        raise UserError(
            f"cannot serve metrics at {address.host}:{address.port}: {error.strerror}"
        ) from None
    log.info("metrics at http://%s:%d/metrics", address.host, server.server_port)
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(_watch(lag), name="loop-lag")
            try:
                yield
            finally:
                watching.cancel()
    finally:
        # Off the event loop, which a request that is being answered may be waiting for.
        await asyncio.to_thread(server.shutdown)
        await asyncio.to_thread(thread.join)
        server.server_close()


async def _watch(lag: Histogram) -> None:
    now = asyncio.get_running_loop().time
    while True:
        due = now() + LAG_INTERVAL
        await asyncio.sleep(LAG_INTERVAL)
        lag.observe(max(0.0, now() - due))


class PeersCollector(Collector):
    """What is asked at every scrape."""

    def __init__(self, look: Look, loop: asyncio.AbstractEventLoop) -> None:
        self._look = look
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        """Return all metrics of the peers; called in another thread than the event loop's."""
        peers = self._ask()
        yield GaugeMetricFamily(
            "panmesh_live", "Whether the event loop answers.", float(peers is not None)
        )
        yield from _gauges(peers or ())
        yield from _counters(peers or ())

    def _ask(self) -> Sequence[Vitals] | None:
        async def look() -> Sequence[Vitals]:
            return self._look()

        asked = asyncio.run_coroutine_threadsafe(look(), self._loop)
        try:
            return asked.result(PATIENCE)
        except TimeoutError:
            asked.cancel()
            return None


def _gauges(peers: Sequence[Vitals]) -> Iterator[Metric]:
    """Return what goes up and down; a peer without a value has no sample."""

    def gauge(name: str, about: str, value: Callable[[Vitals], float | None]) -> Metric:
        family = GaugeMetricFamily(f"panmesh_{name}", about, labels=["peer"])
        for seen in peers:
            if (found := value(seen)) is not None:
                family.add_metric([str(seen.index)], float(found))
        return family

    yield gauge("ready", "Whether it has found another peer.", lambda seen: seen.ready)
    yield gauge("round", "Last finished round.", lambda seen: seen.status.finished)
    yield gauge(
        "accuracy", "On its own test set.", lambda seen: seen.row.accuracy if seen.row else None
    )
    yield gauge("peers_known", "Others believed to be there.", lambda seen: len(seen.known))
    yield gauge("peers_left_out", "Others left out of exchanges.", lambda seen: len(seen.left_out))


def _counters(peers: Sequence[Vitals]) -> Iterator[Metric]:
    """Return the traffic of this life by kind of message, and what was wrong with it."""
    labels = ["peer", "direction", "kind"]
    messages = CounterMetricFamily("panmesh_messages", "Messages.", labels=labels)
    volume = CounterMetricFamily("panmesh_wire_bytes", "Bytes of all their frames.", labels=labels)
    faults = CounterMetricFamily(
        "panmesh_faults", "What was wrong with traffic.", labels=["peer", "kind"]
    )
    for seen in peers:
        for direction in ("sent", "received"):
            for kind, count in seen.traffic[direction].items():
                messages.add_metric([str(seen.index), direction, kind], count["messages"])
                volume.add_metric([str(seen.index), direction, kind], count["wire_bytes"])
        for kind, times in seen.traffic["faults"].items():
            faults.add_metric([str(seen.index), kind], times)
    yield from (messages, volume, faults)
