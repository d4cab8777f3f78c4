"""The engine and the laboratory against the device's own path and the reference population."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from peer.errors import FederationError, UserError
from peer.learning.build import make_learner, prepare
from peer.learning.models import MODELS
from peer.learning.names import TEXT_MODELS
from peer.learning.partition import Dealer
from peer.plan import Plan
from simulations.engine.laboratory import Laboratory
from simulations.engine.workers import Engine
from simulations.population import Population

HERE = 0
"""Workers: none but this process."""

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here")


def make_plan(**changes: Any) -> Plan:
    table: dict[str, Any] = {
        "n": 8,
        "rounds": 8,
        "model": "mlp",
        "data": "digits",
        "seed": 5,
        "matching": {"l": 3, "k": 2, "tau": 2},
        "partition": {"kind": "rotation", "clusters": 2, "train_per_peer": 70},
        "training": {"batch": 20},
    }
    for key, value in changes.items():
        table[key] = {**table[key], **value} if isinstance(table.get(key), dict) else value
    return Plan.model_validate(table)


@pytest.fixture(scope="module")
def pair() -> Iterator[Engine]:
    """Two worker processes of the plan."""
    with Engine(make_plan(), workers=2) as engine:
        yield engine


def fitted(plan: Plan, t: int = 1) -> list[np.ndarray[Any, Any]]:
    learners = [make_learner(plan, i) for i in range(plan.n)]
    return [learner.fit(learner.initial(), t) for learner in learners]


# Local training


def test_an_epoch_agrees_with_the_device() -> None:
    plan = make_plan(training={"epochs": 1, "weight_decay": 0.01, "lr_decay": 0.5})
    with Engine(plan, workers=HERE) as engine:
        engine.train(3)
        assert engine.stacked
        np.testing.assert_allclose(engine.trained, fitted(plan, 3), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("model", "tolerance"), [("mlp", 1e-4), ("lenet", 1e-4), ("cnn", 3e-3)])
def test_built_in_models_agree_with_the_device(model: str, tolerance: float) -> None:
    plan = make_plan(
        n=3, model=model, data="fashion-mnist", partition={"clusters": 4, "train_per_peer": 130},
        training={"batch": 50, "epochs": 1},
    )  # fmt: skip
    with Engine(plan, workers=HERE) as engine:
        engine.train(1)
        np.testing.assert_allclose(engine.trained, fitted(plan), rtol=0, atol=tolerance)


@GPU
@pytest.mark.parametrize(("model", "tolerance"), [("mlp", 1e-4), ("lenet", 3e-3), ("cnn", 3e-3)])
def test_built_in_models_on_a_gpu_agree_with_the_cpu(model: str, tolerance: float) -> None:
    plan = make_plan(
        n=3, model=model, data="fashion-mnist", partition={"clusters": 4, "train_per_peer": 130},
        training={"batch": 50, "epochs": 1},
    )  # fmt: skip
    with Engine(plan, device="cuda") as engine:
        assert engine.stacked
        engine.train(1)
        np.testing.assert_allclose(engine.trained, fitted(plan), rtol=0, atol=tolerance)
        assert engine.gpu_memory() > 0


def uneven_factory(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A model with dropout, nested, of images."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)), nn.Dropout(0.3),
        nn.Flatten(), nn.Linear(36, 20), nn.ReLU(), nn.Dropout(0.5), nn.Linear(20, classes),
    )  # fmt: skip


def norm_factory(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A model with both kinds of batch normalisation."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(36, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, classes),
    )  # fmt: skip


def tanh_factory(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A model that no stack computes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, classes))


def failing_factory(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A model that cannot be trained in a worker."""
    return Failing(classes)


@pytest.mark.parametrize("model", ["mlp", "lenet"])
def test_a_round_of_mixed_precision_is_one_of_float32_within_rounding(model: str) -> None:
    """Relative error of a round's update: a few hundredths, for one step's rounding is 0.004."""
    plan = make_plan(
        n=3, model=model, data="fashion-mnist", partition={"clusters": 4, "train_per_peer": 130},
        training={"batch": 50},
    )  # fmt: skip
    updates = []
    for precision in ("float32", "bfloat16"):
        with Engine(plan, precision=precision, workers=HERE) as engine:
            engine.train(1)
            updates.append(engine.trained - engine.initial)
    error = np.linalg.norm(updates[1] - updates[0], axis=1) / np.linalg.norm(updates[0], axis=1)
    assert (error > 1e-4).all()
    assert (error < 0.1).all()


