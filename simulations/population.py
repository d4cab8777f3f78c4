"""The reference population: all n peers of a plan in one process, one after another.

It follows the rules and draws of live peers in lockstep, round by round, with nothing lost on the
way: what a network run must reproduce, and what it is compared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from peer.aggregation import with_own_statistics
from peer.defence import Mixed, mix, refusals
from peer.errors import ProtocolError
from peer.learning.learner import Learner, Vector
from peer.matching.base import Evidence, MatcherSettings
from peer.matching.registry import create_matcher
from peer.matching.similarity import GradientEvidence, gradient_similarity, loss_similarity
from peer.matching.sketch import CountSketch
from peer.merit import precision, recall
from peer.network.vectors import WIDTH, Precision, decode_vector, encode_vector
from peer.plan import Plan
from peer.randomness import Purpose, generator

if TYPE_CHECKING:
    from simulations.attacks import Threat

Models = Sequence[Vector] | npt.NDArray[np.float32]
"""A model [e] of each of the n peers: rows of a matrix, or few vectors, each for many peers."""

Row = dict[str, Any]
"""One peer's line of the metrics: t, index, cluster, accuracy, loss, bag, neighbours, precision,
recall, payload_received (bytes of models and evidence), notes. JSON-able."""

SKETCH_PRECISION: Precision = "float32"
"""Sketches are small: they travel as they are, whatever the plan says of models."""


def make_learners(
    plan: Plan,
    *,
    data: str | None = None,
    model: str | None = None,
    threat: Threat | None = None,
) -> list[Learner]:
    """Return every peer's learner.

    `data` is a spec of what is dealt instead of the plan's, `model` the import path of a factory
    for a plan whose model is custom; `threat` may poison the data of some. Raises UserError when
    one of them cannot be had.
    """
    from peer.learning.build import prepare

    poisons = {} if threat is None else threat.poisons(plan)
    return [
        prepare(plan, i, data=data, dealt=True, model=model, poison=poisons.get(i))[0]
        for i in range(plan.n)
    ]


def arrive(vector: Vector, plan: Plan, precision: Precision | None = None) -> Vector | None:
    """Return a vector as it arrives, with the plan's precision unless told otherwise.

    None when the receiver would refuse it: not finite, or of a norm over the limit.
    """
    precision = precision or plan.network.precision
    try:
        return decode_vector(
            [encode_vector(vector, precision)], vector.size, precision, plan.network.norm_limit
        )
    except ProtocolError:
        return None


def offered(vector: Vector, plan: Plan) -> Vector:
    """Return a coordinator's vector as it arrives: a mean of what arrived is never refused."""
    sent = arrive(vector, plan)
    return vector if sent is None else sent


