"""The paper's tables: what they run, what they skip, and how they are read."""

from __future__ import annotations

import csv
import os
import struct
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from peer.errors import UserError
from peer.matching.registry import CENTRAL
from peer.plan import Plan
from peer.rundir import TopologyRow, read_plan
from simulations.paper import TABLES, Claim, _study, reading, run_paper, table_names
from simulations.population import Population
from simulations.purity import purity_rows, share_pure
from simulations.runs import Equipment
from simulations.study import Line, Setting

REFERENCE = Equipment(reference=True)
TINY = ["n=8", "matching.l=3", "matching.k=2", "rounds=2", "partition.train_per_peer=20"]
TINY += ["partition.test_per_peer=20", "matching.t1=2"]


def line(method: str, mean: float, **labels: str) -> Line:
    return Line(
        labels=labels, variant=method, seeds=1, accuracy_mean=mean, accuracy_sd=None,
        accuracy_worst=mean, below_local=0.0, precision=None, recall=None, clusters_found=None,
        bytes_moved=0.0, seconds=0.0, runs=(),
    )  # fmt: skip


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_runs_of_valid_plans(name: str, full: bool) -> None:
    study = _study(TABLES[name], full=full, seeds=None, overrides=())
    plans = [cell.plan for cell in study.cells]
    assert len(plans) == len(study.settings) * len(study.variants) * (3 if full else 1)
    assert {plan.matching.t1 or plan.rounds // 2 for plan in plans} <= {6, 20, 50}
    for plan in plans:
        clusters = plan.partition.clusters
        assert plan.n % clusters == 0  # as in the papers, equal clusters
        if plan.method not in CENTRAL:  # there are k others of one's own cluster to find
            assert plan.matching.k < plan.n / clusters
    labels = {key for setting in study.settings for key in setting.labels} | {"method"}
    variants = {variant.name for variant in study.variants}
    for claim in TABLES[name].claims:
        for group in (claim.better, claim.worse):
            assert group.keys() <= labels
            assert group.get("method", next(iter(variants))) in variants


def test_the_tables_asked_for_are_there() -> None:
    names = [name for name, _, _ in table_names()]
    assert names == ["iii", "iv", "v", "vi", "vii", "train-size", "peers", "cosines", "cfl"]
    with pytest.raises(UserError, match="no table viii"):
        run_paper("viii", Path("out"), equipment=REFERENCE)


def test_what_a_table_varies_is_not_set() -> None:
    with pytest.raises(UserError, match=r"matching\.l is what this table varies"):
        run_paper("vi", Path("out"), overrides=["matching.l=4"], equipment=REFERENCE)


def test_a_claim_is_seen_everywhere_somewhere_or_nowhere() -> None:
    lines = [
        line("pens", 0.5, data="x"), line("panm", 0.75, data="x"),
        line("pens", 0.5, data="y"), line("panm", 0.495, data="y"),
    ]  # fmt: skip
    above = Claim("above", {"method": "panm"}, {"method": "pens"})
    assert reading([above], lines) == ["above: seen in 1 of 2 (x +25.0, y -0.5 points)"]
    assert reading([replace(above, better=above.worse, worse=above.better)], lines[2:]) == [
        "above: seen (y +0.5 points)"
    ]
    near = Claim("near", {"method": "panm"}, {"method": "pens"}, margin=0.01)
    assert reading([near], lines) == ["near: seen in all 2 (x +25.0, y -0.5 points)"]
    below = Claim("below", {"method": "pens"}, {"method": "panm"}, margin=0.0)
    assert reading([below], [replace(own, accuracy_mean=0.5) for own in lines]) == [
        "below: seen in all 2 (x +0.0, y +0.0 points)"
    ]
    one = Claim("turn", {"method": "pens", "data": "y"}, {"method": "panm", "data": "x"})
    assert reading([one], lines) == ["turn: not seen (-25.0 points)"]
    # What was not run, or has no such figure, is not judged.
    assert reading([Claim("no", {"method": "ifca"}, {"method": "pens"})], lines) == []
    assert reading([Claim("no", {"method": "panm"}, {"method": "pens"}, "recall")], lines) == []


def test_above_is_by_more_than_runs_differ_anyway() -> None:
    """By 0.2 points, or by the deviation over seeds of either if that is more."""
    above = Claim("above", {"method": "panm"}, {"method": "pens"})
    for one, deviation, verdict in (
        (0.5, None, "not seen (+0.0 points)"),
        (0.501, None, "not seen (+0.1 points)"),
        (0.503, None, "seen (+0.3 points)"),
        (0.503, 0.001, "seen (+0.3 points)"),
        (0.503, 0.01, "not seen (+0.3 points)"),
        (0.52, 0.01, "seen (+2.0 points)"),
    ):
        pair = [line("panm", one), replace(line("pens", 0.5), accuracy_sd=deviation)]
        assert reading([above], pair) == [f"above: {verdict}"]
    level = [line("panm", 0.5, data=data) for data in "xyz"]
    level += [line("pens", 0.5, data=data) for data in "xyz"]
    (text,) = reading([above], level)
    assert text.startswith("above: not seen in any of 3 (")
    bags = [replace(line("panm", 0.5), recall=0.5), replace(line("pens", 0.5), recall=0.4)]
    found = replace(above, figure="recall")
    assert reading([found], bags) == ["above: seen (+0.10)"]
    bags[0] = replace(bags[0], recall_sd=0.2)
    assert reading([found], bags) == ["above: not seen (+0.10)"]


def test_pens_with_few_neighbours_is_compared_with_pens_with_many() -> None:
    lines = [line("pens", mean, l="10", k=k) for k, mean in (("3", 0.79), ("5", 0.77), ("8", 0.75))]
    assert reading(TABLES["vi"].claims, lines) == [
        "PENS needs small k/l: k=3 above k=8: seen (10 +4.0 points)"
    ]


def write_mnist(folder: Path, train: int = 200, test: int = 40) -> None:
    """Write made images in MNIST's four files."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, m in (("train", train), ("t10k", test)):
        labels = (np.arange(m) % 10).astype(np.uint8)
        images = rng.integers(0, 50, size=(m, 28, 28), dtype=np.uint8)
        images[np.arange(m), labels, :] = 255
        head = struct.pack(">4I", 0x803, m, 28, 28)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        head = struct.pack(">2I", 0x801, m)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())


def test_data_that_are_not_there_leave_out_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PANMESH_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("mnist", "fashion-mnist"):
        write_mnist(tmp_path / "data" / name)
    run_paper("iv", tmp_path / "out", overrides=TINY, equipment=REFERENCE)
    printed = capsys.readouterr().out
    assert "left out cifar10: cifar10: no data_batch_1" in printed
    rows = (tmp_path / "out" / "table.csv").read_text().splitlines()
    assert [row.split(",")[:2] for row in rows[1:]] == [
        [data, variant.name]
        for data in ("mnist", "fashion-mnist")
        for variant in TABLES["iv"].variants
    ]
    assert (tmp_path / "out" / "table.png").exists()
    text = (tmp_path / "out" / "reading.txt").read_text()
    assert "Random improves on local training: " in text
    assert all(line in printed for line in text.splitlines())


def test_theory_beside_runs(tmp_path: Path) -> None:
    run_paper("iii", tmp_path, overrides=[*TINY, "data=digits"], equipment=REFERENCE)
    assert {run.name.split("-")[0] for run in (tmp_path / "cells").iterdir()} == {"pens", "panm"}
    rows = (tmp_path / "table.csv").read_text().splitlines()
    assert rows[0] == 'clusters,round,"PENS, theory","NSMC, theory",pens,panm-loss,panm-grad'
    # n = 8, a = 2: a list of two can never be all true, nor with chance; a = 4: it can.
    assert rows[1].startswith("4,1,0.000,0.000,0.000")
    (row,) = [row for row in rows if row.startswith("2,1,")]
    # Of three candidates of 7, 3 of them true, two at least are: (3 * 4 + 1) / 35.
    assert row.split(",")[2:4] == ["0.371", "0.371"]


def test_a_table_by_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines are what tables are made with; the reference is here to be quick."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # one worker starts sooner
    run_paper("cosines", tmp_path, overrides=[*TINY, "data=digits"], equipment=Equipment())
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["alpha"], row["method"]) for row in rows] == [
        (alpha, "panm-grad") for alpha in ("0.0", "0.5", "1.0")
    ]
    for row in rows:
        (run,) = (
            run
            for run in (tmp_path / "cells").glob("panm-grad-*")
            if read_plan(run).matching.alpha == float(row["alpha"])
        )
        plan = read_plan(run)
        reference = list(Population(plan, plan.method).run())
        mean = fmean(own["accuracy"] for own in reference[-1])
        assert float(row["accuracy_mean"]) == pytest.approx(mean, abs=0.01)
    printed = capsys.readouterr().out
    assert "run 4 of 4: local, seed 0: accuracy " in printed
    assert "both cosines above that of h (alpha = 0) alone: " in printed


def test_the_table_of_cfl_is_a_line_a_run_and_needs_no_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = TABLES["cfl"]
    alone = [setting for setting in whole.settings(False) if setting.labels["partition"] == "none"]
    assert [setting.changes["n"] for setting in alone] == [20, 100]
    few = Setting(alone[0].labels, {**alone[0].changes, "n": 4})
    monkeypatch.setitem(TABLES, "cfl", replace(whole, settings=lambda _: [few]))
    changes = [
        "rounds=2",
        "data=digits",
        "partition.train_per_peer=20",
        "partition.test_per_peer=20",
    ]
    run_paper("cfl", tmp_path, seeds=(0, 3), overrides=changes, equipment=REFERENCE)
    assert (tmp_path / "table.csv").read_text().splitlines() == [
        "partition,peers,seed,splits in rounds,rounds after,adjusted Rand,as it should",
        "none,20,0,-,2,1.000,yes",
        "none,20,3,-,2,1.000,yes",
    ]
    assert "then nothing more" in capsys.readouterr().out
    assert {path.name.split("-")[0] for path in (tmp_path / "cells").iterdir()} == {"cfl"}


def test_pure_are_those_whose_whole_list_is_true() -> None:
    plan = Plan.model_validate(
        {
            "n": 4,
            "rounds": 2,
            "matching": {"k": 1, "t1": 1},
            "partition": {"kind": "rotation", "clusters": 2},
        }
    )
    rows = [
        TopologyRow(t=t, index=i, neighbours=neighbours)
        for t, i, neighbours in (
            (1, 0, [2]), (1, 1, [2]), (1, 2, []), (1, 3, [1]), (2, 0, [2]), (2, 1, [3]),
            (2, 2, [0]), (2, 3, [0]),
        )
    ]  # fmt: skip
    assert share_pure(plan, rows) == {1: 0.5, 2: 0.75}
    assert purity_rows([]) == []
