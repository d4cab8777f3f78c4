"""What every virtual federation has: nodes with a clock and a wire, real learning, rows, a script.

Who asks whom for what, and when, is told by its kinds: `virtual`, peers among themselves, and
`coordinated`, peers with a coordinator. [choice] In both, averaging and evaluation take no time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from peer.learning.learner import Vector
from peer.merit import precision, recall
from peer.plan import Plan
from peer.rundir import MetricRow, Seconds, TopologyRow
from simulations.scenarios.director import Director
from simulations.scenarios.learning import Backlog, Judgement, Learning
from simulations.scenarios.links import Conditions
from simulations.scenarios.scenario import Scenario
from simulations.scenarios.wire import Wire
from simulations.scenarios.world import World


@dataclass(eq=False, kw_only=True)
class Member:
    """A peer as script and rows see it: w_i [e], its last finished round, and the payload bytes
    that it has sent and received."""

    index: int
    model: Vector
    attack: str | None
    slowness: float = 1.0
    finished: int = 0
    missing: int = 0
    began: float = 0.0
    trained: float = 0.0
    sent: int = 0
    received: int = 0
    notes: dict[str, Any] = field(default_factory=dict)


Peer = TypeVar("Peer", bound=Member)


class Finished(NamedTuple):
    """A round that a peer has finished: its rows, the first but for the scores."""

    metric: MetricRow
    topology: TopologyRow
    judgement: Judgement | None

    @property
    def ready(self) -> bool:
        """Whether the scores are there, or none are due."""
        return self.judgement is None or self.judgement.scores is not None

    def rows(self) -> tuple[MetricRow, TopologyRow]:
        """Return the rows, scores and all."""
        scores = self.judgement.scores if self.judgement is not None else None
        if scores is None:
            return self.metric, self.topology
        update = {"accuracy": scores.accuracy, "loss": scores.loss}
        return self.metric.model_copy(update=update), self.topology


class Federation(ABC, Generic[Peer]):
    """The peers of a scenario, over its network and through its script.

    `clock.now` is the virtual time. `lost` counts payload bytes that were sent and did not arrive;
    all others that were sent are received, or still under way.
    """

    def __init__(
        self,
        scenario: Scenario,
        learning: Learning,
        *,
        world: World,
        conditions: Conditions,
        peers: list[Peer],
        evaluate_every: int,
    ) -> None:
        self.scenario = scenario
        self.plan: Plan = scenario.plan
        self.learning = learning
        self.world = world
        self.conditions = conditions
        self.peers = peers
        self.clock = world.clock
        self.wire = Wire(self.clock, conditions, world.n, self.plan.seed)
        self.backlog = Backlog(learning)
        self.lost = 0
        self._evaluate_every = evaluate_every
        self._clusters = [*scenario.people.clusters]
        self._rows: deque[Finished] = deque()
        self._script = Director(scenario, self, self.clock)

    @property
    def models(self) -> list[Vector]:
        """w_i^t of every peer, each [e]."""
        return [peer.model for peer in self.peers]

    def run(self) -> Iterator[tuple[MetricRow, TopologyRow]]:
        """Yield the rows of every round that a peer finishes, in the order of their ends."""
        self._script.begin()
        self._open()
        while not self._over() and self.clock.step():
            while self._rows and self._rows[0].ready:
                yield self._rows.popleft().rows()
        self.backlog.clear()
        while self._rows:
            yield self._rows.popleft().rows()

    @abstractmethod
    def _open(self) -> None:
        """Let those who are there at the beginning begin."""

    @abstractmethod
    def _over(self) -> bool:
        """Tell whether all who are there are done and nobody is to come."""

    @abstractmethod
    def stop(self, peer: Peer, *, farewell: bool) -> None:
        """End a peer's process; it has its last finished round, and no more."""

    @abstractmethod
    def start(self, peer: Peer) -> None:
        """Start a peer's process, for the first time or after its last finished round."""

    # What the script does, see `simulations.scenarios.director.Stage`.

    def has(self, i: int) -> bool:
        """Tell whether the process of peer i runs."""
        return self.world.alive[i]

    def part(self, sides: Sequence[int]) -> None:
        """Nodes of different sides [n + 1] no longer reach each other."""
        self.world.part(sides[: self.world.n])

    def heal(self) -> None:
        """All who are there reach each other again."""
        self.world.heal()

    def degrade(
        self, peers: Sequence[int], *, latency: float, bandwidth: float, loss: float | None
    ) -> None:
        """Links get worse."""
        self.conditions.degrade(peers, latency=latency, bandwidth=bandwidth, loss=loss)

    def stop_peer(self, i: int, *, farewell: bool) -> None:
        """End a peer's process."""
        self.stop(self.peers[i], farewell=farewell)

    def start_peer(self, i: int) -> None:
        """Start a peer's process."""
        self.start(self.peers[i])

    def slow(self, i: int, factor: float) -> None:
        """Training takes so many times as long as the scenario says."""
        self.peers[i].slowness = factor

    def become(self, i: int, *, cluster: int | None = None, attack: str | None = None) -> None:
        """A peer's data become those of another cluster, or it begins to lie."""
        peer = self.peers[i]
        self.backlog.clear()  # what began before has been with the old data
        if cluster is not None:
            self._clusters[peer.index] = cluster
        peer.attack = peer.attack if attack is None else attack
        self.learning.hold(peer.index, self._clusters[peer.index], peer.attack)

    def _life(self, peer: Peer) -> int:
        return self.world.incarnation[peer.index]

    def _training_seconds(self, peer: Peer) -> float:
        samples = self.plan.training.epochs * self.learning.samples[peer.index]
        return samples / self.scenario.equipment[peer.index].speed * peer.slowness

    def _record(
        self,
        peer: Peer,
        t: int,
        *,
        neighbours: Sequence[int],
        bag: Collection[int],
        notes: dict[str, Any],
    ) -> None:
        """Write the rows of round t, which the peer has finished now."""
        due = t % self._evaluate_every == 0 or t == self.plan.rounds
        judgement = self.backlog.judge(peer.index, peer.model) if due else None
        index, now, clusters = peer.index, self.clock.now, self._clusters
        place = {"t": t, "index": index, "cluster": clusters[index]}
        told = {"attack": peer.attack} if peer.attack is not None else {}
        metric = MetricRow(
            **place,
            precision=precision(bag, index, clusters),
            recall=recall(bag, index, clusters),
            bag_size=len(bag),
            payload_sent=peer.sent,
            payload_received=peer.received,
            missing=peer.missing,
            seconds=Seconds(
                train=peer.trained - peer.began,
                match=now - peer.trained,
                round=now - peer.began,
            ),
            time=now,
            notes=notes | peer.notes | told,
        )
        peer.notes = {}
        topology = TopologyRow(**place, neighbours=list(neighbours), bag=sorted(bag))
        self._rows.append(Finished(metric, topology, judgement))
