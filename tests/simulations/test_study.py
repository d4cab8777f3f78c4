"""Studies: which runs they are, that none is made twice, and what comes of them."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from peer.errors import UserError
from peer.plan import Plan
from peer.rundir import SUMMARY, final_rows, read_json, read_metrics
from simulations import study as studies
from simulations.compare import compare, parse_seeds, parse_single
from simulations.runs import Equipment, run_population
from simulations.study import (
    Line,
    Setting,
    Study,
    Variant,
    canonical,
    cell_folder,
    note_of,
    parse_variation,
    run_study,
    time_left,
)
from simulations.tables import study_figure, study_table, write_csv

REFERENCE = Equipment(reference=True)
PLAN = Plan.model_validate(
    {
        "n": 4,
        "rounds": 2,
        "matching": {"l": 2, "k": 1},
        "partition": {"kind": "rotation", "clusters": 2, "train_per_peer": 20, "test_per_peer": 50},
    }
)
STUDY = Study(
    base=PLAN,
    settings=[Setting({"k": str(k)}, {"matching.k": k}) for k in (1, 2)],
    variants=[Variant("oracle", "oracle"), Variant("one model", "ifca", {"central.clusters": 1})],
    seeds=(0, 5),
)


def test_a_note_says_what_all_runs_share() -> None:
    assert note_of(STUDY) == "digits · rotation-2 · mlp · n=4 · 2 rounds"
    sizes = [Setting({"n": str(n)}, {"n": n}) for n in (4, 6)]
    varied = Study(PLAN, sizes, STUDY.variants, seeds=(0,))
    assert note_of(varied) == "digits · rotation-2 · mlp · 2 rounds"


def line(variant: str = "a", mean: float = 0.5, **changes: Any) -> Line:
    values: dict[str, Any] = {
        "labels": {}, "variant": variant, "seeds": 1, "accuracy_mean": mean, "accuracy_sd": None,
        "accuracy_worst": 0.25, "below_local": 1.0, "precision": None, "recall": None,
        "clusters_found": None, "bytes_moved": 1500.0, "seconds": 2.0, "runs": (),
    }  # fmt: skip
    return Line(**(values | changes))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Return the list of plans that studies have run."""
    made: list[Plan] = []

    def run(plan: Plan, out: Path, **options: Any) -> dict[str, Any]:
        made.append(plan)
        return run_population(plan, out, **options)

    monkeypatch.setattr(studies, "run_population", run)
    return made


def test_variations_are_read_as_toml_and_else_as_text() -> None:
    assert parse_variation("matching.l=6, 10") == [("matching.l", "6", 6), ("matching.l", "10", 10)]
    assert parse_variation("partition.kind=rotation") == [
        ("partition.kind", "rotation", "rotation")
    ]
    assert [value for *_, value in parse_variation("x=0.5,true,'a b'")] == [0.5, True, "a b"]
    assert parse_single("n=20") == ("n", 20)
    assert parse_seeds("0, 2") == [0, 2]
    assert parse_seeds("7, 0 - 3,5-5") == [7, 0, 1, 2, 3, 5]
    for text in ("n", "=3", "n=", "seed=3", "method=pens"):
        with pytest.raises(UserError):
            parse_variation(text)
    with pytest.raises(UserError, match="several values"):
        parse_single("n=20,30")
    for text in ("", ",", "a", "1;2", "-1", "3-1", "1-", "1-2-3", "²"):
        with pytest.raises(UserError, match="no seeds"):
            parse_seeds(text)
    with pytest.raises(UserError, match="runs are more than"):
        parse_seeds("0-99999999999999")


def test_plans_differ_only_in_what_their_method_asks_for() -> None:
    def digest(method: str, **matching: Any) -> str:
        table = PLAN.model_dump(exclude_none=True)
        plan = Plan.model_validate({**table, "method": method, "matching": matching})
        return canonical(plan).digest

    assert digest("local", l=5, k=3) == digest("local", tau=2)
    assert digest("oracle", l=5, k=3) == digest("oracle", l=6, k=3) != digest("oracle", l=5, k=2)
    assert digest("pens", alpha=0.1) == digest("pens") != digest("pens", l=3)
    assert digest("panm-grad", alpha=0.1) != digest("panm-grad")
    assert digest("a-new-one", alpha=0.1) != digest("a-new-one")