def test_mixed_precision_learns_as_much(pair: Engine) -> None:
    plan = pair.plan
    (full,) = deque(Laboratory(plan, "panm-grad", engine=pair).run(), maxlen=1)
    with Laboratory(plan, "panm-grad", precision="bfloat16", workers=2) as laboratory:
        (mixed,) = deque(laboratory.run(), maxlen=1)
    means = [np.mean([row["accuracy"] for row in rows]) for rows in (full, mixed)]
    assert means[0] > 0.8
    assert means[1] == pytest.approx(means[0], abs=0.01)
    assert [row["neighbours"] for row in mixed] == [row["neighbours"] for row in full]


class Failing(nn.Module):
    """Raises in training."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.last = nn.Linear(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raise in training mode."""
        if self.training:
            raise RuntimeError("no such luck")
        return self.last(x.flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["uneven_factory", "norm_factory"])
def test_uneven_data_dropout_and_batch_norm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients with other numbers of samples, and of batches, train side by side."""
    dealt = Dealer.share
    lengths = [70, 41, 63, 8, 70, 40, 41, 22]

    def uneven(dealer: Dealer, index: int) -> Any:
        train, test = dealt(dealer, index)
        return train[: lengths[index]], test[: 300 - 10 * (index // 3)]

    monkeypatch.setattr(Dealer, "share", uneven)
    plan = make_plan(model="custom", training={"epochs": 2})
    path = f"{__name__}:{name}"
    with Engine(plan, model=path, workers=HERE) as engine:
        assert engine.stacked
        assert engine.samples == lengths
        engine.train(1)
        learners = [prepare(plan, i, model=path)[0] for i in range(plan.n)]
        expected = [learner.fit(learner.initial(), 1) for learner in learners]
        np.testing.assert_allclose(engine.trained, expected, rtol=0, atol=1e-5)
        engine.mix([[] for _ in range(plan.n)], [1.0] * plan.n)
        for learner, scores, model in zip(learners, engine.evaluate(), engine.models, strict=True):
            assert scores == pytest.approx(learner.evaluate(model.copy()), abs=1e-5)


def test_running_statistics_may_stay_local() -> None:
    plan = make_plan(n=3, model="custom", training={"epochs": 1, "statistics": "local"})
    path = f"{__name__}:norm_factory"
    with Engine(plan, model=path, workers=HERE) as engine:
        engine.train(1)
        engine.mix([[1, 2], [], [1]], [1.0] * 3)
        trained, e = engine.manifest.trainable, engine.manifest.size
        assert e - trained == 2 * (4 + 20)
        assert np.array_equal(engine.models[:, trained:], engine.trained[:, trained:])
        mean = engine.trained[:, :trained].mean(axis=0)
        np.testing.assert_allclose(engine.models[0, :trained], mean, atol=1e-6)


def test_another_model_takes_the_devices_path(caplog: pytest.LogCaptureFixture) -> None:
    plan = make_plan(n=3, model="custom")
    path = f"{__name__}:tanh_factory"
    with Engine(plan, model=path, workers=HERE) as engine:
        engine.train(1)
        assert [r.message for r in caplog.records if "one peer at a time" in r.message] == [
            "the model is trained one peer at a time, which is slower: there is no stacked Tanh"
        ]
        learners = [prepare(plan, i, model=path)[0] for i in range(plan.n)]
        expected = [learner.fit(learner.initial(), 1) for learner in learners]
        assert np.array_equal(engine.trained, expected)
        assert engine.losses(1, [(0, 1), (0, 2), (2, 1)]) == pytest.approx(
            [
                *learners[0].train_losses(expected[1:], 1),
                *learners[2].train_losses(expected[1:2], 1),
            ]
        )


def test_an_estimator_is_trained_too() -> None:
    plan = make_plan(n=3, model="sklearn-sgd", rounds=1)
    with Laboratory(plan, "random", workers=HERE) as laboratory:
        rows = laboratory.step()
    reference = Population(plan, "random")
    assert [row["accuracy"] for row in rows] == [row["accuracy"] for row in reference.step()]


# What the engine computes of the models


def test_losses_and_scores_are_the_learners(pair: Engine) -> None:
    pair.reset()
    pair.train(1)
    learners = [make_learner(pair.plan, i) for i in range(8)]
    pairs = [(i, j) for i in range(8) for j in range(8) if (i + j) % 3 == 1]
    expected = [learners[i].train_losses([pair.trained[j].copy()], 1)[0] for i, j in pairs]
    assert pair.losses(1, pairs) == pytest.approx(expected, rel=1e-5)
    assert pair.losses(1, []) == []
    others = [(j + 1) / 10 * pair.trained[j % 8] for j in range(19)]  # more than go over at once
    for i in (0, 7):
        assert pair.losses_of(i, others, 1) == pytest.approx(
            learners[i].train_losses(others, 1), rel=1e-5
        )
    assert pair.losses_of(0, [], 1) == []
    pair.mix([[] for _ in range(8)], [1.0] * 8)
    for i, scores in enumerate(pair.evaluate()):
        assert scores == pytest.approx(learners[i].evaluate(pair.models[i].copy()), rel=1e-5)


def test_mixing_weighs_neighbours(pair: Engine) -> None:
    rng = np.random.default_rng(0)
    pair.trained[:] = rng.normal(size=pair.trained.shape)
    neighbours = [sorted(rng.choice(8, rng.integers(4), replace=False)) for _ in range(8)]
    neighbours = [[int(j) for j in row if j != i] for i, row in enumerate(neighbours)]
    weights = rng.uniform(1, 5, size=8)
    pair.mix(neighbours, weights.tolist())
    for i, row in enumerate(neighbours):
        expected = np.average(pair.trained[[i, *row]], axis=0, weights=weights[[i, *row]])
        np.testing.assert_allclose(pair.models[i], expected, atol=1e-6)


# Whole rounds


def check_against_population(laboratory: Laboratory, plan: Plan, method: str) -> None:
    reference = Population(plan, method)
    for rows, expected in zip(laboratory.run(), reference.run(), strict=True):
        for row, other in zip(rows, expected, strict=True):
            assert row["accuracy"] == pytest.approx(other.pop("accuracy"), abs=0.01)
            assert row["loss"] == pytest.approx(other.pop("loss"), abs=1e-3)
            assert other == {key: row[key] for key in other}
    np.testing.assert_allclose(laboratory.models, reference.models, rtol=0, atol=1e-3)


@pytest.mark.parametrize("method", ["panm-grad", "panm-loss", "pens", "random"])
def test_the_laboratory_is_the_population(method: str, pair: Engine) -> None:
    check_against_population(Laboratory(pair.plan, method, engine=pair), pair.plan, method)


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("panm-grad", {"matching": {"evidence": "exact"}}),
        ("panm-grad", {"matching": {"evidence": "exact", "fade": 0.9, "alpha": 1.0}}),
        ("panm-grad", {"matching": {"fade": 0.9, "alpha": 1.0}}),
        (
            "panm-grad",
            {"matching": {"evidence": "exact", "alpha": 0.3}, "network": {"precision": "bfloat16"}},
        ),
        ("pens", {"network": {"precision": "float16"}}),
        ("random", {"matching": {"weighting": "samples"}, "partition": {"skew": "quantity"}}),
        ("panm-grad", {"partition": {"skew": "dirichlet", "concentration": 0.5}}),
    ],
)
def test_other_plans_in_this_process(method: str, changes: dict[str, Any]) -> None:
    plan = make_plan(**changes)
    with Laboratory(plan, method, workers=HERE) as laboratory:
        check_against_population(laboratory, plan, method)


@GPU
@pytest.mark.parametrize("exact", [False, True], ids=["stacked", "one peer at a time"])
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("panm-grad", {}),
        ("panm-grad", {"matching": {"evidence": "exact"}}),
        ("panm-loss", {"network": {"precision": "float16"}}),
    ],
)
def test_the_laboratory_on_a_gpu_is_the_population(
    method: str, changes: dict[str, Any], exact: bool
) -> None:
    plan = make_plan(**changes)
    with Laboratory(plan, method, device="cuda", exact=exact) as laboratory:
        check_against_population(laboratory, plan, method)


@pytest.mark.parametrize(
    ("method", "changes"),
    [("panm-grad", {}), ("panm-loss", {"network": {"precision": "float16"}})],
)
def test_exact_is_bit_by_bit(method: str, changes: dict[str, Any]) -> None:
    plan = make_plan(rounds=5, **changes)
    reference = Population(plan, method)
    with Laboratory(plan, method, workers=2, exact=True) as laboratory:
        assert list(laboratory.run()) == list(reference.run())
        assert np.array_equal(laboratory.models, reference.models)


def test_evaluation_may_be_rare(pair: Engine) -> None:
    plan = pair.plan.model_copy(update={"rounds": 5})
    laboratory = Laboratory(plan, "local", engine=pair)
    told = [rows[0]["t"] for rows in laboratory.run(evaluate_every=2) if rows[0]["loss"]]
    assert told == [2, 4, 5]


def test_a_share_of_a_round_includes_what_a_device_is_still_at(
    pair: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    laboratory = Laboratory(pair.plan, "random", engine=pair)
    mix, waits = pair.mix, [0.0]

    def begin(*arguments: Any) -> None:
        mix(*arguments)
        waits.append(0.5)

    monkeypatch.setattr(pair, "mix", begin)
    monkeypatch.setattr(pair, "synchronize", lambda: time.sleep(waits.pop() if waits else 0))
    laboratory.step()
    assert laboratory.seconds["aggregate"] > 0.5


@pytest.mark.parametrize("evidence", ["sketch", "exact"])
@pytest.mark.parametrize("method", ["panm-grad", "panm-loss", "random"])
def test_models_that_are_not_finite_reach_nobody(
    method: str, evidence: str, pair: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = pair.plan.model_copy(
        update={"matching": pair.plan.matching.model_copy(update={"evidence": evidence})}
    )
    laboratory = Laboratory(plan, method, engine=pair)
    train = pair.train

    def diverge(t: int) -> None:
        train(t)
        pair.trained[4] = np.nan
        pair.norms[4] = np.nan

    monkeypatch.setattr(pair, "train", diverge)
    for rows in laboratory.run():
        assert all(4 not in row["neighbours"] for row in rows)
    others = [i for i in range(8) if i != 4]
    assert np.isfinite(laboratory.models[others]).all()


@pytest.mark.slow
def test_a_thousand_peers_of_the_cnn_fit_in_eight_gigabytes() -> None:
    """Of a round all but the training of the others, which takes no more memory than that of two.

    There are not a million images: peers draw overlapping ones.
    """
    n = 1000
    plan = make_plan(
        n=n, model="cnn", data="fashion-mnist",
        partition={"clusters": 4, "train_per_peer": 500, "test_per_peer": 1000},
        training={"batch": 50, "epochs": 1},
    )  # fmt: skip
    with Engine(plan, workers=2) as engine:
        assert engine.samples == [500] * n
        engine.train(1, [0, n - 1])
        engine.sketch()
        engine.mix([[(i + 1) % n] for i in range(n)], [1.0] * n)
        engine.evaluate([0, n - 1])
        memory = engine.memory()
    print(f"{memory:.0f} MiB")
    assert 8 * n * engine.manifest.size / 2**20 < memory < 8192


# Beginnings and endings


def test_mistakes() -> None:
    with pytest.raises(UserError, match="no method magic"):
        Laboratory(make_plan(), "magic")
    with pytest.raises(UserError, match="too few"):
        Engine(make_plan(n=5000, partition={"train_per_peer": None}), workers=HERE)
    with pytest.raises(UserError, match="device"):
        Engine(make_plan(), device="abacus")
    with pytest.raises(UserError, match="bfloat16: there is no stacked Tanh"):
        Engine(make_plan(model="custom"), model=f"{__name__}:tanh_factory", precision="bfloat16")
    with pytest.raises(UserError, match="sklearn-sgd has no bfloat16"):
        Engine(make_plan(model="sklearn-sgd"), precision="bfloat16")


def test_an_exception_in_a_worker_is_one_error() -> None:
    plan = make_plan(n=4, model="custom")
    before = psutil.Process().children()
    engine = Engine(plan, model=f"{__name__}:failing_factory", workers=2)
    workers = [child for child in psutil.Process().children() if child not in before]
    assert len(workers) == 2
    with pytest.raises(FederationError, match="no such luck"):
        engine.train(1)
    assert not any(worker.is_running() for worker in workers)


def test_a_worker_that_dies_is_one_error() -> None:
    before = psutil.Process().children()
    with Engine(make_plan(n=4), workers=2) as engine:
        workers = [child for child in psutil.Process().children() if child not in before]
        workers[1].kill()
        with pytest.raises(FederationError, match="ended by itself"):
            engine.train(1)
        assert not any(worker.is_running() for worker in workers)


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        from peer.plan import Plan
        from simulations.engine.workers import Engine
        plan = Plan(n=4, model="mlp", data="digits")
        engine = Engine(plan, workers=2)
        print("ready", flush=True)
        t = 0
        while True:
            t += 1
            engine.train(t)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors.count("KeyboardInterrupt") == 1
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


def test_every_built_in_model_of_images_is_stacked() -> None:
    for model in set(MODELS) - set(TEXT_MODELS):
        plan = make_plan(n=2, model=model, data="fashion-mnist")
        with Engine(plan, workers=HERE) as engine:
            assert engine.stacked
