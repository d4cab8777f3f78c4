"""The laboratory: rounds of a whole population on the engine, by the rules of live peers.

The matchers, their draws, what arrives of a model and what it costs are those of the network in
lockstep, as `simulations.population` has them; only where the numbers are computed differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from peer.defence import admitted, refusals
from peer.learning.learner import Manifest, Scores, Vector
from peer.matching.base import Evidence, MatcherSettings
from peer.matching.registry import create_matcher
from peer.matching.similarity import faded, loss_similarity
from peer.merit import precision, recall
from peer.network.vectors import WIDTH
from peer.plan import Plan
from peer.randomness import Purpose, generator
from simulations.engine.shares import Holding
from simulations.engine.workers import Engine
from simulations.population import SKETCH_PRECISION, Population, Row

if TYPE_CHECKING:
    from simulations.attacks import Threat

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
        precision: str = "float32",
        data: str | None = None,
        model: str | None = None,
        engine: Engine | None = None,
        threat: Threat | None = None,
    ) -> None:
        """Build the peers, and an engine unless one is given (see `Engine` for its arguments).

        `threat` says who attacks, and how; an engine that is given has its poisoned data already.
        Raises UserError for a method, model, data or device that cannot be used.
        """
        self.plan = plan
        self.method = method
        first = MatcherSettings.from_plan(plan, 0)
        self.matchers = [create_matcher(method, replace(first, index=i)) for i in range(plan.n)]
        self.evidence = self.matchers[0].evidence
        self._owns = engine is None
        self.engine = engine or Engine(
            plan,
            data=data,
            model=model,
            workers=workers,
            exact=exact,
            device=device,
            precision=precision,
            holdings=poisoned_holdings(plan, threat),
        )
        self.engine.reset()
        self.t = 0
        self.seconds = dict.fromkeys(("train", "match", "aggregate", "evaluate"), 0.0)
        self._sketched = plan.matching.evidence == "sketch"
        self._clusters = [plan.cluster_of(i) for i in range(plan.n)]
        # The engine mixes by means alone; other rules, and attackers, are the reference's affair.
        self._reference: Population | None = None
        if exact or threat is not None or plan.defence.rule != "mean":
            learners = [_DeviceLearner(self.engine, i) for i in range(plan.n)]
            self._reference = Population(plan, method, learners=learners, threat=threat)
            self.matchers = self._reference.matchers

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
        clock = _Clock(self.seconds, self.engine.synchronize)
        self.engine.train(self.t)
        clock.lap("train")
        if self._reference is not None:
            rows = self._reference.step(evaluate=False)
            self.engine.reset(self._reference.models)
            clock.lap("match")
            return self._judged(rows, clock) if evaluate else rows
        similarities = self._similarities(self._candidates())
        neighbours = [self._settle(i, similarities.get(i, {})) for i in range(self.plan.n)]
        clock.lap("match")
        used = self._mix(neighbours)
        clock.lap("aggregate")
        rows = [
            self._row(i, used[i], neighbours[i], similarities.get(i, {}))
            for i in range(self.plan.n)
        ]
        return self._judged(rows, clock) if evaluate else rows

    def _judged(self, rows: list[Row], clock: _Clock) -> list[Row]:
        """Return the rows with every peer's scores of w_i^t."""
        for row, scores in zip(rows, self.engine.evaluate(), strict=True):
            row |= {"accuracy": scores.accuracy, "loss": scores.loss}
        clock.lap("evaluate")
        return rows

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
        # In place: at n = 1,000 every copy is 64 MB.
        units = self.engine.sketches.astype(np.float64)
        with np.errstate(all="ignore"):
            norms = np.sqrt(np.einsum("ipb,ipb->ip", units, units))
            units /= np.where(norms > 0, norms, np.inf)[..., None]
        sound = np.isfinite(norms)
        units[~sound] = 0.0  # what is not finite has no direction
        arrives = (sound & (norms <= self.plan.network.norm_limit)).all(axis=1)
        heard = [(i, j) for i, j in asked if arrives[j]]
        found: Similarities = {}
        for i, j in heard:
            found.setdefault(i, {})[j] = 0.0
        matching = self.plan.matching
        for i, own in found.items():
            others = list(own)
            g, h = (units[others, place] @ units[i, place] for place in range(2))
            weight = faded(matching.alpha, matching.fade, *norms[i].tolist())
            values = weight * g.clip(-1, 1) + (1 - weight) * h.clip(-1, 1)
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
        matching = self.plan.matching
        norms = np.sqrt(own).T.tolist()
        weight = np.array([faded(matching.alpha, matching.fade, *pair) for pair in norms])
        values = (weight * g + (1 - weight) * h).tolist()
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

    def _mix(self, neighbours: Sequence[list[int]]) -> list[list[int]]:
        """Make w_i^t of all peers, and return whose models are in each: `peer.defence`'s rules,
        by sums of the engine."""
        defence = self.plan.defence
        used = [own.copy() for own in neighbours]
        if defence.gate:
            pairs = [(i, j) for i, own in enumerate(neighbours) if own for j in (i, *own)]
            losses = dict(zip(pairs, self.engine.losses(self.t, pairs, held=True), strict=True))
            used = [
                [j for j in own if admitted(losses[i, j], losses[i, i], defence)]
                for i, own in enumerate(neighbours)
            ]
        clips = None
        if defence.clip is not None:
            pairs = [(i, j) for i, own in enumerate(used) if own for j in (i, *own)]
            lengths = dict(zip(pairs, self.engine.distances(pairs), strict=True))
            clips = [
                {j: min(1.0, defence.clip * lengths[i, i] / max(lengths[i, j], 1e-30)) for j in own}
                for i, own in enumerate(used)
            ]
        self.engine.mix(used, self._weights(), clips)
        return used

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
        self, i: int, used: list[int], neighbours: Sequence[int], heard: Mapping[int, float]
    ) -> Row:
        bag = self.matchers[i].bag
        refused = [j for j in neighbours if j not in used]
        return {
            "t": self.t,
            "index": i,
            "cluster": self._clusters[i],
            "accuracy": None,
            "loss": None,
            "bag": sorted(bag),
            "neighbours": used,
            "precision": precision(bag, i, self._clusters),
            "recall": recall(bag, i, self._clusters),
            "payload_received": self._payload(heard, neighbours),
            "notes": self.matchers[i].notes | refusals(refused),
        }