class Population:
    """The peers of `plan`, all matching by `method` (which need not be the plan's own).

    `models` holds w_i^t of every peer, each [e]; `t` is the last finished round. The learners are
    only asked, never changed, so populations may share them.
    """

    def __init__(
        self,
        plan: Plan,
        method: str,
        *,
        learners: Sequence[Learner] | None = None,
        threat: Threat | None = None,
    ) -> None:
        """Build the peers, and their learners unless given.

        `threat` says who attacks, and how; learners that are given have its poisoned data already.
        Raises UserError for a method, model or data that cannot be used.
        """
        self.plan = plan
        self.threat = threat
        self.matchers = [
            create_matcher(method, MatcherSettings.from_plan(plan, i)) for i in range(plan.n)
        ]
        self.evidence = self.matchers[0].evidence
        self.learners = make_learners(plan, threat=threat) if learners is None else learners
        if len(self.learners) != plan.n:
            raise ValueError(f"{len(self.learners)} learners for {plan.n} peers")
        self.manifest = self.learners[0].manifest
        self.initial = self.learners[0].initial()
        self.models = [self.initial] * plan.n
        self._clusters = [plan.cluster_of(i) for i in range(plan.n)]
        self.t = 0
        self.sketch: CountSketch | None = None
        if self.evidence is Evidence.GRADIENT and plan.matching.evidence == "sketch":
            trainable = self.manifest.trainable
            self.sketch = CountSketch(trainable, plan.sketch_buckets(trainable), plan.seed)

    def run(self, *, evaluate_every: int = 1) -> Iterator[list[Row]]:
        """Yield the rows of every round that is left, as each is finished.

        Accuracy and loss, of w_i^t on the peer's test set, are None except in every
        `evaluate_every`-th round and the last.
        """
        while self.t < self.plan.rounds:
            due = (self.t + 1) % evaluate_every == 0 or self.t + 1 == self.plan.rounds
            yield self.step(evaluate=due)

    def step(self, *, evaluate: bool = True) -> list[Row]:
        """Run the next round at every peer and return its rows, by index."""
        self.t += 1
        trained = [
            learner.fit(model, self.t)
            for learner, model in zip(self.learners, self.models, strict=True)
        ]
        snapshots = _Snapshots(self, trained)
        rows = []
        for i in range(self.plan.n):
            neighbours, payload = self._match(i, snapshots)
            mixed = self._mix(i, trained[i], neighbours, snapshots)
            self.models[i] = mixed.model
            rows.append(self._row(i, mixed, payload, evaluate=evaluate))
        return rows

    def _match(self, i: int, snapshots: _Snapshots) -> tuple[list[int], int]:
        """Return N_i^t and the bytes of models and evidence that peer i received for it."""
        t, seed, matcher = self.t, self.plan.seed, self.matchers[i]
        known = [j for j in range(self.plan.n) if j != i]
        asked = matcher.candidates(t, known, generator(seed, Purpose.CANDIDATES, index=i, t=t))
        similarities = self._similarities(i, asked, snapshots)
        rng = generator(seed, Purpose.SETTLE, index=i, t=t)
        settled = matcher.settle(t, known, similarities, rng)
        neighbours = [j for j in settled if snapshots.model(j) is not None]
        return neighbours, self._payload(similarities, neighbours)

    def _similarities(
        self, i: int, asked: Sequence[int], snapshots: _Snapshots
    ) -> dict[int, float]:
        """Return s_ij of those asked whose evidence arrives."""
        if self.evidence is Evidence.LOSS:
            models = {j: model for j in asked if (model := snapshots.model(j)) is not None}
            losses = self.learners[i].train_losses(list(models.values()), self.t)
            return {j: loss_similarity(loss) for j, loss in zip(models, losses, strict=True)}
        alpha, fade = self.plan.matching.alpha, self.plan.matching.fade
        return {
            j: gradient_similarity(snapshots.own_evidence(i), evidence, alpha, fade)
            for j in asked
            if (evidence := snapshots.evidence(j)) is not None
        }

    def _payload(self, heard: Mapping[int, float], neighbours: Sequence[int]) -> int:
        """Return the bytes received: evidence of those heard from, and models not part of it."""
        item = WIDTH[self.plan.network.precision]
        model = self.manifest.size * item
        if self.sketch is not None:
            evidence = 2 * self.sketch.buckets * WIDTH[SKETCH_PRECISION]
            return len(heard) * evidence + len(neighbours) * model
        update = self.manifest.trainable * item if self.evidence is Evidence.GRADIENT else 0
        return len(heard) * (model + update) + len(set(neighbours) - set(heard)) * model

    def _mix(self, i: int, own: Vector, neighbours: Sequence[int], snapshots: _Snapshots) -> Mixed:
        """Return w_i^t, and whose models are in it."""
        weights = None
        if self.plan.matching.weighting == "samples":
            weights = [self.learners[j].samples for j in (i, *neighbours)]
        mixed = mix(
            self.plan.defence,
            own,
            self.models[i],
            {j: model for j in neighbours if (model := snapshots.model(j)) is not None},
            weights=weights,
            judge=self.learners[i].held_losses,
        )
        if self.plan.training.statistics == "local":
            own_statistics = with_own_statistics(mixed.model, own, self.manifest.trainable)
            mixed = mixed._replace(model=own_statistics)
        return mixed

    def _row(self, i: int, mixed: Mixed, payload: int, *, evaluate: bool) -> Row:
        bag = self.matchers[i].bag
        scores = self.learners[i].evaluate(self.models[i]) if evaluate else None
        return {
            "t": self.t,
            "index": i,
            "cluster": self._clusters[i],
            "accuracy": scores.accuracy if scores else None,
            "loss": scores.loss if scores else None,
            "bag": sorted(bag),
            "neighbours": mixed.used,
            "precision": precision(bag, i, self._clusters),
            "recall": recall(bag, i, self._clusters),
            "payload_received": payload,
            "notes": self.matchers[i].notes | refusals(mixed.refused),
        }


class _Snapshots:
    """What the peers publish in one round, and what of it arrives at the others.

    A model or an evidence that the receiver would refuse (not finite, norm over the limit) is None.
    """

    def __init__(self, population: Population, trained: Sequence[Vector]) -> None:
        self._plan = population.plan
        self._sketch = population.sketch
        self._trainable = population.manifest.trainable
        self._initial = population.initial
        self._before = population.models.copy()
        self._trained = trained
        self._threat = population.threat
        self._forged: dict[int, Vector] = {}
        if self._threat is not None:
            self._forged = self._threat.forge(population.plan, population.t, self._before, trained)
        self._models: dict[int, Vector | None] = {}
        self._own: dict[int, GradientEvidence] = {}

    def model(self, j: int) -> Vector | None:
        """Return w_j^{t-1/2} [e], or what peer j sends instead, as it arrives."""
        if j not in self._models:
            self._models[j] = arrive(self._forged.get(j, self._trained[j]), self._plan)
        return self._models[j]

    def own_evidence(self, i: int) -> GradientEvidence:
        """Return what peer i compares others with: g_i and h_i [trainable], or their sketches."""
        if i not in self._own:
            w = self._trained[i]
            self._own[i] = self._of(w - self._before[i], w - self._initial)
        return self._own[i]

    def _of(self, g: Vector, h: Vector) -> GradientEvidence:
        g, h = g[: self._trainable], h[: self._trainable]
        if self._sketch is not None:
            g, h = self._sketch.apply(g), self._sketch.apply(h)
        return GradientEvidence(g, h)

    def _told(self, j: int) -> GradientEvidence:
        """Return what peer j says of g_j and h_j: the truth about the model that it sends.

        An attacker that feigns tells of the update that it trained instead: nobody can check g.
        """
        told = self.own_evidence(j)
        if j in self._forged:
            w = self._forged[j]
            forged = self._of(w - self._before[j], w - self._initial)
            feigns = self._threat is not None and self._threat.feign
            told = GradientEvidence(told.g if feigns else forged.g, forged.h)
        return told

    def evidence(self, j: int) -> GradientEvidence | None:
        """Return the evidence of peer j as it arrives: both sketches, or g_j, and h_j from w_j."""
        told = self._told(j)
        if self._sketch is not None:
            g, h = (arrive(part, self._plan, SKETCH_PRECISION) for part in told)
        else:
            w = self.model(j)
            g = arrive(told.g, self._plan)
            h = None if w is None else (w - self._initial)[: self._trainable]
        return None if g is None or h is None else GradientEvidence(g, h)
