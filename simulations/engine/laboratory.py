"""The laboratory: rounds of a whole population on the engine, by the rules of live peers.

The matchers, their draws, what arrives of a model and what it costs are those of the network in
lockstep, as `simulations.population` has them; only where the numbers are computed differs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from peer.learning.learner import Manifest, Scores, Vector
from peer.matching.base import Evidence, MatcherSettings
from peer.matching.registry import create_matcher
from peer.matching.similarity import loss_similarity
from peer.merit import precision, recall
from peer.network.vectors import WIDTH
from peer.plan import Plan
from peer.randomness import Purpose, generator
from simulations.engine.workers import Engine
from simulations.population import SKETCH_PRECISION, Population, Row

Similarities = dict[int, dict[int, float]]
"""s_ij by i and j, of those whose evidence arrives."""


class Laboratory:
    """The peers of `plan`, all matching by `method` (which need not be the plan's own).

    `t` is the last finished round, `models` are w_i^t [n, e], `seconds` the wall time spent so far
    on train, match, aggregate and evaluate. With `exact` the rows and weights are bit by bit those
    of live peers in lockstep. An engine that is given is used from its w_0 on, and stays open; it
    may serve several laboratories of the same data, model and training, one after another.
    """

    def __init__(
        self,
        plan: Plan,
        method: str,
        *,
        workers: int | None = None,
        exact: bool = False,
        device: str = "cpu",
        data: str | None = None,
        model: str | None = None,
        engine: Engine | None = None,
    ) -> None:
        """Build the peers, and an engine unless one is given (see `Engine` for its arguments).

        Raises UserError for a method, model, data or device that cannot be used.
        """
        self.plan = plan
        self.method = method
        first = MatcherSettings.from_plan(plan, 0)
        self.matchers = [create_matcher(method, replace(first, index=i)) for i in range(plan.n)]
        self.evidence = self.matchers[0].evidence
        self._owns = engine is None
        self.engine = engine or Engine(
            plan, data=data, model=model, workers=workers, exact=exact, device=device
        )
        self.engine.reset()
        self.t = 0
        self.seconds = dict.fromkeys(("train", "match", "aggregate", "evaluate"), 0.0)
        self._sketched = plan.matching.evidence == "sketch"
        self._clusters = [plan.cluster_of(i) for i in range(plan.n)]
        self._exact: Population | None = None
        if exact:
            learners = [_DeviceLearner(self.engine, i) for i in range(plan.n)]
            self._exact = Population(plan, method, learners=learners)
            self.matchers = self._exact.matchers

    @property
    def models(self) -> npt.NDArray[np.float32]:
        """w_i^t [n, e]."""
        return self.engine.models

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
        clock = _Clock(self.seconds)
        self.engine.train(self.t)
        clock.lap("train")
        if self._exact is not None:
            rows = self._exact.step(evaluate=evaluate)
            self.engine.reset(np.stack(self._exact.models))
            clock.lap("match")
            return rows
        similarities = self._similarities(self._candidates())
        neighbours = [self._settle(i, similarities.get(i, {})) for i in range(self.plan.n)]
        clock.lap("match")
        self.engine.mix(neighbours, self._weights())
        clock.lap("aggregate")
        scores = self.engine.evaluate() if evaluate else [None] * self.plan.n
        clock.lap("evaluate")
        return [
            self._row(i, neighbours[i], similarities.get(i, {}), scores[i])
            for i in range(self.plan.n)
        ]

    def close(self) -> None:
        """End the engine, unless it was given."""
        if self._owns:
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _others(self, i: int) -> list[int]:
        others = list(range(self.plan.n))
        del others[i]
        return others

    def _candidates(self) -> list[tuple[int, int]]:
        """Return every (i, j) where peer i wants to hear from peer j."""
        t, seed = self.t, self.plan.seed
        return [
            (i, j)
            for i, matcher in enumerate(self.matchers)
            for j in matcher.candidates(
                t, self._others(i), generator(seed, Purpose.CANDIDATES, index=i, t=t)
            )
        ]

    def _similarities(self, asked: list[tuple[int, int]]) -> Similarities:
        """Return s_ij of the pairs asked for whose evidence arrives."""
        match self.evidence:
            case Evidence.LOSS:
                heard = [(i, j) for i, j in asked if self._arrives(j)]
                values = map(loss_similarity, self.engine.losses(self.t, heard))
                return _by_peer(heard, values)
            case Evidence.GRADIENT if self._sketched:
                return self._compare_sketches(asked)
            case Evidence.GRADIENT:
                return self._compare_vectors(asked)
        return {}

    def _compare_sketches(self, asked: list[tuple[int, int]]) -> Similarities:
        """Cosines of CountSketches; a sketch that would be refused is nobody's evidence."""
        if not asked:
            return {}
        self.engine.sketch()
        sketches = self.engine.sketches.astype(np.float64)
        with np.errstate(all="ignore"):
            norms = np.linalg.norm(sketches, axis=2)
            units = np.where(norms[..., None] > 0, sketches / norms[..., None], 0.0)
        sound = np.isfinite(norms)
        units[~sound] = 0.0  # what is not finite has no direction
        arrives = (sound & (norms <= self.plan.network.norm_limit)).all(axis=1)
        heard = [(i, j) for i, j in asked if arrives[j]]
        found: Similarities = {}
        for i, j in heard:
            found.setdefault(i, {})[j] = 0.0
        shares = (self.plan.matching.alpha, 1 - self.plan.matching.alpha)
        for i, own in found.items():
            others = list(own)
            g, h = (units[others, place] @ units[i, place] for place in range(2))
            values = shares[0] * g.clip(-1, 1) + shares[1] * h.clip(-1, 1)
            found[i] = dict(zip(others, values.tolist(), strict=True))
        return found

    def _compare_vectors(self, asked: list[tuple[int, int]]) -> Similarities:
        """Cosines of g and h themselves."""
        if not asked:
            return {}
        dots, own, other = self.engine.cosines(asked).transpose(1, 0, 2)
        limit = self.plan.network.norm_limit
        with np.errstate(all="ignore"):
            cosines = dots / np.sqrt(own * other)
            arrives = np.isfinite(other[0]) & (other[0] <= limit**2)
        g, h = np.where(np.isfinite(cosines), cosines, 0.0).clip(-1, 1)
        alpha = self.plan.matching.alpha
        values = (alpha * g + (1 - alpha) * h).tolist()
        heard = [arrives[place] and self._arrives(j) for place, (_, j) in enumerate(asked)]
        return _by_peer(
            [pair for pair, there in zip(asked, heard, strict=True) if there],
            [value for value, there in zip(values, heard, strict=True) if there],
        )

    def _settle(self, i: int, similarities: Mapping[int, float]) -> list[int]:
        """Return N_i^t: those of the matcher's choice whose models arrive."""
        rng = generator(self.plan.seed, Purpose.SETTLE, index=i, t=self.t)
        settled = self.matchers[i].settle(self.t, self._others(i), similarities, rng)
        return [j for j in settled if self._arrives(j)]

    def _arrives(self, j: int) -> bool:
        """Tell whether others would take the model of peer j: finite, and within the norm limit."""
        return bool(self.engine.norms[j] <= self.plan.network.norm_limit)

    def _weights(self) -> Sequence[float]:
        if self.plan.matching.weighting == "samples":
            return self.engine.samples
        return [1.0] * self.plan.n

    def _payload(self, heard: Mapping[int, float], neighbours: Sequence[int]) -> int:
        """Return the bytes received: evidence of those heard from, and models not part of it."""
        item, manifest = WIDTH[self.plan.network.precision], self.engine.manifest
        model = manifest.size * item
        gradient = self.evidence is Evidence.GRADIENT
        if gradient and self._sketched:
            buckets: int = self.engine.sketches.shape[2]
            evidence = 2 * buckets * WIDTH[SKETCH_PRECISION]
            return len(heard) * evidence + len(neighbours) * model
        update = manifest.trainable * item if gradient else 0
        return len(heard) * (model + update) + len(set(neighbours) - set(heard)) * model

    def _row(
        self, i: int, neighbours: list[int], heard: Mapping[int, float], scores: Scores | None
    ) -> Row:
        bag = self.matchers[i].bag
        return {
            "t": self.t,
            "index": i,
            "cluster": self._clusters[i],
            "accuracy": scores.accuracy if scores else None,
            "loss": scores.loss if scores else None,
            "bag": sorted(bag),
            "neighbours": neighbours,
            "precision": precision(bag, i, self._clusters),
            "recall": recall(bag, i, self._clusters),
            "payload_received": self._payload(heard, neighbours),
            "notes": self.matchers[i].notes,
        }


class _DeviceLearner:
    """The learner of one peer as `Population` wants it; the work is done by the engine's workers.

    `fit` hands out what the engine has trained at once for all peers of the round.
    """

    def __init__(self, engine: Engine, i: int) -> None:
        self._engine, self._i = engine, i
        self.samples: int = engine.samples[i]

    @property
    def manifest(self) -> Manifest:
        """The layout of the model."""
        return self._engine.manifest

    def initial(self) -> Vector:
        """Return w_0 [e]."""
        return self._engine.initial.copy()

    def fit(self, model: Vector, t: int) -> Vector:  # noqa: ARG002
        """Return w_i^{t-1/2} [e], which the engine has trained from w_i^{t-1}."""
        trained: Vector = self._engine.trained[self._i].copy()
        return trained

    def train_losses(self, models: list[Vector], t: int) -> list[float]:
        """Return F_i of each model."""
        return self._engine.losses_of(self._i, models, t)

    def held_losses(self, models: list[Vector]) -> list[float]:
        """Return the loss of each model on the samples held out."""
        return self._engine.losses_of(self._i, models, None)

    def evaluate(self, model: Vector) -> Scores:
        """Return the scores of `model` on the peer's own test set."""
        return self._engine.scores_of(self._i, model)

    def predict(self, model: Vector, inputs: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Populations never ask."""
        raise NotImplementedError


class _Clock:
    """Adds the time between laps to the totals of their names."""

    def __init__(self, totals: dict[str, float]) -> None:
        self._totals = totals
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._totals[name] += now - self._last
        self._last = now


def _by_peer(pairs: Sequence[tuple[int, int]], values: Any) -> Similarities:
    found: Similarities = {}
    for (i, j), value in zip(pairs, values, strict=True):
        found.setdefault(i, {})[j] = value
    return found
