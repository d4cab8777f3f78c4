"""The rounds of a coordinator as exchanges with peers, whatever carries them.

A round is a generator. It yields an `Exchange`: what each of some peers is to do. It is sent what
they answered: for `Work.TRAIN` the vector that arrived, for `Work.DRAW` and `Work.CHOOSE` the
number of a model, None for an answer of no use. Who did not answer is not in there. It returns the
`Outcome`, None for a round in which nobody answered: nothing has changed then that counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from bootstrap.coordination import ifca
from bootstrap.coordination.cfl import Attempt, ClusteredServer
from bootstrap.coordination.tree import ParameterTree
from peer.cluster_models import idle
from peer.learning.learner import Vector
from peer.network.messages import Task, Work
from peer.plan import Plan

log = logging.getLogger(__name__)

Answers = Mapping[int, Vector | int | None]
Weights = Mapping[int, float] | None


@dataclass(frozen=True)
class Exchange:
    """Tasks by peer, all of the same work."""

    work: Work
    tasks: Mapping[int, Task]


@dataclass(frozen=True)
class Outcome:
    """How a round ended.

    `trained` says of those who took part which model they trained (of cfl: their node);
    `attempts` are those to split clusters.
    """

    trained: Mapping[int, int]
    attempts: Sequence[Attempt] = field(default=())


Answering = Callable[[Exchange], Answers]
Ended = TypeVar("Ended")
Exchanges = Generator[Exchange, Answers, None]
Round = Generator[Exchange, Answers, Outcome | None]


class Method(Protocol):
    """A central method between two rounds.

    Attributes:
        version: the last finished round, whose models these are.
        draw: of the initial models, where those count.
        places: the number of each peer's model.
    """

    version: int
    draw: int

    @property
    def places(self) -> dict[int, int]:
        """The number of each known peer's model."""
        ...

    def models(self) -> dict[int, Vector | None]:
        """Return what peers get by number: of cfl u_v, else a model; None for an initial one."""
        ...

    def settled(self, peer: int) -> bool:
        """Tell whether `peer` has the model that it trains."""
        ...

    def round(
        self, t: int, there: Sequence[int], taking_part: Sequence[int], weights: Weights
    ) -> Round:
        """Run round t with those who are `there`, of whom those `taking_part` train."""
        ...

    def settle(self, t: int, peers: Sequence[int]) -> Exchanges:
        """Find out which models are those of `peers`, by what they do in round t."""
        ...


