"""The virtual federation: live peers' rounds and exchanges, in virtual time, with real learning.

Every peer lives a round as `peer.rounds` has it: train, publish, hear the candidates, settle, pull
what is missing, average. What it asks for, when an answer must wait, what is given up and when a
peer that fell behind catches up are the rules of `peer.exchange` and `peer.rounds`, told as events.
[choice] A peer that has finished serves on to the end; the progress of others is known without
delay.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from peer.aggregation import with_own_statistics
from peer.defence import mix, refusals
from peer.exchange import PULLS_AT_ONCE
from peer.learning.learner import Vector
from peer.matching.base import Evidence, Matcher, MatcherSettings
from peer.matching.local import Local
from peer.matching.registry import create_matcher
from peer.matching.selection import draw
from peer.matching.similarity import gradient_similarities, loss_similarity
from peer.network.vectors import WIDTH
from peer.plan import Plan
from peer.randomness import Purpose, generator
from peer.rounds import typical
from simulations.population import SKETCH_PRECISION
from simulations.scenarios.clock import Clock
from simulations.scenarios.federation import Federation, Member
from simulations.scenarios.learning import Learning, Rules, Snapshot, Training
from simulations.scenarios.scenario import Scenario
from simulations.scenarios.world import Delays, World

Kind = Literal["probe", "pull", "pull-both", "pull-newest"]
"""Sketches; a model; a model with g; whatever model there is."""

Stage = Literal["away", "training", "held", "hearing", "pulling", "catching-up", "done"]


@dataclass(eq=False, slots=True)
class Exchange:
    """One request of peer `i` to peer `j` for round `t`, and its reply.

    `open` until it is answered or given up. `lost`: request or reply went astray; in lockstep it is
    asked anew when the two reach each other again. `slot`: it counts as a pull in flight.
    """

    i: int
    j: int
    t: int
    kind: Kind
    open: bool = True
    lost: bool = False
    slot: bool = False


class Checkpoint(NamedTuple):
    """What a peer has on its disk: its last finished round t, w^t [e], the matcher's state."""

    t: int
    model: Vector
    matcher: dict[str, Any]


class Progress:
    """How far the peers are that run: the least number of finished rounds, in constant time."""

    def __init__(self) -> None:
        self._finished: dict[int, int] = {}
        self._counts: Counter[int] = Counter()
        self.least = 0

    def __len__(self) -> int:
        return len(self._finished)

    def note(self, i: int, finished: int) -> None:
        """Peer i runs, and has finished so many rounds."""
        self.drop(i)
        self._finished[i] = finished
        self._counts[finished] += 1
        self.least = min(self.least, finished)
        self._raise()

    def drop(self, i: int) -> None:
        """Peer i does not run any more."""
        if i in self._finished:
            self._counts[self._finished.pop(i)] -= 1
            self._raise()

    def _raise(self) -> None:
        while self._finished and not self._counts[self.least]:
            self.least += 1


@dataclass(eq=False, kw_only=True)
class VirtualPeer(Member):
    """One peer: what it knows, and where in its round it is."""

    matcher: Matcher
    stage: Stage = "away"
    t: int = 0
    published: int = 0
    first: int = 1
    known: list[int] = field(default_factory=list)
    candidates: list[int] = field(default_factory=list)
    settled: list[int] = field(default_factory=list)
    training: Training | None = None
    own: Snapshot | None = None
    shelf: dict[int, Snapshot] = field(default_factory=dict)
    waiting: list[Exchange] = field(default_factory=list)
    asked: dict[int, Exchange] = field(default_factory=dict)
    queued: deque[Exchange] = field(default_factory=deque)
    pulls: int = 0
    heard: dict[int, Snapshot] = field(default_factory=dict)
    models: dict[int, Snapshot] = field(default_factory=dict)
    saved: Checkpoint | None = None
    resumes: bool = False

    @property
    def reached(self) -> int:
        """The round that the peer tells others it is at."""
        return max(self.published, self.finished)


