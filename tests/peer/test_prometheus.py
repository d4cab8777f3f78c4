"""What Prometheus is told of live peers, and that a loop that stands is seen."""

from __future__ import annotations

import asyncio
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from softmax import Softmax

from peer.errors import UserError
from peer.hosting import host
from peer.network.address import HostPort
from peer.network.messages import Status
from peer.node import Peer
from peer.plan import Plan
from peer.rundir import MetricRow
from peer.settings import PeerSettings
from peer.vitals import Vitals
from simulations.processes import free_port

prometheus = pytest.importorskip("peer.prometheus", reason="prometheus_client is not installed")

PLAN = Plan.model_validate(
    {"name": "town", "n": 2, "rounds": 100_000, "method": "random"}
    | {"model": "custom", "data": "own", "matching": {"l": 1, "k": 1}}
    | {"partition": {"kind": "rotation", "clusters": 2}}
)


def scraped(port: int) -> dict[str, float]:
    """Return what is served: values by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {sample: float(value) for sample, value in pairs}


async def until(port: int, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Scrape until a condition holds; return that scrape."""
    async with asyncio.timeout(60):
        while True:
            told = await asyncio.to_thread(scraped, port)
            if condition(told):
                return told
            await asyncio.sleep(0.05)


def settings(directory: Path, port: int, **more: Any) -> PeerSettings:
    given = {"metrics": f"127.0.0.1:{port}", "index": 0, "replicas": 2, "state": directory}
    return PeerSettings.gather(config=None, **given | more)


async def test_live_peers_are_scraped(tmp_path: Path) -> None:
    port = free_port()
    running = asyncio.create_task(host(settings(tmp_path, port), plan=PLAN, make_learner=Softmax))
    try:
        await asyncio.sleep(0)  # until then it has bound its port
        told = await until(
            port, lambda told: all(told.get(f'panmesh_round{{peer="{i}"}}', 0) > 2 for i in "01")
        )
        assert told["panmesh_live"] == 1
        for peer in ('peer="0"', 'peer="1"'):
            assert told[f"panmesh_ready{{{peer}}}"] == 1
            assert told[f"panmesh_peers_known{{{peer}}}"] == 1
            assert told[f"panmesh_peers_left_out{{{peer}}}"] == 0
            assert 0 < told[f"panmesh_accuracy{{{peer}}}"] <= 1
            received = f'direction="received",kind="model",{peer}'
            models = told[f"panmesh_messages_total{{{received}}}"]
            assert models >= told[f"panmesh_round{{{peer}}}"]
            assert told[f"panmesh_wire_bytes_total{{{received}}}"] > 100 * models
        assert told["process_resident_memory_bytes"] > 10e6
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    with pytest.raises(OSError, match="refused"):
        scraped(port)


async def test_a_loop_that_stands_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "PATIENCE", 0.1)
    monkeypatch.setattr(prometheus, "LAG_INTERVAL", 0.01)
    port = free_port()
    traffic = {"sent": {}, "received": {}, "faults": {"late": 3}}
    seen = Vitals(7, [1, 2], [], Status(finished=4), None, traffic)
    address = HostPort("127.0.0.1", port)
    async with prometheus.metrics_served(address, lambda: [seen]):
        told = await until(port, lambda told: told["panmesh_live"] == 1)
        assert told['panmesh_faults_total{kind="late",peer="7"}'] == 3
        assert 'panmesh_accuracy{peer="7"}' not in told
        with ThreadPoolExecutor(1) as other:
            # The loop stands until it has been asked in vain.
            told = other.submit(scraped, port).result()
        assert told["panmesh_live"] == 0
        assert 'panmesh_round{peer="7"}' not in told
        time.sleep(0.5)  # noqa: ASYNC251 - the fault that is to be seen
        all_, short = (f'panmesh_loop_lag_seconds_bucket{{le="{le}"}}' for le in ("+Inf", "0.5"))
        await until(port, lambda told: told[all_] > told[short] and told["panmesh_live"] == 1)


async def test_where_metrics_are_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    with pytest.raises(UserError, match=r"anybody who reaches 0\.0\.0\.0 could read them"):
        await host(settings(tmp_path, port, metrics=f"0.0.0.0:{port}"), plan=PLAN)
    async with prometheus.metrics_served(HostPort("127.0.0.1", port), lambda: []):
        with pytest.raises(UserError, match=r"cannot serve metrics at .*: Address already in use"):
            await host(settings(tmp_path, port), plan=PLAN)
    monkeypatch.setitem(sys.modules, "peer.prometheus", None)
    with pytest.raises(UserError, match="prometheus_client, which is not installed") as caught:
        await host(settings(tmp_path, port), plan=PLAN)
    assert caught.value.hint == "pip install 'panmesh[prometheus]'"


@pytest.mark.parametrize("private", [False, True])
def test_nobody_is_told_how_well_private_samples_are_learned(tmp_path: Path, private: bool) -> None:
    row = MetricRow(t=1, index=0, accuracy=0.5, loss=1.0, epsilon=2.0)
    plan = SimpleNamespace(rounds=3, privacy=SimpleNamespace(acts=private))
    swarm = SimpleNamespace(known=lambda t: [1], left_out=list)
    peer = Peer(settings(tmp_path, free_port()))
    assert peer.vitals() is None
    peer._row = row
    peer._rounds = SimpleNamespace(index=0, plan=plan, swarm=swarm, status=Status(finished=1))  # type: ignore[assignment]
    seen = peer.vitals()
    assert seen is not None
    assert seen.row == (MetricRow(t=1, index=0, epsilon=2.0) if private else row)
