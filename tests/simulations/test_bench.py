from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from peer.learning.sources import load_dataset
from peer.plan import Plan
from simulations import bench, bench_rules
from simulations.bench import (
    Setting,
    bench_table,
    measure,
    naive_clients,
    settings,
    training_flops,
)
from simulations.cli import app

JUDGED = {
    "model", "n", "device", "precision", "client_rounds_per_s", "naive_client_rounds_per_s",
    "ratio_naive", "peak_share", "memory_mb", "gpu_memory_mb", "shares",
}  # fmt: skip
TINY = Plan.model_validate(
    {
        "n": 4,
        "method": "panm-grad",
        "model": "mlp",
        "data": "digits",
        "matching": {"l": 2, "k": 1},
        "partition": {"train_per_peer": 20},
        "training": {"batch": 10},
    }
)


def test_settings_are_every_model_and_size_and_then_larger_l_and_k_and_other_e() -> None:
    measured = [
        (setting.model, setting.plan.n, setting.plan.matching.l, setting.plan.matching.k)
        for setting in settings(["mlp", "cnn"], [20, 100, 1000])
    ]
    assert measured[:6] == [(m, n, 10, 5) for m in ("mlp", "cnn") for n in (20, 100, 1000)]
    assert measured[6:] == [
        ("mlp", 100, 20, 5), ("mlp", 100, 40, 5), ("mlp", 100, 10, 10), ("mlp", 100, 10, 20),
        ("mlp-50", 100, 10, 5), ("mlp-800", 100, 10, 5),
    ]  # fmt: skip
    assert [s.model for s in settings(["cnn"], [20])] == ["cnn"] * 2  # and one of k = 10


@pytest.mark.parametrize(("model", "hidden"), [("mlp-50", 50), ("mlp", 200), ("mlp-800", 800)])
def test_operations_of_a_round_by_hand(model: str, hidden: int) -> None:
    (setting, *_) = (own for own in settings(["mlp"], [20]) if own.model == model)
    changes = {"partition": {"train_per_peer": 7}, "training": {"epochs": 3}}
    plan = Plan.model_validate({"n": 2, "model": setting.plan.model, **changes})
    flops = training_flops(Setting(model, plan, setting.factory), load_dataset("digits", seed=0))
    assert flops == 7 * 3 * 2 * (2 * 64 * hidden + 3 * hidden * 10)


def test_a_turn_of_the_naive_loop_is_as_long_as_one_of_the_engine() -> None:
    assert naive_clients(2.0, 0.05, 100) == 40
    assert naive_clients(500.0, 0.5, 1000) == 60  # half a minute is enough
    assert naive_clients(0.01, 0.05, 100) == 2
    assert naive_clients(500.0, 0.5, 20) == 20


def test_a_measurement_has_every_figure() -> None:
    row = measure(Setting("small", TINY), repeats=1, workers=0)
    assert json.loads(json.dumps(row)) == row
    assert row.keys() >= JUDGED | {"e", "l", "k", "workers", "round_s", "load"}
    assert (row["model"], row["e"], row["n"], row["device"]) == ("small", 15010, 4, "cpu")
    assert row["shares"].keys() == {"train", "match", "aggregate", "evaluate"}
    assert sum(row["shares"].values()) == pytest.approx(1)
    assert row["ratio_naive"] == pytest.approx(
        row["client_rounds_per_s"] / row["naive_client_rounds_per_s"]
    )
    assert row["peak_share"] > 0
    assert row["memory_mb"] > 100
    assert row["gpu_memory_mb"] == 0
    assert "| small | 15010 | 4 |" in bench_table([row])
    assert "GPU" not in bench_table([row])
    assert ", GPU 512 |" in bench_table([{**row, "gpu_memory_mb": 512.0}])


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace the measuring; return the rows that the command is given."""
    rows = [{**dict.fromkeys(JUDGED, 1.0), "shares": {}, "model": m} for m in ("mlp", "cnn")]

    def run_bench(*_arguments: Any, **_options: Any) -> Iterator[dict[str, Any]]:
        yield from rows

    monkeypatch.setattr(bench, "run_bench", run_bench)
    monkeypatch.setattr(bench, "bench_table", lambda given: f"{len(given)} settings")
    rules = [{"rule": "bipartition", "size": "M = 9", "ms": 1.5}]
    monkeypatch.setattr(bench_rules, "run_rules", lambda **_: rules)
    return rows


def test_the_command_writes_a_list_of_rows_and_the_rules_elsewhere(
    tmp_path: Path, stubbed: list[dict[str, Any]]
) -> None:
    file, rules = tmp_path / "rows.json", tmp_path / "rules.json"
    done = CliRunner().invoke(app, ["bench", "--json", str(file), "--rules", str(rules)])
    assert done.exit_code == 0
    assert json.loads(file.read_text()) == stubbed
    assert all(row.keys() >= JUDGED for row in json.loads(file.read_text()))
    assert json.loads(rules.read_text()) == [{"rule": "bipartition", "size": "M = 9", "ms": 1.5}]
    assert "2 settings" in done.stdout
    assert "| bipartition | M = 9 | 1.5 |" in done.stdout


def test_what_is_measured_outlives_ctrl_c(
    tmp_path: Path, stubbed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_bench(*_arguments: Any, **_options: Any) -> Iterator[dict[str, Any]]:
        yield stubbed[0]
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run_bench", run_bench)
    file = tmp_path / "rows.json"
    assert CliRunner().invoke(app, ["bench", "--json", str(file)]).exit_code != 0
    assert json.loads(file.read_text()) == stubbed[:1]