def poisoned_holdings(plan: Plan, threat: Threat | None) -> list[Holding] | None:
    """Return what each peer holds where a threat poisons the data of some, else None."""
    poisons = {} if threat is None else threat.poisons(plan)
    if not poisons:
        return None
    return [Holding(i, plan.cluster_of(i), poison=poisons.get(i)) for i in range(plan.n)]


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
        return self._engine.trained_by(self._i)

    def train_losses(self, models: list[Vector], t: int) -> list[float]:
        """Return F_i of each model."""
        return self._engine.losses_of(self._i, models, t)

    def held_losses(self, models: list[Vector]) -> list[float]:
        """Return the loss of each model on the samples held out."""
        return self._engine.losses_of(self._i, models, 1, held=True)  # in whichever round

    def evaluate(self, model: Vector) -> Scores:
        """Return the scores of `model` on the peer's own test set."""
        return self._engine.scores_of(self._i, model)

    def predict(self, model: Vector, inputs: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Populations never ask."""
        raise NotImplementedError


class _Clock:
    """Adds the time between laps to the totals of their names; `settle` waits for what began."""

    def __init__(self, totals: dict[str, float], settle: Callable[[], None]) -> None:
        self._totals = totals
        self._settle = settle
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        self._settle()
        now = time.perf_counter()
        self._totals[name] += now - self._last
        self._last = now


def _by_peer(pairs: Sequence[tuple[int, int]], values: Any) -> Similarities:
    found: Similarities = {}
    for (i, j), value in zip(pairs, values, strict=True):
        found.setdefault(i, {})[j] = value
    return found
