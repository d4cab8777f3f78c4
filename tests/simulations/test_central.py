"""Central methods over a population, on learners whose every number is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from peer.errors import UserError
from peer.learning.learner import Entry, Manifest, Scores, Vector
from peer.plan import Plan
from simulations.central import CentralPopulation, EngineCrew, LearnerCrew
from simulations.engine.workers import Engine
from simulations.population import Row, make_learners

SIZE = 6


class Target:
    """Goes half of the way to its cluster's target; the loss is the squared distance."""

    manifest = Manifest((Entry("weight", (SIZE,)),))

    def __init__(self, target: Vector, samples: int) -> None:
        self.target = target
        self.samples = samples

    def initial(self) -> Vector:
        return np.array([1, -2, 3, 0, 5, -6], dtype=np.float32)

    def fit(self, model: Vector, t: int) -> Vector:
        return ((model + self.target) / 2).astype(np.float32)

    def train_losses(self, models: list[Vector], t: int) -> list[float]:
        return [float(np.square(model - self.target).sum()) for model in models]

    def held_losses(self, models: list[Vector]) -> list[float]:
        return self.train_losses(models, 1)

    def evaluate(self, model: Vector) -> Scores:
        (loss,) = self.train_losses([model], 1)
        return Scores(1 / (1 + loss), loss)

    def predict(self, model: Vector, inputs: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        raise NotImplementedError


TARGETS = tuple(np.array([s, -s] * (SIZE // 2), dtype=np.float32) for s in (8, -8))


def population(method: str, **changes: Any) -> CentralPopulation:
    table = {"n": 6, "rounds": 3, "partition": {"kind": "rotation", "clusters": 2}, **changes}
    plan = Plan.model_validate(table)
    crew = LearnerCrew([Target(TARGETS[plan.cluster_of(i)], i + 1) for i in range(plan.n)])
    return CentralPopulation(plan, method, crew)


def test_fedavg_goes_to_the_mean_of_all() -> None:
    central = population("fedavg")
    first, *_, last = central.run()
    # Three peers pull to one target and three to its negative: every round halves the model.
    assert np.array_equal(central.cluster_models[0], Target(TARGETS[0], 1).initial() / 8)
    assert [row["payload_received"] for row in first] == [4 * SIZE] * 6
    assert [row["payload_sent"] for row in first] == [4 * SIZE] * 6
    assert last[0]["bag"] == [1, 2, 3, 4, 5]
    assert last[0]["precision"] == pytest.approx(2 / 5)
    assert (last[0]["recall"], last[0]["cluster"], last[1]["cluster"]) == (1.0, 0, 1)


def test_weights_are_numbers_of_samples() -> None:
    central = population("fedavg", rounds=1, matching={"weighting": "samples"})
    central.step()
    # Peers 0, 2, 4 (1 + 3 + 5 samples) pull to one target, 1, 3, 5 (2 + 4 + 6) to its negative.
    pull = (9 - 12) / 21 * TARGETS[0]
    expected = (Target(TARGETS[0], 1).initial() + pull) / 2
    assert np.allclose(central.cluster_models[0], expected, rtol=1e-6)


def test_only_those_drawn_take_part() -> None:
    central = population("fedavg", central={"fraction": 0.34})
    for rows in central.run():
        took_part = [row["index"] for row in rows if row["notes"]["took_part"]]
        assert len(took_part) == 2
        for row in rows:
            part = row["index"] in took_part
            assert row["payload_sent"] == row["payload_received"] == 4 * SIZE * part
            others = [j for j in took_part if j != row["index"]]
            assert row["neighbours"] == (others if part else [])
            # All are judged by the one model.
            assert row["loss"] is not None


def test_ifca_finds_the_clusters() -> None:
    central = population("ifca", rounds=6)
    *_, last = central.run()
    assert len(set(central.identities[::2])) == len(set(central.identities[1::2])) == 1
    assert central.identities[0] != central.identities[1]
    assert {(row["precision"], row["recall"]) for row in last} == {(1.0, 1.0)}
    assert last[0]["notes"] == {"model": central.identities[0], "took_part": True, "idle": []}
    # Down two models, up one; in round 1 as many pairs as were drawn.
    assert (last[0]["payload_received"], last[0]["payload_sent"]) == (8 * SIZE, 4 * SIZE)
    # After six halvings of the way, each model is that near to its cluster's target.
    for i in (0, 1):
        way = np.abs(central.models[i] - TARGETS[i])
        assert way.max() < 15 / 2**6


def test_a_peer_that_was_never_drawn_is_judged_by_its_best_model() -> None:
    central = population("ifca", rounds=8, central={"fraction": 0.2, "redraws": 0})
    rounds = list(central.run())
    drawn = {row["index"] for rows in rounds for row in rows if row["notes"]["took_part"]}
    assert len(drawn) < 6
    for row in rounds[-1]:
        target = TARGETS[row["cluster"]]
        losses = [float(np.square(model - target).sum()) for model in central.cluster_models]
        assert row["loss"] == min(losses)
        assert row["notes"]["model"] == int(np.argmin(losses))


def test_one_model_is_fedavg() -> None:
    one, other = population("ifca", central={"clusters": 1}), population("fedavg")
    for mine, its in zip(one.run(), other.run(), strict=True):
        assert mine == its


def test_too_many_models_are_said_to_be_too_many(caplog: pytest.LogCaptureFixture) -> None:
    central = population("ifca", rounds=1, central={"clusters": 5, "redraws": 3})
    assert "in 4 draws of 5 initial models" in caplog.text
    (first,) = central.run()
    assert all(row["payload_received"] == 4 * 5 * 4 * SIZE for row in first)
    # The models that nobody trains stay as they were drawn.
    assert first[0]["notes"]["idle"]
    with pytest.raises(UserError, match="7 models are too many for 6 peers"):
        population("ifca", central={"clusters": 7})


def test_models_travel_at_the_precision_of_the_plan() -> None:
    central = population("fedavg", rounds=1, network={"precision": "float16"})
    (rows,) = central.run()
    assert rows[0]["payload_received"] == 2 * SIZE


def test_an_update_that_nobody_would_take_is_left_out() -> None:
    central = population("fedavg", rounds=1)
    crew = central.crew
    assert isinstance(crew, LearnerCrew)
    crew._learners[0].target = np.full(SIZE, np.nan, dtype=np.float32)  # type: ignore[attr-defined]
    central.step(evaluate=False)
    pull = (2 - 3) / 5 * TARGETS[0]
    expected = (Target(TARGETS[0], 1).initial() + pull) / 2
    assert np.allclose(central.cluster_models[0], expected, rtol=1e-6)


def small_plan(**central: Any) -> Plan:
    return Plan.model_validate(
        {
            "n": 5,
            "rounds": 2,
            "partition": {"kind": "rotation", "clusters": 2, "train_per_peer": 30},
            "central": {"redraws": 3, **central},
        }
    )


@pytest.mark.parametrize(("method", "fraction"), [("fedavg", 1.0), ("fedavg", 0.4), ("ifca", 1.0)])
def test_the_engine_and_learners_agree(method: str, fraction: float) -> None:
    plan = small_plan(fraction=fraction)
    reference = CentralPopulation(plan, method, LearnerCrew(make_learners(plan)))
    expected = list(reference.run())
    with Engine(plan, workers=1) as engine:
        check(CentralPopulation(plan, method, EngineCrew(engine)), reference, expected)
    with Engine(plan, workers=0, exact=True) as engine:
        exact = CentralPopulation(plan, method, EngineCrew(engine))
        assert list(exact.run()) == expected
        assert np.array_equal(exact.models, reference.models)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here")
def test_so_does_the_engine_on_a_gpu() -> None:
    plan = small_plan()
    reference = CentralPopulation(plan, "ifca", LearnerCrew(make_learners(plan)))
    expected = list(reference.run())
    with Engine(plan, device="cuda") as engine:
        check(CentralPopulation(plan, "ifca", EngineCrew(engine)), reference, expected)


def check(fast: CentralPopulation, reference: CentralPopulation, expected: list[list[Row]]) -> None:
    """Compare a run of `fast` with that of `reference`, whose rows are `expected`."""
    for others, rows in zip(expected, fast.run(), strict=True):
        assert [row["bag"] for row in rows] == [row["bag"] for row in others]
        assert [row["accuracy"] for row in rows] == pytest.approx(
            [row["accuracy"] for row in others], abs=0.01
        )
    assert np.allclose(fast.models, reference.models, atol=1e-4)


def test_the_engine_trains_those_alone_who_take_part() -> None:
    plan = small_plan(fraction=0.4)
    with Engine(plan, workers=0) as engine:
        engine.trained[:] = np.nan
        sent = EngineCrew(engine).fit([engine.initial] * plan.n, [1, 3], 1)
    assert [bool(np.isfinite(model).all()) for model in sent] == [False, True, False, True, False]