class VirtualFederation(Federation[VirtualPeer]):
    """Peers among themselves."""

    def __init__(self, scenario: Scenario, learning: Learning, *, evaluate_every: int = 1) -> None:
        plan = scenario.plan
        peers = [
            VirtualPeer(
                index=i,
                model=learning.initial,
                attack=device.attack,
                matcher=_matcher(plan, i),
            )
            for i, device in enumerate(scenario.equipment)
        ]
        world = World(Clock(), scenario.graph, absent=scenario.absent, delays=Delays.of_swarm(plan))
        super().__init__(
            scenario,
            learning,
            world=world,
            conditions=scenario.conditions(),
            peers=peers,
            evaluate_every=evaluate_every,
        )
        self.world.on_believed = self._drop_the_dead
        self.world.on_reachable = self._ask_again
        self.evidence = self.peers[0].matcher.evidence
        self._rules = Rules.of(self.plan, learning, self.evidence)
        staleness = self.plan.network.staleness
        self._staleness = None if staleness == "async" else staleness
        self._alone = isinstance(self.peers[0].matcher, Local)
        self._lockstep = self.plan.lockstep
        self._progress = Progress()
        self._held: list[VirtualPeer] = []
        self._front = 0

    def _open(self) -> None:
        present = [peer for peer in self.peers if self.world.alive[peer.index]]
        for peer in present:
            self._progress.note(peer.index, 0)
        for peer in present:
            self._begin(peer, 1)

    def _over(self) -> bool:
        return not self._progress and not self._script.awaits

    # A round

    def _begin(self, peer: VirtualPeer, t: int) -> None:
        """Choose candidates and start training."""
        self._script.reach(t)
        if not self._script.meet(peer.index, t):
            return
        peer.t, peer.stage, peer.began, peer.missing = t, "training", self.clock.now, 0
        peer.known = self.world.known(peer.index, t)
        rng = generator(self.plan.seed, Purpose.CANDIDATES, index=peer.index, t=t)
        peer.candidates = peer.matcher.candidates(t, peer.known, rng)
        peer.training = self.backlog.train(peer.index, t, peer.model)
        self.clock.after(self._training_seconds(peer), self._trained, peer, self._life(peer))

    def _trained(self, peer: VirtualPeer, life: int) -> None:
        """Publish, once nobody needs the snapshot that falls off the shelf for it."""
        if life != self._life(peer):
            return
        peer.trained = self.clock.now
        if self._lockstep and not self._alone and self._outruns(peer):
            peer.stage = "held"
            self._held.append(peer)
            self.clock.after(self.plan.network.round_timeout, self._go_on, peer, life, peer.t)
        else:
            self._publish(peer)

    def _outruns(self, peer: VirtualPeer) -> bool:
        """Tell whether somebody has not finished the round whose snapshot would fall off."""
        oldest = peer.t - self.plan.network.history
        if oldest < 1:
            return False
        if self._progress.least >= oldest and len(self._progress) == self.plan.n:
            return False
        known = self.world.known(peer.index, oldest)
        return any(self.peers[j].finished < oldest for j in known)

    def _go_on(self, peer: VirtualPeer, life: int, t: int) -> None:
        """A held peer has waited long enough."""
        if peer in self._held and (life, t) == (self._life(peer), peer.t):
            self._held.remove(peer)
            self._publish(peer)

    def _release(self) -> None:
        """Let those go on whom nobody holds up any more."""
        for peer in self._held.copy():
            if peer in self._held and not self._outruns(peer):
                self._held.remove(peer)
                self._publish(peer)

    def _publish(self, peer: VirtualPeer) -> None:
        """Put the snapshot on the shelf, serve those who wait for it, and ask the candidates."""
        assert peer.training is not None
        samples = self.learning.samples[peer.index]
        own = Snapshot(peer.training, samples, peer.attack, self._rules, self.backlog)
        peer.own, peer.training = own, None
        kept = 1 if not self._lockstep else self.plan.network.history
        peer.shelf[peer.t] = own
        # Who runs asks for rounds after its last finished one; older snapshots cost memory alone.
        useless = self._progress.least if self._lockstep else 0
        for t in [t for t in peer.shelf if t <= max(useless, peer.t - kept)]:
            del peer.shelf[t]
        peer.published = peer.t
        self._front = max(self._front, peer.t)
        served, peer.waiting = peer.waiting, []
        for exchange in served:
            self._serve(peer, exchange)
        peer.heard, peer.models = {}, {}
        if self._lockstep:
            self.clock.after(
                self.plan.network.round_timeout, self._expire, peer, self._life(peer), peer.t
            )
        kinds: dict[Evidence, Kind] = {
            Evidence.GRADIENT: "pull-both" if self._rules.sketch is None else "probe"
        }
        self._ask(peer, "hearing", peer.candidates, kinds.get(self.evidence, "pull"))

    def _settle(self, peer: VirtualPeer) -> None:
        """Everyone was heard who could be: choose the neighbours, and pull what is missing."""
        similarities = self._similarities(peer)
        rng = generator(self.plan.seed, Purpose.SETTLE, index=peer.index, t=peer.t)
        peer.settled = peer.matcher.settle(peer.t, peer.known, similarities, rng)
        if self._rules.sketch is None:
            peer.models = peer.heard.copy()
        self._ask(peer, "pulling", [j for j in peer.settled if j not in peer.models], "pull")

    def _similarities(self, peer: VirtualPeer) -> dict[int, float]:
        """Return s_ij of those whose evidence came and can be used."""
        heard = sorted(peer.heard.items())
        if not heard:
            return {}
        if self.evidence is Evidence.LOSS:
            models = {j: model for j, own in heard if (model := own.model) is not None}
            losses = self.learning.losses(peer.index, list(models.values()), peer.t)
            return {j: loss_similarity(loss) for j, loss in zip(models, losses, strict=True)}
        assert peer.own is not None
        found = {j: evidence for j, own in heard if (evidence := own.evidence) is not None}
        matching = self.plan.matching
        values = gradient_similarities(
            peer.own.own, [*found.values()], matching.alpha, matching.fade
        )
        return dict(zip(found, values, strict=True))

    def _finish(self, peer: VirtualPeer) -> None:
        """Average, write the rows, and begin the next round."""
        assert peer.own is not None
        used = [j for j in peer.settled if j in peer.models and peer.models[j].model is not None]
        others = {j: model for j in used if (model := peer.models[j].model) is not None}
        weights = None
        if self.plan.matching.weighting == "samples":
            weights = [float(own.samples) for own in (peer.own, *(peer.models[j] for j in used))]
        own = peer.own.honest
        mixed = mix(
            self.plan.defence,
            own,
            peer.model,
            others,
            weights=weights,
            judge=lambda models: self.learning.losses(peer.index, models, peer.t, held=True),
        )
        model = mixed.model
        if self.plan.training.statistics == "local":
            model = with_own_statistics(model, own, self.learning.manifest.trainable)
        peer.model = model
        peer.notes |= refusals(mixed.refused)
        peer.finished = peer.t
        peer.heard, peer.models = {}, {}
        if self._script.restarts:
            peer.saved = Checkpoint(peer.t, model, peer.matcher.state())
        self._progress.note(peer.index, peer.t)
        bag, notes = peer.matcher.bag, peer.matcher.notes
        self._record(peer, peer.t, neighbours=mixed.used, bag=bag, notes=notes)
        self._release()
        if peer.t >= self.plan.rounds:
            self._done(peer)
        elif self._staleness is None:
            self._begin(peer, peer.t + 1)
        else:
            self._keep_up(peer, peer.t + 1)

    def _done(self, peer: VirtualPeer) -> None:
        peer.stage = "done"
        self._progress.drop(peer.index)

    # Exchanges

    def _ask(self, peer: VirtualPeer, stage: Stage, others: Iterable[int], kind: Kind) -> None:
        """Ask all `others` at once; go on when each has answered or was given up."""
        peer.stage = stage
        made = [Exchange(peer.index, j, peer.t, kind) for j in others]
        peer.asked = {exchange.j: exchange for exchange in made}
        if not made:
            self._heard_all(peer)
            return
        if not self._lockstep or kind == "pull-newest":
            timeout = self.plan.network.request_timeout
            self.clock.after(timeout, self._give_up_all, made)
        for exchange in made:
            if kind == "probe" or peer.pulls < PULLS_AT_ONCE:
                self._request(peer, exchange)
            else:
                peer.queued.append(exchange)

    def _request(self, peer: VirtualPeer, exchange: Exchange) -> None:
        if not self.world.believes(exchange.i, exchange.j):
            self._give_up(exchange)
            return
        if exchange.kind != "probe" and not exchange.slot:
            exchange.slot = True
            peer.pulls += 1
        if not self.world.reaches(exchange.i, exchange.j):
            exchange.lost = True
            return
        lives = self._lives(exchange)
        self.wire.tell(exchange.i, exchange.j, self._requested, exchange, lives)

    def _lives(self, exchange: Exchange) -> tuple[int, int]:
        """[choice] What is under way is lost when either process ends: connections end with it."""
        lives = self.world.incarnation
        return lives[exchange.i], lives[exchange.j]

    def _through(self, exchange: Exchange, lives: tuple[int, int]) -> bool:
        """Tell whether what was under way arrives, and note it if not."""
        arrives = self.world.reaches(exchange.i, exchange.j) and lives == self._lives(exchange)
        exchange.lost = not arrives
        return arrives

    def _requested(self, exchange: Exchange, lives: tuple[int, int]) -> None:
        if exchange.open and self._through(exchange, lives):
            self._serve(self.peers[exchange.j], exchange)

    def _serve(self, server: VirtualPeer, exchange: Exchange) -> None:
        """Answer with the snapshot that satisfies a request, refuse it, or let it wait for one."""
        if not exchange.open:
            return
        if not self.world.reaches(exchange.i, exchange.j):
            exchange.lost = True
            return
        if self._must_wait(server, exchange):
            server.waiting.append(exchange)
            self._free_slot(self.peers[exchange.i], exchange)
            return
        exact = self._lockstep and exchange.kind != "pull-newest"
        snapshot = server.shelf.get(exchange.t if exact else server.published)
        lives = self._lives(exchange)
        if snapshot is None:
            self.wire.tell(exchange.j, exchange.i, self._refused, exchange, lives)
            return
        size = self._size(exchange.kind)
        server.sent += size
        self.wire.carry(
            exchange.j, exchange.i, size, self._delivered, exchange, snapshot, size, lives
        )

    def _must_wait(self, server: VirtualPeer, exchange: Exchange) -> bool:
        """Tell whether the snapshot asked for is still to come."""
        if exchange.kind == "pull-newest":
            return server.published < 1
        if self._staleness is None:
            return False  # what is there now is what they get
        if self._lockstep and exchange.t < server.first:
            return False
        return server.published < max(1, exchange.t - self._staleness)

    def _size(self, kind: Kind) -> int:
        """Return the payload bytes of a reply, as live peers send it."""
        if self._rules.sketch is not None and kind == "probe":
            return 2 * self._rules.sketch.buckets * WIDTH[SKETCH_PRECISION]
        manifest, item = self._rules.manifest, WIDTH[self.plan.network.precision]
        return (manifest.size + manifest.trainable * (kind == "pull-both")) * item

    def _delivered(
        self, exchange: Exchange, snapshot: Snapshot, size: int, lives: tuple[int, int]
    ) -> None:
        peer = self.peers[exchange.i]
        if not self._through(exchange, lives):
            self.lost += size
            return
        peer.received += size
        if not exchange.open:
            return
        (peer.models if peer.stage == "pulling" else peer.heard)[exchange.j] = snapshot
        self._close(peer, exchange)

    def _refused(self, exchange: Exchange, lives: tuple[int, int]) -> None:
        if exchange.open and self._through(exchange, lives):
            self._give_up(exchange)

    def _give_up(self, exchange: Exchange) -> None:
        peer = self.peers[exchange.i]
        peer.missing += 1
        self._close(peer, exchange)

    def _give_up_all(self, exchanges: Sequence[Exchange]) -> None:
        for exchange in exchanges:
            if exchange.open:
                self._give_up(exchange)

    def _expire(self, peer: VirtualPeer, life: int, t: int) -> None:
        """A round's exchanges have taken too long, even for lockstep."""
        if life == self._life(peer) and t == peer.t:
            self._give_up_all([*peer.asked.values()])

    def _close(self, peer: VirtualPeer, exchange: Exchange) -> None:
        exchange.open = False
        del peer.asked[exchange.j]
        self._free_slot(peer, exchange)
        if not peer.asked:
            self._heard_all(peer)

    def _free_slot(self, peer: VirtualPeer, exchange: Exchange) -> None:
        if exchange.slot:
            exchange.slot = False
            peer.pulls -= 1
        while peer.queued and peer.pulls < PULLS_AT_ONCE:
            queued = peer.queued.popleft()
            if queued.open:
                self._request(peer, queued)

    def _heard_all(self, peer: VirtualPeer) -> None:
        match peer.stage:
            case "hearing":
                self._settle(peer)
            case "pulling":
                self._finish(peer)
            case "catching-up":
                self._caught_up(peer)

    # Others come and go

    def _drop_the_dead(self) -> None:
        """Beliefs have changed: nobody waits for those that are called dead."""
        for peer in self.peers:
            gone = [x for x in peer.asked.values() if not self.world.believes(x.i, x.j)]
            self._give_up_all(gone)
        self._release()

    def _ask_again(self) -> None:
        """In lockstep the living are asked until they answer."""
        if not self._lockstep:
            return
        for peer in self.peers:
            for exchange in [*peer.asked.values()]:
                if exchange.lost and self.world.reaches(exchange.i, exchange.j):
                    exchange.lost = False
                    self._request(peer, exchange)

    def stop(self, peer: VirtualPeer, *, farewell: bool) -> None:
        if not self.world.alive[peer.index]:
            return
        for exchange in peer.asked.values():
            exchange.open = False
        for exchange in peer.waiting:
            exchange.lost = True
        peer.asked, peer.waiting, peer.pulls = {}, [], 0
        peer.queued.clear()
        peer.shelf, peer.published, peer.own, peer.training = {}, 0, None, None
        peer.heard, peer.models = {}, {}
        peer.stage = "away"
        peer.finished = peer.saved.t if peer.saved is not None else 0
        self._progress.drop(peer.index)
        if peer in self._held:
            self._held.remove(peer)
        (self.world.leave if farewell else self.world.vanish)(peer.index)
        self.wire.forget(peer.index)

    def start(self, peer: VirtualPeer) -> None:
        if self.world.alive[peer.index]:
            return
        peer.matcher = _matcher(self.plan, peer.index)
        if peer.saved is not None:
            peer.model = peer.saved.model
            peer.matcher.restore(peer.saved.matcher)
        peer.first = peer.finished + 1
        over = peer.finished >= self.plan.rounds
        if not over:
            self._progress.note(peer.index, peer.finished)
        self.world.come(peer.index)
        if over:
            self._done(peer)
        else:
            self._keep_up(peer, peer.finished + 1)

    def _keep_up(self, peer: VirtualPeer, t: int) -> None:
        """Begin round t, or a later one if the peer has fallen behind."""
        network = self.plan.network
        slack = max(network.history, 1 + (self._staleness or 0))  # as live peers have it
        if self._alone or self._front - t < slack:
            self._begin(peer, t)
            return
        known = self.world.known(peer.index, self.plan.rounds)
        front = typical(self.peers[j].reached for j in known)
        if front - t < slack:
            self._begin(peer, t)
        else:
            self._catch_up(peer, min(front, self.plan.rounds - 1))

    def _catch_up(self, peer: VirtualPeer, front: int) -> None:
        """Pull the newest models of the bag, or of l peers drawn at random, to go on from."""
        peer.t, peer.heard = front, {}
        peer.resumes = peer.finished > 0
        self._skip_to(peer, front + 1)
        known = self.world.known(peer.index, self.plan.rounds)
        advisers = [j for j in known if j in peer.matcher.bag]
        if not advisers:
            rng = generator(self.plan.seed, Purpose.LATE_JOIN, index=peer.index, t=front)
            advisers = draw(known, self.plan.matching.l, rng)
        self._ask(peer, "catching-up", advisers, "pull-newest")

    def _caught_up(self, peer: VirtualPeer) -> None:
        """Take the model that suits the peer's training data best, and the round after theirs."""
        t = max(peer.t, typical(own.t for own in peer.heard.values())) + 1
        t = min(t, self.plan.rounds)
        models = {peer.index: peer.model} if peer.resumes else {}
        models |= {j: w for j, own in sorted(peer.heard.items()) if (w := own.model) is not None}
        self._skip_to(peer, t)
        self.world.takes_part_from(peer.index, t)
        if models:
            losses = self.learning.losses(peer.index, list(models.values()), t)
            _, chosen = min(zip(losses, models, strict=True))
            peer.model = models[chosen]
            peer.notes = {"caught_up_with": chosen}
        self._begin(peer, t)

    def _skip_to(self, peer: VirtualPeer, t: int) -> None:
        """The peer has nothing to give before round t: those who wait for that are told."""
        peer.first, peer.finished = t, t - 1
        self._progress.note(peer.index, t - 1)
        waiting, peer.waiting = peer.waiting, []
        for exchange in waiting:
            self._serve(peer, exchange)
        self._release()


def _matcher(plan: Plan, i: int) -> Matcher:
    return create_matcher(plan.method, MatcherSettings.from_plan(plan, i))
