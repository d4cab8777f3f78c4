"""A coordinated federation in one process, over real sockets, on learners of known numbers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zmq.asyncio

from bootstrap.coordinator import Coordinator
from bootstrap.server import BootstrapNode
from peer.learning.learner import Entry, Learner, Manifest, Scores, Vector
from peer.node import LearnerFactory, Peer
from peer.plan import Plan
from peer.rounds import Result
from peer.settings import PeerSettings
from simulations.central import CentralPopulation, LearnerCrew
from simulations.clustered import ClusteredPopulation
from simulations.processes import free_port

SIZE, BUFFERS = 64, 3
SECRET = "sixteen bytes or more"


class Target:
    """A learner that goes half of the way to a target of its own, near its cluster's."""

    manifest = Manifest((Entry("weight", (8, 8)), Entry("mean", (BUFFERS,), False)))

    def __init__(self, plan: Plan, index: int) -> None:
        rng = np.random.default_rng(plan.cluster_of(index))
        own = rng.normal(size=SIZE + BUFFERS)
        own += 0.2 * np.random.default_rng(1000 + index).normal(size=SIZE + BUFFERS)
        self.target = own.astype(np.float32)
        self.samples = index + 1

    def initial(self) -> Vector:
        return np.random.default_rng(7).normal(size=SIZE + BUFFERS).astype(np.float32)

    def fit(self, model: Vector, t: int) -> Vector:
        return ((model + self.target) / 2).astype(np.float32)

    def train_losses(self, models: list[Vector], t: int) -> list[float]:
        return [float(np.square(model - self.target).sum()) + t for model in models]

    def evaluate(self, model: Vector) -> Scores:
        (loss,) = self.train_losses([model], 0)
        return Scores(1 / (1 + loss), loss)

    def predict(self, model: Vector, inputs: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        raise NotImplementedError


def small(method: str, **changes: Any) -> Plan:
    """Eight peers in two clusters."""
    table: dict[str, Any] = {
        "n": 8,
        "rounds": 6,
        "seed": 5,
        "method": method,
        "model": "custom",
        "data": "own",
        "partition": {"kind": "rotation", "clusters": 2},
        "cfl": {"patience": 2},
        "network": {"request_timeout": 1.5, "linger": 1.0, "probe_interval": 30.0},
    }
    return Plan.model_validate(table | changes)


def laboratory(
    plan: Plan, make_learner: LearnerFactory = Target, *, secret: str | None = None
) -> CentralPopulation | ClusteredPopulation:
    """Return the population that a live run of a plan must equal."""
    crew = LearnerCrew([make_learner(plan, i) for i in range(plan.n)])
    if plan.method == "cfl":
        return ClusteredPopulation(plan, crew, secret=None if secret is None else secret.encode())
    return CentralPopulation(plan, plan.method, crew)


def check_attempt(told: Mapping[str, Any], simulated: Mapping[str, Any]) -> None:
    """Fail unless the notes of two rows tell of the same attempt to split, if of any.

    Norms and cosines may differ by the last bits: how BLAS adds up depends on its threads.
    """
    assert told.get("attempt") == _about(simulated.get("attempt"))


def _about(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _about(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_about(item) for item in value]
    return pytest.approx(value, rel=1e-6, abs=1e-9) if isinstance(value, float) else value


class Town:
    """The bootstrap node and the peers of a plan, started and ended one by one."""

    def __init__(self, plan: Plan, directory: Path, make_learner: LearnerFactory) -> None:
        self.plan = plan
        self.directory = directory
        self.address = f"127.0.0.1:{free_port()}"
        self.context = zmq.asyncio.Context()
        self._worker = ThreadPoolExecutor(1)
        self._make_learner = make_learner
        self._serving: asyncio.Task[None] | None = None
        self.node: BootstrapNode | None = None
        self.peers: dict[str, asyncio.Task[Result]] = {}

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator of now."""
        assert self.node is not None
        assert self.node._coordinator is not None
        return self.node._coordinator

    @property
    def boot(self) -> Path:
        """The state directory of the bootstrap node."""
        return self.directory / "boot"

    async def open(self, **more: Any) -> None:
        """Start the node, with the state that is there; return once it listens."""
        listening = asyncio.Event()

        async def serve() -> None:
            arguments = {"listen": self.address, "state": self.boot, "context": self.context}
            async with BootstrapNode(self.plan, **{**arguments, **more}) as node:
                self.node = node
                listening.set()
                await node.serve()

        self._serving = asyncio.create_task(serve(), name="bootstrap")
        heard = asyncio.create_task(listening.wait())
        await asyncio.wait([heard, self._serving], return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            self._serving.result()

    async def shut(self) -> None:
        """End the node."""
        assert self._serving is not None
        self._serving.cancel()
        with suppress(asyncio.CancelledError):
            await self._serving

    def join(self, name: str, **settings: Any) -> asyncio.Task[Result]:
        """Start a peer, with the state that it left if it has run before."""
        gathered = PeerSettings.gather(
            config=None, **{"bootstrap": self.address, "state": self.directory / name, **settings}
        )
        peer = Peer(
            gathered, make_learner=self._make_learner, worker=self._worker, context=self.context
        )
        self.peers[name] = asyncio.create_task(peer.run(), name=name)
        return self.peers[name]

    async def part(self, name: str) -> None:
        """End a peer; it says goodbye."""
        self.peers[name].cancel()
        with suppress(asyncio.CancelledError):
            await self.peers[name]

    async def until(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        """Wait until a condition holds."""
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - of what no event tells
                await asyncio.sleep(0.01)

    async def results(self) -> list[Result]:
        """Return what the peers end with, by index."""
        results = await asyncio.gather(*self.peers.values())
        return sorted(results, key=lambda result: result.index)


@asynccontextmanager
async def town(
    plan: Plan, directory: Path, make_learner: Callable[[Plan, int], Learner] = Target
) -> AsyncIterator[Town]:
    """Make a town of which nothing is left afterwards."""
    made = Town(plan, directory, make_learner)
    try:
        yield made
    finally:
        tasks = [task for task in (*made.peers.values(), made._serving) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        made._worker.shutdown()
        made.context.term()


async def live(
    plan: Plan, directory: Path, make_learner: LearnerFactory = Target, **settings: Any
) -> list[Result]:
    """Run all peers of a plan to the end."""
    async with town(plan, directory, make_learner) as made:
        await made.open()
        for number in range(plan.n):
            made.join(f"peer-{number}", **settings)
        return await made.results()
