"""Directories of many runs: what sets them apart, and the report on them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer.errors import UserError
from peer.plan import Plan
from peer.rundir import MetricRow, RunWriter, TopologyRow
from simulations.collection import ANY, read_collection, setting_name, short_key
from simulations.curves import Curve, band, over_rounds, over_time
from simulations.report import locate, write_report
from simulations.runs import changed
from simulations.study import asks_for, canonical
from simulations.theory import stage_one
from simulations.typeset import Column, Sheet, Value, escape, latex

PLAN = Plan.model_validate(
    {
        "n": 4,
        "rounds": 2,
        "matching": {"l": 2, "k": 1},
        "partition": {"kind": "rotation", "clusters": 2},
    }
)


def add_run(out: Path, accuracy: float, *, finished: bool = True, **changes: Any) -> Path:
    """Write a run into the directory of a comparison as one would be."""
    plan = canonical(changed(PLAN, {key.replace("__", "."): v for key, v in changes.items()}))
    folder = out / "cells" / f"{plan.method}-{plan.digest[:12]}"
    alone = plan.method == "local"
    with RunWriter(folder, plan) as writer:
        for t in (1, 2):
            for index in range(4):
                near = [] if alone else [(index + 2) % 4]
                row = MetricRow(
                    t=t, index=index, cluster=index % 2, accuracy=accuracy * t / 2,
                    precision=None if alone else 1.0, recall=None if alone else 0.5,
                    payload_received=0 if alone else 1000 * t,
                )  # fmt: skip
                writer.append(row, TopologyRow(t=t, index=index, neighbours=near, bag=near))
        if finished:
            writer.write_summary(wall_s=1.0, extra={"bytes_moved": 0 if alone else 8000})
    return folder


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    for seed in (0, 1):
        add_run(tmp_path, 0.5 + 0.1 * seed, method="local", seed=seed)
        for k in (1, 2):
            add_run(tmp_path, 0.7 + 0.1 * seed, method="pens", seed=seed, matching__k=k)
            add_run(tmp_path, 0.9 - 0.1 * seed, method="random", seed=seed, matching__k=k)
    for c in (1, 2):
        add_run(tmp_path, 0.4, method="ifca", central__clusters=c)
    add_run(tmp_path, 0.9, method="pens", seed=2, finished=False)
    return tmp_path


def test_what_runs_differ_in_makes_settings_and_names(comparison: Path) -> None:
    collection = read_collection(comparison)
    assert collection.unfinished == 1
    assert [(dict(g.labels), g.name, len(g.runs)) for g in collection.groups] == [
        ({"matching.k": "1"}, "pens", 2),
        ({"matching.k": "1"}, "random", 2),
        ({"matching.k": "2"}, "pens", 2),
        ({"matching.k": "2"}, "random", 2),
        ({"matching.k": ANY}, "local", 2),
        ({"matching.k": ANY}, "ifca, clusters 1", 1),
        ({"matching.k": ANY}, "ifca, clusters 2", 1),
    ]
    assert {name: [g.name for g in own] for name, own in collection.settings().items()} == {
        f"k {k}": ["pens", "random", "local", "ifca, clusters 1", "ifca, clusters 2"]
        for k in (1, 2)
    }
    pens = collection.groups[0].line
    assert pens.accuracy_mean == pytest.approx(0.75)
    assert pens.accuracy_sd == pytest.approx(np.std([0.7, 0.8], ddof=1))
    assert pens.below_local == 0
    assert collection.groups[5].line.below_local == 4


def test_the_report_on_many_runs(comparison: Path) -> None:
    files = write_report(locate([comparison], None))
    assert [file.relative_to(comparison).as_posix() for file in files] == [
        "report.html", "report.csv", "rounds.csv", "report.tex",
        *(f"plots/{name}.{ending}" for name in ("learning", "final", "bags", "averaging")
          for ending in ("png", "svg")),
    ]  # fmt: skip
    page = files[0].read_text()
    assert "left out: 1." in page
    assert '<td class="best">85.0 ± 7.1</td>' in page
    with (comparison / "report.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert [row["method"] for row in rows][:2] == ["pens", "random"]
    assert float(rows[1]["accuracy_mean"]) == pytest.approx(0.85)


def test_a_directory_without_a_finished_run(tmp_path: Path) -> None:
    add_run(tmp_path, 0.5, method="pens", finished=False)
    with pytest.raises(UserError, match=r"no run in .* is finished"):
        write_report(tmp_path)


def test_keys_are_short_where_that_is_clear() -> None:
    keys = {"matching.k": "1", "partition.clusters": "2", "central.clusters": "3"}
    assert [short_key(key, keys) for key in keys] == ["k", "partition.clusters", "central.clusters"]
    assert setting_name({"matching.k": "1", "n": "4"}) == "k 1, n 4"
    asked = [asks_for("pens", key) for key in ("matching.l", "matching.tau", "central.clusters")]
    assert asked == [True, False, False]
    assert [asks_for("cfl", key) for key in ("cfl.rule", "n")] == [True, True]
    assert not asks_for("local", "defence.gate")


def test_bands_are_means_and_deviations_over_seeds() -> None:
    x = np.array([1.0, 2.0])
    found = band([Curve(x, np.array([0.0, 2.0])), Curve(x, np.array([2.0, 2.0]))])
    assert found.x is x
    assert found.mean.tolist() == [1.0, 2.0]
    assert found.sd is not None
    assert found.sd.tolist() == pytest.approx([2**0.5, 0.0])
    assert band([Curve(x, x)]).sd is None
    # Elsewhere measured: over what both cover, linearly between.
    apart = band([Curve(x, x), Curve(np.array([1.5, 3.0]), np.array([1.5, 3.0]))])
    assert (apart.x[0], apart.x[-1]) == (1.5, 2.0)
    np.testing.assert_allclose(apart.mean, apart.x)
    with pytest.raises(ValueError, match="one or more points"):
        band([Curve(np.array([]), np.array([]))])


def test_means_over_time_wait_for_nearly_all() -> None:
    rows = [
        MetricRow.model_validate(
            {"t": t, "index": i, "accuracy": None if t == 1 else 0.1 * (t + i),
             "time": 100.0 + t + i, "payload_received": 10 * t, "seconds": {"round": 1.0}}
        )
        for t in (1, 2, 3)
        for i in (0, 1)
    ]  # fmt: skip
    times, accuracies, payload = over_time(2, rows)
    assert times.tolist() == [3.0, 4.0]
    np.testing.assert_allclose(accuracies, [[0.3, 0.3], [0.3, 0.4]])
    assert payload.tolist() == [25.0, 30.0]
    curve = over_rounds(rows)
    np.testing.assert_allclose(curve.y, [0.25, 0.35])
    assert [part.shape for part in over_time(2, rows[:2])] == [(0,), (0, 2), (0,)]


def test_theory_is_drawn_where_it_holds() -> None:
    plan = PLAN.model_copy(update={"n": 100, "rounds": 4, "method": "panm-grad"})
    plan = changed(plan, {"matching.l": 10, "matching.k": 5, "partition.clusters": 4})
    found = stage_one(plan)
    assert found is not None
    assert [round(p, 3) for p in found.purity] == [0.059, 0.538]
    assert found.recall == pytest.approx([5 * p / 24 for p in found.precision])
    pens = stage_one(changed(plan, {"method": "pens"}))
    assert pens is not None
    assert pens.purity == pytest.approx([found.purity[0]] * 2)
    for changes in ({"method": "random"}, {"n": 99}, {"matching.l": 96}):
        assert stage_one(changed(plan, changes)) is None


def test_latex_marks_the_best_and_escapes() -> None:
    values = [Value(0.91, 0.01), Value(0.909), Value(None), Value(0.99)]
    column = Column("accuracy, %", values, lambda share: f"{100 * share:.0f}", "most")
    sheet = Sheet("50 % & more", {"method": ["a_b", "c", "d", "oracle"]}, [column], [0, 0, 0, None])
    assert latex(sheet).splitlines()[3:] == [
        r"  \caption{50 \% \& more}",
        r"  \begin{tabular}{lr}",
        r"    \toprule",
        r"    method & accuracy, \% \\",
        r"    \midrule",
        r"    a\_b & \textbf{91 $\pm$ 1} \\",
        r"    c & \textbf{91} \\",
        r"    d & -- \\",
        r"    oracle & 99 \\",
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    assert escape("a\\b^~<") == r"a\textbackslash{}b\textasciicircum{}\textasciitilde{}\textless{}"
