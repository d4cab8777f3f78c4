"""Plans run into run directories, and the `simulate` command around them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import pytest

from bootstrap.coordination.tree_store import INDEX, TREE, read_index
from peer.errors import UserError
from peer.plan import Plan
from peer.rundir import read_metrics, read_plan, read_topology
from simulations.demo import demo_plan
from simulations.figures_cfl import attempts_of
from simulations.report import write_report
from simulations.runs import (
    Equipment,
    PopulationMaker,
    changed,
    clear_run,
    compare,
    run_population,
    run_processes,
)

PLAN = Plan.model_validate(
    {
        "n": 4,
        "rounds": 2,
        "matching": {"l": 2, "k": 1},
        "partition": {"kind": "rotation", "clusters": 2, "train_per_peer": 20},
    }
)


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from simulations.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_reference_leaves_a_run_directory(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    summary = run_population(
        PLAN, tmp_path / "run", progress=lambda method, t: told.append((method, t))
    )
    rows = read_metrics(tmp_path / "run")
    assert told == [("panm-grad", 1), ("panm-grad", 2)]
    assert [(row.t, row.index) for row in rows] == [(t, i) for t in (1, 2) for i in range(4)]
    # Cumulative: the second round adds to the first.
    assert all(
        a.payload_received < b.payload_received for a, b in zip(rows, rows[4:], strict=False)
    )
    assert summary["bytes_sent"] == sum(row.payload_received for row in rows[4:])
    assert all(len(row.neighbours) == 1 for row in read_topology(tmp_path / "run"))


@pytest.mark.slow
def test_ctrl_c_keeps_the_rounds_until_then(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.toml", tmp_path / "run"
    changes = {"n": 2, "rounds": 5000, "method": "random"}
    plan.write_text(Plan.model_validate(PLAN.model_dump() | changes).to_toml())
    code = "from simulations.cli import main; main()"
    arguments = ["run", str(plan), "--backend", "processes", "--out", str(out)]
    running = subprocess.Popen([sys.executable, "-c", code, *arguments], start_new_session=True)
    try:
        rows = [out / "processes" / f"peer-{i}" / "metrics.jsonl" for i in range(2)]
        deadline = time.monotonic() + 50
        while not all(path.exists() and path.stat().st_size for path in rows):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(30) == 130
    finally:
        running.kill()
    assert {row.index for row in read_metrics(out)} == {0, 1}
    assert json.loads((out / "summary.json").read_text())["rounds"] >= 1
    assert not simulate("report", str(out)).returncode


def test_a_comparison_has_a_summary_and_a_curve_of_each_method(tmp_path: Path) -> None:
    comparison = compare(PLAN, ("local", "oracle"), tmp_path)
    assert set(comparison) == {"local", "oracle"}
    local, oracle = comparison["local"], comparison["oracle"]
    assert (local["precision"], local["bytes_sent"]) == (None, 0)
    assert (oracle["method"], oracle["precision"], oracle["clusters_found"]) == ("oracle", 1.0, 2)
    assert [t for t, _ in oracle["curve"]] == [1, 2]
    assert oracle["curve"][-1][1] == oracle["accuracy_mean"]
    assert json.loads((tmp_path / "comparison.json").read_text())["local"]["n"] == 4


def test_a_changed_plan_is_checked_again() -> None:
    assert changed(PLAN, {"n": 6, "seed": None}) == PLAN.model_copy(update={"n": 6})
    assert changed(PLAN, {"matching.l": 3}).matching.l == 3
    assert PLAN.matching.l == 2
    for key, message in (
        ("n", "n: "),
        ("matching.x", r"unknown key matching\.x"),
        ("partition.clusters", "rotation knows clusters"),
        ("n.m", "n is no table"),
    ):
        with pytest.raises(UserError, match=message):
            changed(PLAN, {key: 1 if key == "n" else 3})


def test_only_runs_are_cleared_away(tmp_path: Path) -> None:
    clear_run(tmp_path / "new")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.toml").touch()
    clear_run(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "thesis.tex").touch()
    for wrong in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(UserError, match="not a run directory"):
            clear_run(wrong)


def test_a_table_that_cannot_be_written_is_told_before_the_measuring(tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "rows.json"
    done = simulate("bench", "--json", str(file))
    assert done.returncode == 2
    assert done.stderr == f"error: cannot use {file}: No such file or directory\n"


def test_every_shipped_plan_is_valid() -> None:
    folder = files("simulations") / "plans"
    plans = {item.name: Plan.from_toml(item.read_text()) for item in folder.iterdir()}
    assert set(plans) >= {"demo.toml", "fashion-20-panm-grad.toml", "fashion-20-panm-loss.toml"}
    assert plans["label-permutation-20-cfl.toml"].partition.kind == "label-permutation"
    assert (plans["text-20-cfl.toml"].model, plans["text-20-cfl.toml"].data) == ("lstm", "own")
    assert plans["fashion-20-panm-loss.toml"].partition.clusters == 4
    assert demo_plan() == plans["demo.toml"]


def test_the_command_runs_a_plan_in_one_process_and_draws_it(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN.to_toml())
    out = tmp_path / "run"
    done = simulate(
        "run", str(tmp_path / "plan.toml"), "--backend", "one-process", "--method", "random",
        "--seed", "3", "--out", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert read_plan(out) == changed(PLAN, {"method": "random", "seed": 3})
    assert (out / "plots" / "accuracy.svg").exists()
    again = simulate("report", str(out))
    assert str(out / "plots" / "topology.png") in again.stdout.splitlines()


@pytest.mark.slow
def test_processes_run_a_central_method(tmp_path: Path) -> None:
    out = tmp_path / "run"
    summary = run_processes(changed(PLAN, {"method": "cfl"}), out)
    assert (summary["finished"], summary["clusters_found"]) == (4, 1)
    assert [len(attempts) for attempts in attempts_of(read_metrics(out)).values()] == [2]
    assert read_index(out / TREE / INDEX).places == dict.fromkeys(range(4), 0)
    assert out / "plots" / "clustering.png" in write_report(out)


@pytest.mark.parametrize("command", [["run"], ["compare"], ["run", "--backend", "laboratory"]])
def test_nothing_starts_for_a_name_that_there_is_not(command: list[str], tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.toml", tmp_path / "run"
    plan.write_text('n = 4\ndata = "digit"\n')
    done = simulate(command[0], str(plan), *command[1:], "--out", str(out))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: data: there is no data set 'digit'",
        "hint: there are digits, fashion-mnist, mnist, cifar10, own",
    ]
    assert not out.exists()


def test_the_laboratory_needs_data_to_deal(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="each peer's own data"):
        run_population(changed(PLAN, {"data": "own"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("equipment", [{"exact": True}, {"reference": True}])
def test_what_repeats_live_peers_has_no_other_precision(
    equipment: dict[str, bool], tmp_path: Path
) -> None:
    with (
        PopulationMaker(Equipment(precision="bfloat16", **equipment)) as maker,
        pytest.raises(UserError, match="live peers train in float32"),
    ):
        run_population(PLAN, tmp_path / "run", maker=maker)
    assert not (tmp_path / "run").exists()


def test_the_summary_tells_the_precision_of_products(tmp_path: Path) -> None:
    with PopulationMaker(Equipment(precision="bfloat16")) as maker:
        summary = run_population(changed(PLAN, {"rounds": 1}), tmp_path, maker=maker)
    assert summary["products"] == "bfloat16"
    assert read_plan(tmp_path) == changed(PLAN, {"rounds": 1})


def test_live_peers_have_one_precision(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN.to_toml())
    done = simulate(
        "run", str(tmp_path / "plan.toml"), "--backend", "processes", "--precision", "bfloat16"
    )
    assert done.returncode == 2
    assert "--precision are for the laboratory" in done.stderr


def test_processes_have_no_data_of_their_own(tmp_path: Path) -> None:
    for own in ({"data": "own"}, {"model": "custom"}):
        with pytest.raises(UserError, match="neither data nor a model"):
            run_processes(changed(PLAN, own), tmp_path / "run")


def test_a_coordinator_s_bytes_go_down_and_up(tmp_path: Path) -> None:
    plan = changed(PLAN, {"method": "ifca", "central.redraws": 0, "rounds": 1})
    with PopulationMaker(Equipment(reference=True)) as maker:
        summary = run_population(plan, tmp_path / "run", maker=maker)
    model = summary["bytes_sent"] // 4
    assert summary["bytes_received"] == 2 * 4 * model
    assert summary["bytes_moved"] == 3 * 4 * model


def test_plans_that_differ_in_their_method_alone_share_an_engine(tmp_path: Path) -> None:
    with PopulationMaker() as maker:
        made = [
            maker.make(changed(PLAN, changes))
            for changes in (
                {"method": "local"}, {"method": "ifca", "matching.l": 1}, {"rounds": 5},
                {"matching.loss_samples": 3}, {"seed": 1},
            )
        ]  # fmt: skip
        engines = [getattr(own, "engine", None) or own.crew._engine for own in made]  # type: ignore[attr-defined]
    assert engines[0] is engines[1] is engines[2]
    assert len(set(map(id, engines))) == 3


def test_a_mistake_is_one_line_and_a_hint(tmp_path: Path) -> None:
    done = simulate("report", str(tmp_path))
    assert done.returncode == 2
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert "is not a run directory" in error
    assert hint.startswith("hint: ")
