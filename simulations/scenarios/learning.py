"""The learning of a scenario, which is real, and when it is computed, which is late.

What a training yields does not depend on when in the run it is computed: its model, round and data
are settled when it begins in virtual time. So trainings are noted when they begin, and all that
have been noted are computed together, many models at once, when the first of them is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Protocol, Self, TypeVar

from peer.learning.learner import Learner, Manifest, Scores, Vector
from peer.matching.base import Evidence, MatcherSettings
from peer.matching.registry import CENTRAL, create_matcher
from peer.matching.similarity import GradientEvidence
from peer.matching.sketch import CountSketch
from peer.plan import Plan
from simulations.engine.shares import Holding
from simulations.engine.workers import Engine
from simulations.population import SKETCH_PRECISION, arrive
from simulations.runs import Equipment
from simulations.scenarios.devices import forged, poison_of
from simulations.scenarios.scenario import Scenario


@dataclass(eq=False)
class Training:
    """One local training: peer, round, w^{t-1} [e]; then w^{t-1/2} [e], and the sketches of g and h
    where whoever trained made them."""

    index: int
    t: int
    before: Vector
    after: Vector | None = None
    sketches: GradientEvidence | None = None


@dataclass(eq=False)
class Judgement:
    """The scores of a model w_i^t [e] on the test set that its peer has then."""

    index: int
    model: Vector
    scores: Scores | None = None


Item = TypeVar("Item", Training, Judgement)


class Learning(Protocol):
    """Whoever trains and judges the peers' models."""

    @property
    def manifest(self) -> Manifest:
        """The layout of the model."""
        ...

    @property
    def initial(self) -> Vector:
        """w_0 [e]."""
        ...

    @property
    def samples(self) -> Sequence[int]:
        """Number of training samples of every peer [n], now."""
        ...

    def train(self, trainings: Sequence[Training]) -> None:
        """Fill in what the trainings, of distinct peers, lead to."""
        ...

    def judge(self, judgements: Sequence[Judgement]) -> None:
        """Fill in the scores of models of distinct peers."""
        ...

    def losses(
        self, i: int, models: Sequence[Vector], t: int, *, held: bool = False
    ) -> list[float]:
        """Return F_i of each model on round t's draw of peer i's training samples; `held`: on those
        that it holds out for the gate."""
        ...

    def hold(self, i: int, cluster: int, attack: str | None) -> None:
        """From now on peer i has its data as that cluster, and that attack, transform them."""
        ...


class LearnersLearning:
    """Learners, one after another: the device's own path, bit by bit.

    `remake` makes the learner of a peer, a cluster and an attack, once a script has changed them.
    """

    def __init__(
        self,
        learners: Sequence[Learner],
        remake: Callable[[int, int, str | None], Learner] | None = None,
    ) -> None:
        self._learners = list(learners)
        self._remake = remake
        self.manifest = learners[0].manifest
        self.initial = learners[0].initial()
        self.samples = [learner.samples for learner in learners]

    def train(self, trainings: Sequence[Training]) -> None:
        """One `fit` after another."""
        for own in trainings:
            own.after = self._learners[own.index].fit(own.before, own.t)

    def judge(self, judgements: Sequence[Judgement]) -> None:
        """One `evaluate` after another."""
        for own in judgements:
            own.scores = self._learners[own.index].evaluate(own.model)

    def losses(
        self, i: int, models: Sequence[Vector], t: int, *, held: bool = False
    ) -> list[float]:
        """What the learner of peer i answers."""
        learner = self._learners[i]
        return learner.held_losses([*models]) if held else learner.train_losses([*models], t)

    def hold(self, i: int, cluster: int, attack: str | None) -> None:
        """A new learner of peer i."""
        assert self._remake is not None, "these learners' data do not change"
        self._learners[i] = self._remake(i, cluster, attack)
        self.samples[i] = self._learners[i].samples


