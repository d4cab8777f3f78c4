"""scikit-learn behind the learner interface; sklearn-mlp against the torch model mlp."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from peer.errors import UserError
from peer.learning.estimator_learner import EstimatorLearner
from peer.learning.learner import Learner, Vector
from peer.learning.models import build_model
from peer.learning.names import ESTIMATORS
from peer.learning.partition import PeerData
from peer.learning.torch_learner import TorchLearner
from peer.plan import Plan, TrainingPlan


def make_data(classes: int = 3, m: int = 90) -> PeerData:
    rng = np.random.default_rng(1)
    y = rng.integers(classes, size=m + 60)
    x = (rng.normal(size=(m + 60, 1, 2, 3)) / 4 + y[:, None, None, None]).astype(np.float32)
    return PeerData(x[:m], y[:m], x[m:], y[m:], classes, (1, 2, 3))


def make_plan(**training: Any) -> Plan:
    return Plan(n=2, seed=4, training=TrainingPlan(**({"batch": 20, "lr": 0.05} | training)))


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_learns_and_keeps_its_hands_off(kind: str, classes: int) -> None:
    learner: Learner = EstimatorLearner(kind, make_data(classes), make_plan(), 0)
    initial = learner.initial()
    assert initial.dtype == np.float32
    assert initial.shape == (learner.manifest.size,)
    model = initial.copy()
    model.flags.writeable = False
    for t in range(1, 6):
        model = learner.fit(model, t)
        model.flags.writeable = False
    before, after = learner.evaluate(initial), learner.evaluate(model)
    assert after.loss < before.loss
    assert after.accuracy > 0.8
    assert np.array_equal(learner.initial(), initial)
    assert np.array_equal(learner.fit(initial, 1), learner.fit(initial, 1))
    losses = learner.train_losses([initial, model], 1)
    assert losses[1] < losses[0]
    data = make_data(classes)
    agreement = learner.predict(model, data.test_x) == data.test_y
    assert agreement.mean() == pytest.approx(after.accuracy)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_w_0_is_the_same_at_every_peer(kind: str) -> None:
    first = EstimatorLearner(kind, make_data(), make_plan(), 0)
    second = EstimatorLearner(kind, make_data(m=20), make_plan(), 1)
    assert np.array_equal(first.initial(), second.initial())
    assert first.manifest.digest(first.initial()) == second.manifest.digest(second.initial())


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_the_mlp_trains_as_torch_does(decay: float) -> None:
    data, plan = make_data(m=80), make_plan()
    if decay:
        plan = make_plan(weight_decay=decay)
    estimator = EstimatorLearner("sklearn-mlp", data, plan, 1)
    torch_learner = TorchLearner(build_model("mlp", (1, 2, 3), 3, 0), data, plan, 1)
    names = {"coefs.0": "1.weight", "intercepts.0": "1.bias", "coefs.1": "3.weight"}
    names["intercepts.1"] = "3.bias"

    def to_torch(vector: Vector) -> Vector:
        arrays = estimator.manifest.unflatten(vector)
        return torch_learner.manifest.flatten({names[n]: a.T for n, a in arrays.items()})

    w = estimator.initial()
    np.testing.assert_allclose(
        torch_learner.train_losses([to_torch(w)], 2), estimator.train_losses([w], 2), rtol=1e-5
    )
    fitted, expected = to_torch(estimator.fit(w, 2)), torch_learner.fit(to_torch(w), 2)
    if decay:  # scikit-learn does not decay biases
        weights = [e.name.endswith("weight") for e in torch_learner.manifest.entries]
        assert weights == [True, False, True, False]
        fitted, expected = fitted[:1200], expected[:1200]
    np.testing.assert_allclose(fitted, expected, atol=1e-4 if decay else 1e-5)


def test_a_peer_that_lacks_classes() -> None:
    data = make_data()
    one = PeerData(
        data.train_x[:5], np.ones(5, dtype=np.int64), data.test_x, data.test_y, 3, data.shape
    )
    for kind in ESTIMATORS:
        learner = EstimatorLearner(kind, one, make_plan(), 0)
        assert np.isfinite(learner.fit(learner.initial(), 1)).all()


def test_losses_of_useless_models_are_large_or_infinite() -> None:
    for kind in ESTIMATORS:
        learner = EstimatorLearner(kind, make_data(), make_plan(), 0)
        model = np.full(learner.manifest.size, np.nan, dtype=np.float32)
        assert learner.train_losses([model], 1)[0] == math.inf


def test_errors() -> None:
    with pytest.raises(UserError, match="no estimator 'sklearn-forest'"):
        EstimatorLearner("sklearn-forest", make_data(), make_plan(), 0)
    learner = EstimatorLearner("sklearn-sgd", make_data(), make_plan(), 0)
    with pytest.raises(ValueError, match="values"):
        learner.fit(np.zeros(3, dtype=np.float32), 1)
    with pytest.raises(ValueError, match="inputs have shape"):
        learner.predict(learner.initial(), np.zeros((2, 7)))
