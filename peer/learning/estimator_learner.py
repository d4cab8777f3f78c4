"""Local training of a scikit-learn classifier, which shows that a learner need not be torch's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.errors import UserError
from peer.learning.learner import Entry, Manifest, Scores, Vector
from peer.learning.names import ESTIMATORS
from peer.learning.partition import PeerData
from peer.learning.schedule import epoch_orders, held_out, learning_rate, loss_sample
from peer.plan import Plan
from peer.randomness import Purpose, generator

HIDDEN = 200


class EstimatorLearner:
    """A `peer.learning.learner.Learner` of a scikit-learn classifier with `partial_fit`.

    The vector holds the fitted arrays: `coef_` and `intercept_`, or those of every layer. Inputs
    are flattened. The plan's batch order is used; scikit-learn's own shuffling is off.
    """

    def __init__(self, kind: str, data: PeerData, plan: Plan, index: int) -> None:
        """Raises UserError when `kind` is none of `ESTIMATORS`."""
        if kind not in ESTIMATORS:
            raise UserError(f"there is no estimator {kind!r}", f"there are {', '.join(ESTIMATORS)}")
        self._kind = kind
        self._data = data
        self._plan = plan
        self._index = index
        self._train_x = data.train_x.reshape(len(data.train_y), -1)
        self._test_x = data.test_x.reshape(len(data.test_y), -1)
        self._batch = min(plan.training.batch, self.samples - plan.held_out(self.samples))
        self._manifest = Manifest(tuple(Entry(n, s) for n, s in self._shapes().items()))

    @property
    def manifest(self) -> Manifest:
        """The layout of the vector; everything is trained."""
        return self._manifest

    @property
    def samples(self) -> int:
        """Number of training samples."""
        return len(self._data.train_y)

    def initial(self) -> Vector:
        """Return w_0 [e]: zeros, or for the hidden layers Glorot's uniform draw."""
        vector = np.zeros(self._manifest.size, dtype=np.float32)
        if self._kind == "sklearn-mlp":
            rng = generator(self._plan.seed, Purpose.INITIAL_WEIGHTS)
            for name, view in self._manifest.unflatten(vector).items():
                if name.startswith("coefs"):
                    bound = math.sqrt(6 / sum(view.shape))
                    view[...] = rng.uniform(-bound, bound, view.shape)
        return vector

    def fit(self, model: Vector, t: int) -> Vector:
        """Return `model` [e] after E local epochs of round t, with a fresh optimiser."""
        estimator = self._estimator(model, t)
        for order in epoch_orders(self._plan, self._index, t, self.samples):
            estimator.partial_fit(self._train_x[order], self._data.train_y[order])
        return self._manifest.flatten(self._arrays(estimator))

    def train_losses(self, models: list[Vector], t: int) -> list[float]:
        """Return each model's mean log loss on round t's draw of training samples."""
        chosen = loss_sample(self._plan, self._index, t, self.samples)
        return self._losses(models, chosen)

    def held_losses(self, models: list[Vector]) -> list[float]:
        """Return each model's mean log loss on the samples held out."""
        held = held_out(self._plan, self._index, self.samples)
        if not len(held):
            raise ValueError("no samples are held out")
        return self._losses(models, held)

    def _losses(self, models: list[Vector], samples: npt.NDArray[np.int64]) -> list[float]:
        x, y = self._train_x[samples], self._data.train_y[samples]
        losses = [self._scores(model, x, y).loss for model in models]
        return [loss if math.isfinite(loss) else math.inf for loss in losses]

    def evaluate(self, model: Vector) -> Scores:
        """Return the scores of `model` [e] on the peer's own test set."""
        return self._scores(model, self._test_x, self._data.test_y)

    def predict(self, model: Vector, inputs: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the class [m] of each input [m, *shape]. Raises ValueError on another shape."""
        if inputs.shape[1:] != self._data.shape:
            raise ValueError(f"inputs have shape {inputs.shape[1:]}, not {self._data.shape}")
        x = np.asarray(inputs, dtype=np.float32).reshape(len(inputs), -1)
        classes: npt.NDArray[np.int64] = self._probabilities(model, x).argmax(axis=1)
        return classes

    def _scores(
        self, model: Vector, x: npt.NDArray[np.float32], y: npt.NDArray[np.int64]
    ) -> Scores:
        probabilities = self._probabilities(model, x)
        right = float((probabilities.argmax(axis=1) == y).mean())
        likelihoods = np.maximum(probabilities[np.arange(len(y)), y], np.finfo(np.float32).tiny)
        return Scores(right, float(-np.log(likelihoods).mean()))

    def _probabilities(self, model: Vector, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        with np.errstate(all="ignore"):
            return np.asarray(self._estimator(model, 1).predict_proba(x), dtype=np.float64)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the fitted arrays' shapes; two classes need one output."""
        inputs = self._train_x.shape[1]
        outputs = self._data.classes if self._data.classes > 2 else 1
        if self._kind == "sklearn-sgd":
            return {"coef": (outputs, inputs), "intercept": (outputs,)}
        return {
            "coefs.0": (inputs, HIDDEN),
            "intercepts.0": (HIDDEN,),
            "coefs.1": (HIDDEN, outputs),
            "intercepts.1": (outputs,),
        }

    def _estimator(self, model: Vector, t: int) -> Any:
        """Return a classifier that has the weights of `model` [e], ready for round t."""
        arrays = self._manifest.unflatten(model)
        estimator = self._sgd(t) if self._kind == "sklearn-sgd" else self._mlp(t)
        # One step on a blank batch makes scikit-learn create its arrays; then ours replace them.
        blank = np.zeros((self._batch, self._train_x.shape[1]), dtype=np.float32)
        classes = np.arange(self._data.classes)
        estimator.partial_fit(blank, classes[[0] * self._batch], classes=classes)
        for name, array in self._arrays(estimator).items():
            array[...] = arrays[name]
        # The blank step's momentum goes with the optimiser; partial_fit makes a new one.
        vars(estimator).pop("_optimizer", None)
        return estimator

    def _arrays(self, estimator: Any) -> dict[str, npt.NDArray[Any]]:
        if self._kind == "sklearn-sgd":
            return {"coef": estimator.coef_, "intercept": estimator.intercept_}
        layers = enumerate(zip(estimator.coefs_, estimator.intercepts_, strict=True))
        return {
            name: array
            for i, (coef, intercept) in layers
            for name, array in ((f"coefs.{i}", coef), (f"intercepts.{i}", intercept))
        }

    def _sgd(self, t: int) -> Any:
        from sklearn.linear_model import SGDClassifier

        return SGDClassifier(
            loss="log_loss",
            alpha=self._plan.training.weight_decay,
            learning_rate="constant",
            eta0=learning_rate(self._plan, t),
            shuffle=False,
        )

    def _mlp(self, t: int) -> Any:
        from sklearn.neural_network import MLPClassifier

        training = self._plan.training
        return MLPClassifier(
            hidden_layer_sizes=(HIDDEN,),
            solver="sgd",
            alpha=training.weight_decay * self._batch,  # scikit-learn divides it by the batch
            batch_size=self._batch,
            learning_rate_init=learning_rate(self._plan, t),
            momentum=training.momentum,
            nesterovs_momentum=False,
            shuffle=False,
            random_state=0,  # of weights that are replaced
        )