class ModelRounds:
    """FedAvg and IFCA: one model, or c of which every peer trains the best on its data.

    A model is None until somebody has trained it: peers know the initial ones, the coordinator
    does not.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.c = plan.c if plan.method == "ifca" else 1
        self.version = self.draw = 0
        self.places: dict[int, int] = {}
        self.own: list[Vector | None] = [None] * self.c
        self._drawn = self.c == 1

    def models(self) -> dict[int, Vector | None]:
        """Return the models by number."""
        return dict(enumerate(self.own))

    def settled(self, peer: int) -> bool:
        """Tell whether `peer` has chosen a model."""
        return peer in self.places

    def restore(
        self, version: int, draw: int, places: Mapping[int, int], models: Sequence[Vector | None]
    ) -> None:
        """Go on after round `version`."""
        self.version, self.draw, self._drawn = version, draw, True
        self.places, self.own = dict(places), list(models)

    def round(
        self, t: int, there: Sequence[int], taking_part: Sequence[int], weights: Weights
    ) -> Round:
        """Let those who take part choose and train, and all who are there choose anew."""
        if not self._drawn:
            yield from self.draw_models(there)
        # In round 1 all have chosen by the initial models, but for who has just come.
        yield from self.settle(t, [i for i in taking_part if t > 1 or not self.settled(i)])
        trained = {i: self.places[i] for i in taking_part if self.settled(i)}
        answers = yield self._exchange(Work.TRAIN, t, trained)
        if not answers:
            return None
        moved = ifca.aggregate(
            self.own, _vectors(answers), self.places, weights, self._plan.defence
        )
        self.own, self.version = list(moved), t
        yield from self.settle(t, there)
        return Outcome({i: trained[i] for i in answers})

    def settle(self, t: int, peers: Sequence[int]) -> Exchanges:
        """Let `peers` choose the model of the least loss on their training data."""
        if self.c == 1:
            self.places |= dict.fromkeys(peers, 0)
        elif peers:
            answers = yield self._exchange(Work.CHOOSE, t, dict.fromkeys(peers))
            self.places |= _choices(answers)

    def draw_models(self, peers: Sequence[int]) -> Exchanges:
        """Draw c models until each is the best of one of `peers`.

        [choice] All c are drawn anew, not the idle ones alone; of draws that all leave some idle,
        the first with the fewest counts; everybody is asked, however few take part in a round.
        """
        fewest, draws = self.c, 0
        for draw in range(self._plan.central.redraws + 1):
            draws += 1
            answers = yield self._exchange(Work.DRAW, 1, dict.fromkeys(peers), draw)
            identities = _choices(answers)
            if (count := len(idle(identities.values(), self.c))) < fewest:
                fewest, self.draw, self.places, self._drawn = count, draw, identities, True
            if not fewest or not answers:
                break
        if self._drawn and fewest:
            log.warning(
                "ifca: in %d draws of %d initial models, %d at least were nobody's best: "
                "c may be too large", draws, self.c, fewest,
            )  # fmt: skip

    def _exchange(
        self, work: Work, t: int, models: Mapping[int, int | None], draw: int | None = None
    ) -> Exchange:
        own = self.draw if draw is None else draw
        return _exchange(work, t, self.version, models, own)


class ClusterRounds:
    """CFL: clusters that are split where their members' updates disagree, and the tree of them."""

    def __init__(self, plan: Plan, tree: ParameterTree, version: int = 0) -> None:
        clusters = [plan.cluster_of(i) for i in range(plan.n)]
        self.server = ClusteredServer(plan.cfl, tree, clusters, defence=plan.defence)
        self.version, self.draw = version, 0

    @property
    def places(self) -> dict[int, int]:
        """The node of each known peer."""
        return self.server.tree.places

    def models(self) -> dict[int, Vector | None]:
        """Return u_v of every node v."""
        return {v: node.update for v, node in enumerate(self.server.tree.nodes)}

    def settled(self, peer: int) -> bool:
        """Tell whether `peer` is in a cluster."""
        return peer in self.places and self.server.tree.at_leaf(peer)

    def round(
        self, t: int, there: Sequence[int], taking_part: Sequence[int], weights: Weights
    ) -> Round:
        """Bring those who take part to leaves, average their updates there, and split."""
        for i in there:
            self.server.tree.admit(i)
        heard = yield from self.route(t, taking_part)
        leaves = {i: self.places[i] for i in taking_part if self.settled(i)}
        answers = yield self._exchange(t, leaves)
        heard |= answers.keys()
        if not heard:
            return None
        attempts = self.server.step(t, _vectors(answers), weights)
        self.version = t
        return Outcome({i: self.places[i] for i in sorted(heard)}, attempts)

    def settle(self, t: int, peers: Sequence[int]) -> Exchanges:
        """Bring `peers` to leaves, each by its updates."""
        for i in peers:
            self.server.tree.admit(i)
        yield from self.route(t, peers)

    def route(self, t: int, peers: Iterable[int]) -> Generator[Exchange, Answers, set[int]]:
        """Bring `peers` to leaves by their updates of round t; return who answered.

        One whose update does not arrive stays where it is.
        """
        heard: set[int] = set()
        waiting = list(peers)
        while waiting := [i for i in waiting if not self.settled(i)]:
            answers = yield self._exchange(t, {i: self.places[i] for i in waiting})
            heard |= answers.keys()
            updates = _vectors(answers)
            for i, update in updates.items():
                self.server.tree.route(i, update)
            waiting = list(updates)
        return heard

    def _exchange(self, t: int, nodes: Mapping[int, int]) -> Exchange:
        return _exchange(Work.TRAIN, t, self.version, nodes)


def new_method(plan: Plan, size: int, trainable: int) -> Method:
    """Return the plan's method before its first round, for models of so many values."""
    if plan.method != "cfl":
        return ModelRounds(plan)
    return ClusterRounds(plan, ParameterTree.planted(size, trainable))


def advance(
    exchanges: Round | Exchanges, answers: Answers | None
) -> tuple[Exchange | None, Outcome | None]:
    """Return the next exchange, or None and how the round ended; `answers` are to the last one."""
    try:
        return (next(exchanges) if answers is None else exchanges.send(answers)), None
    except StopIteration as end:
        return None, end.value


def drive(exchanges: Generator[Exchange, Answers, Ended], answer: Answering) -> Ended:
    """Run exchanges to their end where nothing is lost on the way, and return how they ended."""
    try:
        exchange = next(exchanges)
        while True:
            exchange = exchanges.send(answer(exchange))
    except StopIteration as end:
        ended: Ended = end.value
        return ended


def _exchange(
    work: Work, t: int, version: int, models: Mapping[int, int | None], draw: int = 0
) -> Exchange:
    return Exchange(
        work,
        {
            i: Task(work=work, round=t, version=version, model=model, draw=draw)
            for i, model in models.items()
        },
    )


def _vectors(answers: Answers) -> dict[int, Vector]:
    return {i: answer for i, answer in answers.items() if not isinstance(answer, int | None)}


def _choices(answers: Answers) -> dict[int, int]:
    return {i: answer for i, answer in answers.items() if isinstance(answer, int)}
