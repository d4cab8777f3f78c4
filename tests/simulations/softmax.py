"""A learner that needs no torch, fast enough for many runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from peer.learning.learner import Entry, Manifest, Scores, Vector
from peer.plan import Plan

FEATURES, CLASSES = 20, 3
MODEL_BYTES = 4 * (FEATURES * CLASSES + 2)


class Softmax:
    """A learner of numpy alone: softmax regression on data whose labels each cluster permutes."""

    manifest = Manifest((Entry("weight", (FEATURES, CLASSES)), Entry("mean", (2,), False)))

    def __init__(
        self, plan: Plan, index: int, cluster: int | None = None, *, samples: int = 30
    ) -> None:
        self.samples = samples
        self._lr = plan.training.lr
        rng = np.random.default_rng([plan.seed, index])
        centres = np.random.default_rng(plan.seed).normal(size=(CLASSES, FEATURES))
        shift = plan.cluster_of(index) if cluster is None else cluster

        def sample(size: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
            kind = rng.integers(CLASSES, size=size)
            return centres[kind] + rng.normal(size=(size, FEATURES)) * 1.5, (kind + shift) % CLASSES

        self._train, self._test = sample(self.samples), sample(200)

    def initial(self) -> Vector:
        return np.full(self.manifest.size, 0.01, dtype=np.float32)

    def fit(self, model: Vector, t: int) -> Vector:
        weight = self._weight(model).copy()
        x, y = self._train
        for _ in range(3):
            weight -= self._lr * 0.98**t * x.T @ (self._softmax(x, weight) - np.eye(CLASSES)[y])
        return np.append(weight.ravel(), [self.samples, t]).astype(np.float32)

    def train_losses(self, models: list[Vector], t: int) -> list[float]:
        return [self._scores(model, *self._train).loss for model in models]

    def held_losses(self, models: list[Vector]) -> list[float]:
        return self.train_losses(models, 1)

    def evaluate(self, model: Vector) -> Scores:
        return self._scores(model, *self._test)

    def predict(self, model: Vector, inputs: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        best: npt.NDArray[np.int64] = np.argmax(inputs @ self._weight(model), axis=1)
        return best

    def _weight(self, model: Vector) -> npt.NDArray[np.float64]:
        return model[:-2].reshape(FEATURES, CLASSES).astype(np.float64)

    def _softmax(
        self, x: npt.NDArray[np.float64], weight: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        logits = x @ weight
        powers: npt.NDArray[np.float64] = np.exp(logits - logits.max(axis=1, keepdims=True))
        powers /= powers.sum(axis=1, keepdims=True)
        return powers

    def _scores(
        self, model: Vector, x: npt.NDArray[np.float64], y: npt.NDArray[np.int64]
    ) -> Scores:
        p = self._softmax(x, self._weight(model))
        loss = -np.log(p[np.arange(len(y)), y] + 1e-12).mean()
        return Scores(float((p.argmax(axis=1) == y).mean()), float(loss))