def test_a_study_runs_each_plan_once_and_goes_on_where_it_was(
    tmp_path: Path, runs: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = run_study(STUDY, tmp_path, equipment=REFERENCE)
    # Two seeds of oracle with k = 1 and 2, of the one model and of local, which ask for no k.
    assert sorted((plan.method, plan.matching.k, plan.seed) for plan in runs) == sorted(
        [("oracle", k, seed) for k in (1, 2) for seed in (0, 5)]
        + [(method, 3, seed) for method in ("ifca", "local") for seed in (0, 5)]
    )
    assert [(own.labels["k"], own.variant) for own in lines] == [
        ("1", "oracle"), ("1", "one model"), ("2", "oracle"), ("2", "one model"),
    ]  # fmt: skip
    assert lines[1].figures == lines[3].figures
    runs.clear()
    assert run_study(STUDY, tmp_path, equipment=REFERENCE) == lines
    assert not runs

    # A run that was interrupted has no summary; it is made anew, the others are not.
    broken = lines[0].runs[1]
    (broken / SUMMARY).unlink()
    (broken / "metrics.jsonl").write_text("")
    assert run_study(STUDY, tmp_path, equipment=REFERENCE)[0].accuracy_mean == (
        lines[0].accuracy_mean
    )
    assert [(plan.method, plan.seed) for plan in runs] == [("oracle", 5)]


def test_ctrl_c_loses_no_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Path] = []

    def interrupted(plan: Plan, out: Path, **options: Any) -> dict[str, Any]:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(out)
        return run_population(plan, out, **options)

    monkeypatch.setattr(studies, "run_population", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_study(STUDY, tmp_path, equipment=REFERENCE)
    before = {out: (out / SUMMARY).stat().st_mtime_ns for out in done}
    monkeypatch.setattr(studies, "run_population", run_population)
    run_study(STUDY, tmp_path, equipment=REFERENCE)
    assert {out: (out / SUMMARY).stat().st_mtime_ns for out in done} == before


def test_without_a_terminal_every_finished_run_is_a_line(tmp_path: Path) -> None:
    """Runs of hours go to a log."""
    log = io.StringIO()
    few = replace(STUDY, settings=STUDY.settings[:1], seeds=(5,))
    run_study(few, tmp_path, equipment=REFERENCE, console=Console(file=log, width=40))
    lines = log.getvalue().splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"run {i} of 3" for i in (1, 2, 3)]
    told = r"run \d of 3: (oracle|ifca|local), seed 5: accuracy \d+\.\d, \d+ s; \d:\d\d:\d\d left"
    assert all(re.fullmatch(told, line) for line in lines)
    assert lines[-1].endswith("; 0:00:00 left")
    assert str(time_left(90, done=10, total=50)) == "0:06:00"


def test_a_line_is_of_all_its_seeds(tmp_path: Path) -> None:
    own, *_ = run_study(STUDY, tmp_path, equipment=REFERENCE)
    summaries = [read_json(run / SUMMARY) for run in own.runs]
    means = [summary["accuracy_mean"] for summary in summaries]
    assert own.accuracy_mean == fmean(means)
    assert own.accuracy_sd == stdev(means)
    assert own.accuracy_worst == min(summary["accuracy_worst"] for summary in summaries)
    assert (own.precision, own.seeds) == (1.0, 2)
    model = summaries[0]["bytes_moved"] / (4 * 2)  # four peers, two rounds, one model each
    assert own.bytes_moved == 8 * model
    below = []
    for cell, run in zip(STUDY.cells[::2][:2], own.runs, strict=True):
        alone = cell_folder(
            tmp_path, canonical(cell.plan.model_copy(update={"method": "local"})), REFERENCE
        )
        pairs = zip(final_rows(read_metrics(run)), final_rows(read_metrics(alone)), strict=True)
        below.append(sum((a.accuracy or 0) < (b.accuracy or 0) for a, b in pairs))
    assert own.below_local == fmean(below)


