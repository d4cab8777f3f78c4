from __future__ import annotations

import json

import pytest

from peer.learning.sources import load_dataset
from peer.plan import Plan
from simulations.bench import bench_plan, bench_table, measure, settings, training_flops


def test_settings_are_every_model_and_size_and_then_larger_l_and_k() -> None:
    plans = [
        (plan.model, plan.n, plan.matching.l, plan.matching.k)
        for plan in settings(["mlp", "cnn"], [20, 100, 1000])
    ]
    assert plans[:6] == [(m, n, 10, 5) for m in ("mlp", "cnn") for n in (20, 100, 1000)]
    assert plans[6:] == [
        ("mlp", 100, 20, 5), ("mlp", 100, 40, 5), ("mlp", 100, 10, 10), ("mlp", 100, 10, 20),
    ]  # fmt: skip


def test_operations_of_a_round_by_hand() -> None:
    dataset = load_dataset("digits", seed=0)
    plan = Plan.model_validate(
        {"n": 2, "model": "mlp", "partition": {"train_per_peer": 7}, "training": {"epochs": 3}}
    )
    assert training_flops(plan, dataset) == 7 * 3 * 2 * (2 * 64 * 200 + 3 * 200 * 10)


@pytest.mark.slow
def test_a_measurement_has_every_figure() -> None:
    row = measure(bench_plan("mlp", 20), repeats=1, workers=2)
    assert json.loads(json.dumps(row)) == row
    assert sum(row["shares"].values()) == pytest.approx(1)
    assert row["ratio_naive"] == pytest.approx(
        row["client_rounds_per_s"] / row["naive_client_rounds_per_s"]
    )
    assert 0 < row["peak_share"] < 1
    assert row["memory_mb"] > 100
    assert bench_table([row]).count("\n") == 2