class EngineLearning:
    """The engine: all that is to be trained at once, on every core. Close it, or use a `with`."""

    def __init__(
        self,
        scenario: Scenario,
        equipment: Equipment,
        *,
        workers: int | None = None,
    ) -> None:
        """Start the engine (see there for its arguments). Raises UserError."""
        plan = scenario.plan
        devices = scenario.equipment
        states = [(i, plan.cluster_of(i), own.attack) for i, own in enumerate(devices)]
        states += scenario.states
        self._places = {state: place for place, state in enumerate(states)}
        holdings = [
            Holding(i, c, devices[i].data, poison_of(attack, plan, i)) for i, c, attack in states
        ]
        self._engine = Engine(
            plan,
            data=equipment.data,
            model=equipment.model,
            workers=workers,
            exact=equipment.exact,
            precision=equipment.precision,
            holdings=holdings,
        )
        evidence = Evidence.NONE
        if plan.method not in CENTRAL:
            evidence = create_matcher(plan.method, MatcherSettings.from_plan(plan, 0)).evidence
        self._sketched = evidence is Evidence.GRADIENT and plan.matching.evidence == "sketch"
        self.manifest = self._engine.manifest
        self.initial = self._engine.initial.copy()

    @property
    def samples(self) -> Sequence[int]:
        """Number of training samples of every peer [n], now."""
        return self._engine.samples

    def train(self, trainings: Sequence[Training]) -> None:
        """Those of one round together: they share a learning rate."""
        engine = self._engine
        for own in trainings:
            engine.models[own.index] = own.before
        rounds: dict[int, list[int]] = {}
        for own in trainings:
            rounds.setdefault(own.t, []).append(own.index)
        for t, peers in sorted(rounds.items()):
            engine.train(t, peers)
        if self._sketched:
            engine.sketch([own.index for own in trainings])
        for own in trainings:
            own.after = engine.trained[own.index].copy()
            if self._sketched:
                g, h = engine.sketches[own.index].copy()
                own.sketches = GradientEvidence(g, h)

    def judge(self, judgements: Sequence[Judgement]) -> None:
        """All together."""
        for own in judgements:
            self._engine.models[own.index] = own.model
        scores = self._engine.evaluate([own.index for own in judgements])
        for own in judgements:
            own.scores = scores[own.index]

    def losses(
        self, i: int, models: Sequence[Vector], t: int, *, held: bool = False
    ) -> list[float]:
        """By the stack where there is one."""
        return self._engine.losses_of(i, models, t, held=held)

    def hold(self, i: int, cluster: int, attack: str | None) -> None:
        """The engine has had all that may come from the beginning."""
        self._engine.hold(i, self._places[i, cluster, attack])

    def close(self) -> None:
        """End the engine."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass
class Backlog:
    """Trainings and judgements that were begun and are not computed yet.

    `batches` counts how often there was something to compute, `trained` how many trainings.
    """

    learning: Learning
    batches: int = 0
    trained: int = 0
    _trainings: list[Training] = field(default_factory=list)
    _judgements: list[Judgement] = field(default_factory=list)

    def train(self, i: int, t: int, model: Vector) -> Training:
        """Note that peer i begins the training of round t from `model`, which must not change."""
        training = Training(i, t, model)
        self._trainings.append(training)
        return training

    def judge(self, i: int, model: Vector) -> Judgement:
        """Note that `model`, which must not change, is judged with the data that peer i has now."""
        judgement = Judgement(i, model)
        self._judgements.append(judgement)
        return judgement

    def clear(self) -> None:
        """Compute everything that is noted."""
        trainings, self._trainings = self._trainings, []
        judgements, self._judgements = self._judgements, []
        for judged in _distinct(judgements):
            self.learning.judge(judged)
        for trained in _distinct(trainings):
            self.learning.train(trained)
        self.batches += bool(trainings)
        self.trained += len(trainings)


def _distinct(items: Iterable[Item]) -> list[list[Item]]:
    """Return the items in as few batches as have every peer once at most, in order."""
    batches: list[dict[int, Item]] = []
    for item in items:
        place = next((b for b in batches if item.index not in b), None)
        if place is None:
            place = {}
            batches.append(place)
        place[item.index] = item
    return [list(batch.values()) for batch in batches]


@dataclass(frozen=True)
class Rules:
    """What snapshots are made by: plan, model layout, w_0, and the sketch if one is used."""

    plan: Plan
    manifest: Manifest
    initial: Vector
    evidence: Evidence
    sketch: CountSketch | None

    @classmethod
    def of(cls, plan: Plan, learning: Learning, evidence: Evidence) -> Self:
        """Return the rules of a plan's peers."""
        sketch = None
        if evidence is Evidence.GRADIENT and plan.matching.evidence == "sketch":
            trainable = learning.manifest.trainable
            sketch = CountSketch(trainable, plan.sketch_buckets(trainable), plan.seed)
        return cls(plan, learning.manifest, learning.initial, evidence, sketch)


class Snapshot:
    """What a peer publishes after its training of a round, and what of it arrives at others.

    Values are computed when they are asked for. A model or an evidence that a receiver would refuse
    (not finite, norm over the limit) is None.
    """

    def __init__(
        self, training: Training, samples: int, attack: str | None, rules: Rules, backlog: Backlog
    ) -> None:
        self.index, self.t = training.index, training.t
        self.samples = samples
        self._training = training
        self._attack = attack
        self._rules = rules
        self._backlog = backlog

    @cached_property
    def honest(self) -> Vector:
        """w^{t-1/2} [e]."""
        if self._training.after is None:
            self._backlog.clear()
        assert self._training.after is not None
        return self._training.after

    @cached_property
    def published(self) -> Vector:
        """What the peer gives out as its model [e]."""
        before = self._training.before
        return forged(
            self._attack, self._rules.plan, self.index, self.t, before=before, trained=self.honest
        )

    @cached_property
    def model(self) -> Vector | None:
        """The model [e] as it arrives."""
        return arrive(self.published, self._rules.plan)

    @cached_property
    def own(self) -> GradientEvidence:
        """What the peer compares others with: its g and h [trainable], or their sketches."""
        after, m, sketch = self.published, self._rules.manifest.trainable, self._rules.sketch
        if sketch is not None and self._training.sketches is not None and self._attack is None:
            return self._training.sketches
        g = (after - self._training.before)[:m]
        h = (after - self._rules.initial)[:m]
        if sketch is not None:
            g, h = sketch.apply(g), sketch.apply(h)
        return GradientEvidence(g, h)

    @cached_property
    def evidence(self) -> GradientEvidence | None:
        """The evidence as it arrives: both sketches, or g, and h from the model."""
        plan = self._rules.plan
        if self._rules.sketch is not None:
            g, h = (arrive(part, plan, SKETCH_PRECISION) for part in self.own)
        else:
            g = arrive(self.own.g, plan)
            w = self.model
            h = None if w is None else (w - self._rules.initial)[: self._rules.manifest.trainable]
        return None if g is None or h is None else GradientEvidence(g, h)