def test_other_equipment_has_runs_of_its_own() -> None:
    folders = {
        cell_folder(Path("out"), PLAN, equipment)
        for equipment in (
            Equipment(), Equipment(exact=True), Equipment(device="cuda"), Equipment(data="digits"),
            Equipment(precision="bfloat16"),
        )
    }  # fmt: skip
    assert len(folders) == 5
    assert cell_folder(Path("out"), PLAN, REFERENCE) == cell_folder(
        Path("out"), PLAN, Equipment(exact=True)
    )


def test_a_table_and_its_csv(tmp_path: Path) -> None:
    lines = [
        line("pens", 0.8125, labels={"l": "6"}, accuracy_sd=0.004, precision=0.5, below_local=2.5),
        line("local", 0.5, labels={"l": "10"}),
    ]
    console = Console(width=100, record=True)
    console.print(study_table(lines))
    text = console.export_text().split("\n")
    first = next(row for row in text if "pens" in row)
    assert first.split() == [
        "6", "pens", "81.2", "±", "0.4", "25.0", "2.5", "0.50", "-", "1.5", "kB", "2.0",
    ]  # fmt: skip
    with write_csv(lines, tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["l"] == "6"
    assert rows[0]["method"] == "pens"
    assert float(rows[0]["accuracy_mean"]) == 0.8125
    assert (rows[1]["accuracy_sd"], rows[1]["recall"]) == ("", "")


def test_numbers_lie_on_lines_and_names_side_by_side() -> None:
    numbers = [line(v, 0.1 * k, labels={"k": str(k)}) for k in (2, 4, 8) for v in ("a", "b")]
    axes = study_figure(numbers, "k").axes[0]
    drawn = axes.containers[0].lines[0]  # type: ignore[union-attr]
    assert np.allclose(drawn.get_xdata(), [2, 4, 8])
    assert np.allclose(drawn.get_ydata(), [20, 40, 80])
    names = [line(v, labels={"data": name}) for name in ("x", "y") for v in ("a", "b")]
    axes = study_figure(names, "data").axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["x", "y"]
    assert np.allclose(axes.containers[1].lines[0].get_xdata(), [0.15, 1.15])  # type: ignore[union-attr]


def test_a_comparison_is_a_table_a_csv_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = compare(
        PLAN, ["fedavg", "random", "random"], [0, 0], ["matching.k=1,2", "rounds=1"], tmp_path,
        equipment=REFERENCE,
    )  # fmt: skip
    assert [(own.labels, own.variant, own.seeds) for own in lines] == [
        ({"matching.k": k}, method, 1) for k in ("1", "2") for method in ("fedavg", "random")
    ]
    printed = capsys.readouterr().out
    assert "matching.k" in printed
    assert "\x1b" not in printed
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "comparison.csv").read_text().count("\n") == 5


def test_a_comparison_without_local_evaluates_as_often_as_it_is_told(tmp_path: Path) -> None:
    plan = PLAN.model_copy(update={"rounds": 3})
    (own,) = compare(
        plan, ["random"], [0], [], tmp_path,
        equipment=REFERENCE, baseline=False, evaluate_every=2,
    )  # fmt: skip
    assert own.below_local is None
    (run,) = (tmp_path / studies.CELLS).iterdir()
    evaluated = {row.t for row in read_metrics(run) if row.accuracy is not None}
    assert evaluated == {2, 3}


@pytest.mark.parametrize(
    ("methods", "variations", "message"),
    [
        ([], [], "no methods to compare"),
        (["pens", "magic"], [], "no method magic"),
        (["pens"], ["matching.q=3"], r"unknown key matching\.q"),
        (["pens"], ["matching.l=0"], r"matching\.l: "),
        (["pens"], ["n=4", "n=5"], "set twice"),
        (["pens"], ["matching.l=" + ",".join(map(str, range(1, 10_002)))], "more than 10000"),
        (["pens"], [f"{key}={'1,' * 999}1" for key in "abcdefg"], "more than 10000"),
    ],
)
def test_mistakes_are_found_before_anything_runs(
    tmp_path: Path, methods: list[str], variations: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        compare(PLAN, methods, [0], variations, tmp_path / "out", equipment=REFERENCE)
    assert not (tmp_path / "out").exists()
