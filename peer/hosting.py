"""Peers hosted by one process: the `--replicas` of a command, a federation in a notebook.

Each has its own sockets, state and index; they share the import and the memory of torch, one thread
that trains, and one ZeroMQ context.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

import zmq.asyncio

from peer.display import log_fields
from peer.errors import UserError, first_failure
from peer.network.address import is_loopback, parse_address
from peer.node import LearnerFactory, Peer
from peer.plan import Plan
from peer.rounds import Result
from peer.rundir import MetricRow
from peer.settings import PeerSettings


def _metrics(settings: PeerSettings, peers: Sequence[Peer]) -> AbstractAsyncContextManager[None]:
    """Return what serves the metrics of a process's peers, nothing where nobody asked for them.

    Raises UserError for an address that others could reach, and without prometheus_client.
    """
    if settings.metrics is None:
        return nullcontext()
    address = parse_address(settings.metrics, listening=True)
    if not (settings.insecure or is_loopback(address.host)):
        raise UserError(
            f"metrics are served without keys: anybody who reaches {address.host} could read them",
            "give --metrics 127.0.0.1:PORT, or say --insecure",
        )
    try:
        from peer.prometheus import metrics_served
    except ImportError:
        raise UserError(
            "--metrics needs prometheus_client, which is not installed",
            "pip install 'panmesh[prometheus]'",
        ) from None
    return metrics_served(
        address, lambda: [seen for peer in peers if (seen := peer.vitals()) is not None]
    )


async def host(
    settings: PeerSettings,
    *,
    plan: Plan | None = None,
    make_learner: LearnerFactory | None = None,
    on_round: Callable[[Plan, MetricRow], None] | None = None,
    traces: bool = True,
) -> list[Result]:
    """Run `settings.replicas` peers to their last round; return their results in order.

    The arguments are those of `Peer`. Raises what the first failing peer raises; the others are
    then ended cleanly.
    """
    worker = ThreadPoolExecutor(1, thread_name_prefix="train")
    context = zmq.asyncio.Context()
    first_address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    peers: list[Peer] = []

    async def one(number: int) -> Result:
        mine = settings.replica(number)
        if number and not settings.bootstrap:
            others = [*settings.peer, await first_address]
            mine = mine.model_copy(update={"peer": others})
        with log_fields(**({"replica": number} if settings.replicas > 1 else {})):
            peer = Peer(
                mine,
                plan=plan,
                make_learner=make_learner,
                on_round=on_round,
                on_listening=None if number else first_address.set_result,
                traces=traces,
                worker=worker,
                context=context,
            )
            peers.append(peer)
            return await peer.run()

    try:
        async with _metrics(settings, peers), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(one(number), name=f"replica-{number}")
                for number in range(settings.replicas)
            ]
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None
    finally:
        worker.shutdown(wait=False, cancel_futures=True)
        context.term()
    return [task.result() for task in tasks]


def run(
    plan: Plan | None = None,
    *,
    make_learner: LearnerFactory | None = None,
    on_round: Callable[[Plan, MetricRow], None] | None = None,
    **settings: Any,
) -> list[Result]:
    """Run peers in this process and return their results; blocks, in a notebook too.

    With `bootstrap=["HOST:PORT"]` it joins a federation, as the command does. With a `plan` and
    nothing else it runs that plan's whole federation here, real sockets and all; with a `plan`,
    `index` and `peer` it runs one peer of it. Other `settings` are those of `PeerSettings`; without
    `state` the peers keep theirs in a temporary directory. Raises UserError and StateError.
    """
    if "state" not in settings:
        settings["state"] = Path(tempfile.mkdtemp(prefix="panmesh-"))
    if plan is not None and not settings.keys() & {"bootstrap", "index", "peer", "replicas"}:
        settings |= {"index": 0, "replicas": plan.n}
    gathered = PeerSettings.gather(config=None, **settings)
    if plan is None:
        gathered.check()
    outcome: list[Result] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            outcome.extend(
                asyncio.run(host(gathered, plan=plan, make_learner=make_learner, on_round=on_round))
            )
        except BaseException as error:  # handed to the caller's thread below
            failure.append(error)

    # A thread of its own: a notebook's is busy with the notebook's event loop.
    thread = threading.Thread(target=work, name="panmesh", daemon=True)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome
