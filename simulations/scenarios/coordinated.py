"""The virtual federation with a coordinator: FedAvg, IFCA and CFL in virtual time.

Peers and coordinator talk as `peer.coordinated` and `bootstrap.coordinator` do: a peer reports and
gets a task, fetches the models that it needs one after the other, does its task and reports again;
what it made is fetched from it. What is to be done is said by `bootstrap.coordination.rounds`. Who
is waited for, till when, and what is done with the late are the rules of `bootstrap.coordinator`,
told as events.

[choice] A report is always on its way or waits for a task: the pauses in which a live peer has
nothing to ask are left out. No request is given up as long as both ends are there and reach each
other. Round 1 begins once all who are there have reported.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import networkx as nx

from bootstrap.coordination import fedavg
from bootstrap.coordination.rounds import (
    Answers,
    Exchange,
    Exchanges,
    Outcome,
    Round,
    Weights,
    advance,
    new_method,
)
from bootstrap.coordinator import SILENCE
from bootstrap.server import LOST_AFTER
from peer.cluster_models import best_model, initial_model
from peer.coordinated import IDLE, QUICK, SLOWEST
from peer.exchange import PULLS_AT_ONCE
from peer.learning.learner import Vector
from peer.matching.base import Evidence
from peer.network.messages import Task, Work
from peer.network.vectors import WIDTH, is_finite
from peer.standing import Standing
from simulations.population import arrive, offered
from simulations.scenarios.clock import Clock
from simulations.scenarios.federation import Federation, Member
from simulations.scenarios.learning import Learning, Rules, Snapshot, Training
from simulations.scenarios.scenario import Scenario
from simulations.scenarios.world import Delays, World

DELAYS = Delays(death=SILENCE, partition=LOST_AFTER, reunion=SLOWEST)
"""[choice] A peer that is waited for is looked at when it has been silent; one that is parted from
the coordinator counts as there until nothing was heard of it for long, and asks again at its
slowest pace."""
AGAIN = 0.2
"""Seconds until a round in which nobody answered is begun again."""


@dataclass(frozen=True, eq=False)
class Deed:
    """A task that is done: the choice that was made, or the vector [e]; neither for one that
    failed."""

    task: Task
    choice: int | None = None
    vector: Vector | None = None


@dataclass(eq=False, kw_only=True)
class CoordinatedPeer(Member):
    """One peer.

    `waits`: its report is at the coordinator, and there was no task for it. `cut_off`: what it sent
    or was to get went astray. `held` are models of the version and draw `held_of`, by number;
    `closing` came with the last task.
    """

    deed: Deed | None = None
    waits: bool = False
    cut_off: bool = False
    held: dict[int, Vector] = field(default_factory=dict)
    held_of: tuple[int, int] | None = None
    closing: Closing | None = None


@dataclass(eq=False)
class Opened:
    """The exchange that is going on; `collecting` is from whom a vector is being fetched.

    `trainings` are those that it asks for and nobody has begun yet: what they come to is settled.
    """

    exchange: Exchange
    deadline: float
    trainings: dict[int, Training]
    answers: dict[int, Vector | int | None] = field(default_factory=dict)
    collecting: set[int] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class Closing:
    """The last finished round, as its `members` are told of it: all whose model is known; after the
    last round only those that have the right one. `attempts` to split are by first member."""

    t: int
    draw: int
    members: frozenset[int]
    standing: Standing
    attempts: Mapping[int, Any]
    deadline: float


@dataclass(eq=False)
class Pull:
    """A vector being fetched from a peer, in one of the `slots`, since `began`."""

    going_on: Opened
    peer: CoordinatedPeer
    deed: Deed
    slots: Slots
    began: float = 0.0


@dataclass(frozen=True, eq=False)
class Message:
    """What is under way between the coordinator and a peer in one of its lives."""

    peer: CoordinatedPeer
    life: int
    up: bool
    size: int
    act: Callable[[], None]
    lost: Callable[[], None] | None


class Slots:
    """So many pulls at a time, first come first served."""

    def __init__(self, free: int) -> None:
        self._free = free
        self._queue: deque[Callable[[], None]] = deque()

    def enter(self, act: Callable[[], None]) -> None:
        """Run `act` when there is a slot for it."""
        self._queue.append(act)
        self._fill()

    def leave(self) -> None:
        """Give a slot back."""
        self._free += 1
        self._fill()

    def _fill(self) -> None:
        while self._free and self._queue:
            self._free -= 1
            self._queue.popleft()()


class CoordinatedFederation(Federation[CoordinatedPeer]):
    """Peers that a coordinator leads, which is node n of the network.

    `served` and `collected` count the payload bytes that the coordinator has sent and received.
    """

    def __init__(self, scenario: Scenario, learning: Learning, *, evaluate_every: int = 1) -> None:
        n = self.centre = scenario.plan.n
        graph = nx.Graph((i, n) for i in range(n))
        super().__init__(
            scenario,
            learning,
            world=World(Clock(), graph, absent=scenario.absent, delays=DELAYS),
            conditions=scenario.conditions(),
            peers=[
                CoordinatedPeer(index=i, model=learning.initial, attack=device.attack)
                for i, device in enumerate(scenario.equipment)
            ],
            evaluate_every=evaluate_every,
        )
        self.world.on_believed = self._count_the_present
        self.world.on_reachable = self._find_again
        self.served = self.collected = 0
        self._rules = Rules.of(self.plan, learning, Evidence.NONE)
        self._model_bytes = learning.manifest.size * WIDTH[self.plan.network.precision]
        self._running: set[int] = set()
        manifest = learning.manifest
        self._method = new_method(self.plan, manifest.size, manifest.trainable)
        self._exchanges: Round | Exchanges | None = None
        self._then: Callable[[Outcome | None], None] = self._end_round
        self._opened: Opened | None = None
        self._closing: Closing | None = None
        self._reported: dict[int, int] = {}
        self._owing: set[int] = set()
        self._overdue: set[int] = set()
        self._tried: set[int] = set()
        self._pulls, self._late_pulls = Slots(PULLS_AT_ONCE), Slots(1)
        self._version = -1
        self._models: Mapping[int, Vector | None] = {}
        self._offers: dict[tuple[int, int], Vector] = {}
        self._initials: dict[int, Vector] = {}
        self._initials_of = 0
        self._publish()

    def _open(self) -> None:
        for peer in self.peers:
            if self.world.alive[peer.index]:
                self._running.add(peer.index)
                self._report(peer, self._life(peer))

    def _over(self) -> bool:
        return not self._running and not self._script.awaits

    # Rounds, as the coordinator leads them

    def _there(self) -> list[int]:
        """Return the sorted indices of those that have reported and are taken to be there."""
        return sorted(self._reported)

    def _begin_round(self) -> None:
        """Begin the next round with those who are there; if nobody is, when somebody comes."""
        if not (there := self._there()):
            return
        plan, t = self.plan, self._method.version + 1
        taking_part = fedavg.participants(there, plan.central.fraction, plan.seed, t)
        weights: Weights = None
        if plan.matching.weighting == "samples":
            weights = dict(enumerate(self.learning.samples))
        self._then = self._end_round
        self._exchanges = self._method.round(t, there, taking_part, weights)
        self._advance(None)

    def _end_round(self, outcome: Outcome | None) -> None:
        if outcome is None:
            self.clock.after(AGAIN, self._begin_round)
            return
        self._close_round(outcome)
        if self._method.version < self.plan.rounds:
            self._begin_round()

    def _receive(self) -> None:
        """Find the models of those who come, or return, after the last round."""
        closing = self._closing
        if closing is None or (self._owing and self.clock.now < closing.deadline):
            return
        new = [i for i, t in self._reported.items() if t < closing.t and i not in closing.members]
        if not new:
            return

        def welcome(_: Outcome | None) -> None:
            self._tried.update(new)
            trained = {i: v for i, v in closing.standing.trained.items() if i not in new}
            self._close_round(Outcome(trained))

        self._then = welcome
        self._exchanges = self._method.settle(self.plan.rounds, sorted(new))
        self._advance(None)

    def _advance(self, answers: Answers | None) -> None:
        """Give the rounds their answers, and carry what they ask next."""
        assert self._exchanges is not None
        exchange, outcome = advance(self._exchanges, answers)
        self._publish()
        if exchange is None:
            self._exchanges = None
            self._then(outcome)
        else:
            self._carry(exchange)

    def _publish(self) -> None:
        """Let peers fetch the models of now."""
        models = self._method.models()
        if self._version != self._method.version or models.keys() != self._models.keys():
            self._version, self._models, self._offers = self._method.version, models, {}

    def _carry(self, exchange: Exchange) -> None:
        """Give peers their tasks. What they train is computed together, by whoever needs it first:
        their models, and but for the script their data, are those of now."""
        timeout = self.plan.network.round_timeout
        trainings: dict[int, Training] = {}
        if exchange.work is Work.TRAIN:
            trainings = {
                i: self.backlog.train(i, task.round, self._offer(task, task.model))
                for i, task in exchange.tasks.items()
            }
        self._opened = Opened(exchange, self.clock.now + timeout, trainings)
        self.clock.after(timeout, self._check)
        self._reckon()
        self._give_all()
        self._check()

    def _check(self) -> None:
        """Go on when nobody is waited for, or the deadline has passed and a quorum has answered."""
        going_on = self._opened
        if going_on is None:
            self._check_between()
            return
        tasks, answers = going_on.exchange.tasks, going_on.answers
        if self._owing:
            quorum = math.ceil(self.plan.central.quorum * len(tasks))
            if self.clock.now < going_on.deadline or len(answers) < quorum:
                return
            self._overdue |= self._owing
        elif not answers and not tasks.keys().isdisjoint(self._reported):
            return
        self._opened = None
        self._advance(dict(sorted(answers.items())))

    def _check_between(self) -> None:
        """No exchange is going on: see whether one can begin."""
        if self._exchanges is not None:
            return
        if self._closing is not None and self._closing.t >= self.plan.rounds:
            self._receive()
        elif self._closing is not None or all(
            i in self._reported for i in range(self.plan.n) if self.world.believes(self.centre, i)
        ):
            self._begin_round()

    def _close_round(self, outcome: Outcome) -> None:
        """Let peers know of a finished round."""
        method, last = self._method, self.plan.rounds
        standing = Standing(dict(method.places), outcome.trained)
        self._closing = Closing(
            t=method.version,
            draw=method.draw,
            members=frozenset(
                i
                for i in standing.places
                if method.version < last or method.settled(i) or i in self._tried
            ),
            standing=standing,
            attempts={own.members[0]: own.to_json() for own in outcome.attempts},
            deadline=self.clock.now + self.plan.network.round_timeout,
        )
        self._reckon()
        self._give_all()

    # Who is waited for

    def _unclosed(self, i: int) -> bool:
        """Tell whether a peer is to close the last round, and can: its models are still here."""
        closing = self._closing
        return (
            closing is not None
            and self._reported[i] < closing.t == self._version
            and i in closing.members
        )

    def _owes(self, i: int) -> bool:
        if i in self._overdue:
            return False
        going_on = self._opened
        asked = going_on is not None and i in going_on.exchange.tasks
        return (asked and going_on is not None and i not in going_on.answers) or self._unclosed(i)

    def _reckon(self) -> None:
        self._owing = {i for i in self._reported if self._owes(i)}

    def _reckon_one(self, i: int) -> None:
        if i in self._reported and self._owes(i):
            self._owing.add(i)
        else:
            self._owing.discard(i)

    def _count_the_present(self) -> None:
        """Beliefs have changed: nobody waits for those that are taken to be gone."""
        for i in [i for i in self._reported if not self.world.believes(self.centre, i)]:
            del self._reported[i]
            peer = self.peers[i]
            peer.cut_off |= peer.waits
            peer.waits = False
        self._reckon()
        self._check()

    # Tasks, and what comes of them, at the coordinator

    def _heard(self, peer: CoordinatedPeer, finished: int, deed: Deed | None) -> None:
        """A report: take in what is done, and give the next task."""
        i = peer.index
        self._reported[i] = finished
        peer.waits = True
        if deed is not None:
            self._take(peer, deed)
        self._reckon_one(i)
        self._give(peer)
        self._check()

    def _task_of(self, i: int) -> Task | None:
        """Return what a peer that has reported is to do now."""
        closing, going_on = self._closing, self._opened
        if closing is not None and self._unclosed(i):
            place = closing.standing.places[i]
            t, draw = closing.t, closing.draw
            return Task(work=Work.CLOSE, round=t, version=t, model=place, draw=draw)
        if going_on is None or i in going_on.answers or i in going_on.collecting:
            return None
        return going_on.exchange.tasks.get(i)

    def _give_all(self) -> None:
        for i in self._there():
            self._give(self.peers[i])

    def _give(self, peer: CoordinatedPeer) -> None:
        """Give a peer that waits its task, if there is one."""
        if not peer.waits or (task := self._task_of(peer.index)) is None:
            return
        peer.waits = False
        # The standing of all n peers comes with the end of a round.
        size = 8 * self.plan.n if task.work is Work.CLOSE else 0
        self._send(peer, self._assigned, task, self._closing, up=False, size=size)

    def _take(self, peer: CoordinatedPeer, deed: Deed) -> None:
        """Take in what a peer says that it has done, if that is what it was to do."""
        going_on = self._opened
        if going_on is None or self._task_of(peer.index) != deed.task:
            return
        if deed.vector is None:
            self._answer(going_on, peer, deed.choice)
            return
        going_on.collecting.add(peer.index)
        # The overdue do not keep those who deliver waiting.
        slots = self._late_pulls if peer.index in self._overdue else self._pulls
        slots.enter(partial(self._pull, Pull(going_on, peer, deed, slots)))

    def _answer(self, going_on: Opened, peer: CoordinatedPeer, answer: Vector | int | None) -> None:
        going_on.answers[peer.index] = answer
        self._overdue.discard(peer.index)
        self._reckon_one(peer.index)

    def _pull(self, pull: Pull) -> None:
        pull.began = self.clock.now
        self._send(pull.peer, self._yield, pull, up=False, lost=partial(self._miss, pull))

    def _yield(self, peer: CoordinatedPeer, pull: Pull) -> None:
        """At the peer: give out what it made, if it is still that."""
        lost = partial(self._miss, pull)
        if peer.deed is pull.deed:
            self._send(peer, self._pulled, pull, up=True, size=self._model_bytes, lost=lost)
        else:
            self._send(peer, self._declined, pull, up=True, lost=lost)

    def _pulled(self, peer: CoordinatedPeer, pull: Pull) -> None:
        assert pull.deed.vector is not None
        self._answer(pull.going_on, peer, arrive(pull.deed.vector, self.plan))
        self._end_pull(pull)

    def _declined(self, _peer: CoordinatedPeer, pull: Pull) -> None:
        self._end_pull(pull)

    def _miss(self, pull: Pull) -> None:
        """A pull comes to nothing, which is noticed when the request has timed out."""
        end = max(self.clock.now, pull.began + self.plan.network.request_timeout)
        self.clock.at(end, self._end_pull, pull)

    def _end_pull(self, pull: Pull) -> None:
        pull.going_on.collecting.discard(pull.peer.index)
        pull.slots.leave()
        if pull.peer.index in self._reported:
            self._give(pull.peer)
        self._check()

    # What a peer does

    def _report(self, peer: CoordinatedPeer, life: int) -> None:
        if life == self._life(peer):
            self._send(peer, self._heard, peer.finished, peer.deed, up=True)

    def _assigned(self, peer: CoordinatedPeer, task: Task, closing: Closing | None) -> None:
        """Fetch what a task needs, and do it; one that is done already is only told of again."""
        self._script.reach(task.round)
        if not self._script.meet(peer.index, task.round):
            return
        if peer.deed is not None and peer.deed.task == task:
            self.clock.after(IDLE, self._report, peer, self._life(peer))
            return
        if peer.held_of != (task.version, task.draw):
            peer.held_of, peer.held = (task.version, task.draw), {}
        peer.closing = closing
        self._fetch(peer, task)

    def _fetch(self, peer: CoordinatedPeer, task: Task) -> None:
        """Ask for the next model that a task needs and the peer does not hold."""
        match task.work:
            case Work.DRAW:  # initial models, which every peer computes
                needed: Sequence[int] = ()
            case Work.CHOOSE:
                needed = range(self.plan.c)
            case _:
                assert task.model is not None
                needed = (task.model,)
        missing = next((number for number in needed if number not in peer.held), None)
        if missing is None:
            self._do(peer, task)
        else:
            self._send(peer, self._serve, task, missing, up=True)

    def _serve(self, peer: CoordinatedPeer, task: Task, number: int) -> None:
        """At the coordinator: send a model, nothing for an initial one; refuse an old one."""
        if task.version != self._version:
            self._send(peer, self._refused, up=False)
            return
        size = 0 if self._models[number] is None else self._model_bytes
        model = self._offer(task, number)
        self._send(peer, self._fetched, task, number, model, up=False, size=size)

    def _refused(self, peer: CoordinatedPeer) -> None:
        self.clock.after(QUICK, self._report, peer, self._life(peer))

    def _fetched(self, peer: CoordinatedPeer, task: Task, number: int, model: Vector) -> None:
        peer.held[number] = model
        self._fetch(peer, task)

    def _do(self, peer: CoordinatedPeer, task: Task) -> None:
        match task.work:
            case Work.TRAIN:
                seconds = self._training_seconds(peer)
                training = self._training(peer, task)
                self.clock.after(seconds, self._trained, peer, self._life(peer), task, training)
            case Work.CLOSE:
                self._close(peer, task)
            case Work.DRAW:
                self._choose(peer, task, [self._initial(j, task.draw) for j in range(self.plan.c)])
            case Work.CHOOSE:
                self._choose(peer, task, [peer.held[j] for j in range(self.plan.c)])

    def _choose(self, peer: CoordinatedPeer, task: Task, models: Sequence[Vector]) -> None:
        losses = self.learning.losses(peer.index, models, task.round)
        peer.deed = Deed(task, choice=best_model(losses))
        self._report(peer, self._life(peer))

    def _training(self, peer: CoordinatedPeer, task: Task) -> Training:
        going_on = self._opened
        if going_on is not None and going_on.exchange.tasks.get(peer.index) == task:
            noted = going_on.trainings.pop(peer.index, None)
            if noted is not None:
                return noted
        assert task.model is not None
        return self.backlog.train(peer.index, task.round, peer.held[task.model])

    def _trained(self, peer: CoordinatedPeer, life: int, task: Task, training: Training) -> None:
        """Keep what came of a training to be fetched; what diverged is not given out."""
        if life != self._life(peer):
            return
        peer.trained = self.clock.now
        samples = self.learning.samples[peer.index]
        made = Snapshot(training, samples, peer.attack, self._rules, self.backlog).published
        if self.plan.method == "cfl":
            made = made - training.before
        peer.deed = Deed(task, vector=made if is_finite(made) else None)
        self._report(peer, life)

    def _close(self, peer: CoordinatedPeer, task: Task) -> None:
        """Take over the model of this peer's cluster after a round, and write the rows."""
        closing = peer.closing
        assert closing is not None
        assert task.model is not None
        i, t, standing = peer.index, task.round, closing.standing
        peer.model = peer.held[task.model]
        notes = standing.notes(i, self.plan)
        if i in closing.attempts:
            notes["attempt"] = closing.attempts[i]
        neighbours = standing.neighbours(i, self.plan.method)
        self._record(peer, t, neighbours=neighbours, bag=standing.bag(i), notes=notes)
        peer.finished = t
        peer.began = peer.trained = self.clock.now
        if t >= self.plan.rounds:
            self._running.discard(i)
        self._report(peer, self._life(peer))

    def _offer(self, task: Task, number: int | None) -> Vector:
        """Return a model [e] of a task's version and draw as peers have it."""
        assert number is not None
        if (number, task.draw) not in self._offers:
            self._offers[number, task.draw] = self._made(task, number)
        return self._offers[number, task.draw]

    def _made(self, task: Task, number: int) -> Vector:
        learning, own = self.learning, self._models[number]
        if self.plan.method == "cfl":
            assert own is not None
            return learning.initial + offered(own, self.plan)
        return self._initial(number, task.draw) if own is None else offered(own, self.plan)

    def _initial(self, j: int, draw: int) -> Vector:
        """Return the initial model j of a draw [e], as every peer computes it."""
        if self._initials_of != draw:
            self._initials_of, self._initials = draw, {}
        if j not in self._initials:
            own = self.learning
            drawn = initial_model(own.initial, own.manifest, self.plan.seed, j, draw)
            self._initials[j] = offered(drawn, self.plan)
        return self._initials[j]

    # Messages

    def _send(
        self,
        peer: CoordinatedPeer,
        act: Callable[..., None],
        *arguments: Any,
        up: bool,
        size: int = 0,
        lost: Callable[[], None] | None = None,
    ) -> None:
        """Have `act(peer, *arguments)` run when a message of `size` payload bytes has reached the
        coordinator (`up`) or the peer, or `lost()` when it cannot; without that the peer is cut
        off: it asks again once it reaches the coordinator."""
        message = Message(peer, self._life(peer), up, size, partial(act, peer, *arguments), lost)
        ends = (peer.index, self.centre) if up else (self.centre, peer.index)
        if not self.world.reaches(*ends):
            self._lose(message)
        elif not size:
            self.wire.tell(*ends, self._arrive, message)
        else:
            peer.sent += size * up
            self.served += size * (not up)
            self.wire.carry(*ends, size, self._arrive, message)

    def _arrive(self, message: Message) -> None:
        peer, size = message.peer, message.size
        # As among peers (`VirtualFederation`), what is under way is lost when a process ends.
        if message.life != self._life(peer) or not self.world.reaches(peer.index, self.centre):
            self.lost += size
            self._lose(message)
            return
        self.collected += size * message.up
        peer.received += size * (not message.up)
        message.act()

    def _lose(self, message: Message) -> None:
        if message.lost is not None:
            message.lost()
        elif message.life == self._life(message.peer):
            message.peer.cut_off = True

    # Others come and go

    def _find_again(self) -> None:
        """Some may reach the coordinator that could not: they find out when they next ask."""
        for peer in self.peers:
            if peer.cut_off:
                self.clock.after(DELAYS.reunion, self._reconnect, peer)

    def _reconnect(self, peer: CoordinatedPeer) -> None:
        if peer.cut_off and self.world.reaches(peer.index, self.centre):
            peer.cut_off = False
            self._report(peer, self._life(peer))

    def stop(self, peer: CoordinatedPeer, *, farewell: bool) -> None:
        """End a peer's process; it has its last finished round, and no more."""
        if not self.world.alive[peer.index]:
            return
        peer.deed, peer.held, peer.held_of, peer.closing = None, {}, None, None
        peer.waits = peer.cut_off = False
        self._running.discard(peer.index)
        (self.world.leave if farewell else self.world.vanish)(peer.index)
        self.wire.forget(peer.index)

    def start(self, peer: CoordinatedPeer) -> None:
        """Start a peer's process, for the first time or after its last finished round."""
        if self.world.alive[peer.index]:
            return
        peer.began = peer.trained = self.clock.now
        if peer.finished < self.plan.rounds:
            self._running.add(peer.index)
        self.world.come(peer.index)
        self._report(peer, self._life(peer))

    def become(self, i: int, *, cluster: int | None = None, attack: str | None = None) -> None:
        """A peer's data become those of another cluster, or it begins to lie."""
        super().become(i, cluster=cluster, attack=attack)
        if self._opened is not None:
            self._opened.trainings.pop(i, None)  # noted with the old data
