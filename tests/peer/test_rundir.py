"""The run directory: rows survive crashes, merges add up, the summary says what was asked of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from peer.errors import StateError, UserError
from peer.plan import Plan
from peer.rundir import (
    METRICS,
    MetricRow,
    RowReader,
    RunWriter,
    Seconds,
    TopologyRow,
    find_runs,
    merge,
    read_json,
    read_metrics,
    read_plan,
    read_topology,
    summarise,
)

PLAN = Plan.model_validate(
    {"n": 4, "rounds": 2, "seed": 7, "partition": {"kind": "rotation", "clusters": 2}}
)


def metric(t: int, index: int, accuracy: float | None = 0.5, sent: int = 10) -> MetricRow:
    return MetricRow(
        t=t,
        index=index,
        cluster=index % 2,
        accuracy=accuracy,
        precision=1.0,
        recall=0.5,
        bag_size=1,
        payload_sent=sent * t,
        payload_received=sent * t,
        wire_sent=2 * sent * t,
        wire_received=2 * sent * t,
        late=1,
        seconds=Seconds(round=1.0),
        time=100.0 + t,
    )


def topology(t: int, index: int) -> TopologyRow:
    partner = (index + 2) % 4
    return TopologyRow(t=t, index=index, cluster=index % 2, neighbours=[partner], bag=[partner])


def write_peer(path: Path, index: int, accuracy: float = 0.5, plan: Plan = PLAN) -> Path:
    with RunWriter(path, plan) as writer:
        for t in (1, 2):
            writer.append(metric(t, index, accuracy), topology(t, index))
        writer.write_traffic({"sent": {"model": 5, "probe": 1}, "received": {"model": index}})
        (path / "models" / f"peer-{index}.safetensors").write_bytes(b"weights")
        writer.write_summary(wall_s=2.0)
    return path


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    write_peer(tmp_path, 3)
    assert read_metrics(tmp_path) == [metric(1, 3), metric(2, 3)]
    assert read_topology(tmp_path) == [topology(1, 3), topology(2, 3)]
    assert read_plan(tmp_path) == PLAN
    assert (tmp_path / "plan.toml").read_text().startswith("# panmesh ")


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_torn_last_line_is_dropped_and_repaired(tmp_path: Path, kept: int) -> None:
    write_peer(tmp_path, 0)
    file = tmp_path / METRICS
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1][:kept])
    assert read_metrics(tmp_path) == [metric(1, 0)]
    with RunWriter(tmp_path, PLAN) as writer:
        writer.append(metric(2, 0, 0.9), topology(2, 0))
    assert read_metrics(tmp_path) == [metric(1, 0), metric(2, 0, 0.9)]


def test_a_round_run_again_replaces_the_earlier(tmp_path: Path) -> None:
    write_peer(tmp_path, 0)
    with RunWriter(tmp_path, PLAN) as writer:
        writer.append(metric(2, 0, 0.75), TopologyRow(t=2, index=0, neighbours=[1]))
    assert [row.accuracy for row in read_metrics(tmp_path)] == [0.5, 0.75]
    assert read_topology(tmp_path)[1].neighbours == [1]


def test_values_that_json_has_not_become_null(tmp_path: Path) -> None:
    with RunWriter(tmp_path, PLAN) as writer:
        row = MetricRow(t=1, index=0, loss=math.inf, accuracy=math.nan, notes={"mu": math.nan})
        writer.append(row, topology(1, 0))
    line = json.loads((tmp_path / METRICS).read_text(), parse_constant=pytest.fail)
    assert (line["loss"], line["accuracy"], line["notes"]) == (None, None, {"mu": None})


def test_a_directory_of_another_plan_is_refused(tmp_path: Path) -> None:
    write_peer(tmp_path, 0)
    with pytest.raises(StateError, match="another plan"):
        RunWriter(tmp_path, PLAN.model_copy(update={"seed": 8}))


def test_a_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    write_peer(tmp_path, 0)
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"t": "soon"}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl line 3: .*t: "):
        read_metrics(tmp_path)


def test_the_reader_follows_whole_lines_only(tmp_path: Path) -> None:
    reader = RowReader(tmp_path / METRICS)
    assert reader.poll() == []
    line = metric(1, 0).model_dump_json() + "\n"
    (tmp_path / METRICS).write_text(line + line[:30])
    assert reader.poll() == [metric(1, 0)]
    assert reader.poll() == []
    (tmp_path / METRICS).write_text(line + line)
    assert reader.poll() == [metric(1, 0)]


def test_the_summary_has_every_figure() -> None:
    rows = [metric(t, index, accuracy=0.2 * index + 0.1 * t) for t in (1, 2) for index in range(4)]
    rows = rows[:-1]  # peer 3 did not finish
    summary = summarise(
        PLAN, rows, [topology(2, index) for index in range(4)], wall_s=3.0, extra={"host": "here"}
    )
    assert {key: summary[key] for key in ("method", "dataset", "partition", "n", "seed")} == {
        "method": "panm-grad",
        "dataset": "digits",
        "partition": "rotation-2",
        "n": 4,
        "seed": 7,
    }
    assert summary["accuracy_mean"] == pytest.approx((0.2 + 0.4 + 0.6 + 0.7) / 4)
    assert summary["accuracy_worst"] == pytest.approx(0.2)
    assert (summary["precision"], summary["recall"]) == (1.0, 0.5)
    assert summary["clusters_found"] == 2
    assert summary["bytes_sent"] == summary["bytes_received"] == 3 * 20 + 10
    assert summary["wire_sent"] == summary["wire_received"] == 2 * (3 * 20 + 10)
    assert (summary["peers"], summary["finished"], summary["late"]) == (4, 3, 7)
    assert (summary["rounds"], summary["wall_s"], summary["host"]) == (2, 3.0, "here")
    assert summary["version"]


def test_a_summary_without_neighbours_or_rows_is_null_not_wrong() -> None:
    silent = [MetricRow(t=2, index=0), MetricRow(t=2, index=1)]
    summary = summarise(PLAN, silent, [TopologyRow(t=2, index=i) for i in (0, 1)], wall_s=0.0)
    for key in ("accuracy_mean", "accuracy_worst", "precision", "recall", "clusters_found"):
        assert summary[key] is None
    assert summarise(PLAN, [], [], wall_s=0.0)["peers"] == 0


def test_merge_makes_one_run_of_many_peers(tmp_path: Path) -> None:
    sources = [write_peer(tmp_path / f"peer-{i}", i, accuracy=0.1 * i) for i in range(4)]
    summary = merge(sources, tmp_path / "run")
    run = tmp_path / "run"
    assert [(row.t, row.index) for row in read_metrics(run)] == [
        (t, index) for t in (1, 2) for index in range(4)
    ]
    assert summary == json.loads((run / "summary.json").read_text())
    assert summary["accuracy_mean"] == pytest.approx(0.15)
    # From the start of round 1 (1 s before 101) to the end of round 2 (102).
    assert summary["wall_s"] == 2.0
    assert read_json(run / "traffic.json") == {
        "sent": {"model": 20, "probe": 4},
        "received": {"model": 6},
    }
    assert sorted(file.name for file in (run / "models").iterdir()) == [
        f"peer-{i}.safetensors" for i in range(4)
    ]


def test_a_coordinators_attempts_are_told_by_members_that_were_there(tmp_path: Path) -> None:
    sources = [write_peer(tmp_path / f"peer-{i}", i) for i in (1, 2)]
    attempts = [
        {"t": 1, "node": 0, "members": [0, 1, 2]},
        {"t": 2, "node": 1, "members": [2]},
        {"t": 2, "node": 2, "members": [0]},
        {"t": 9, "node": 1, "members": [1, 2]},
    ]
    merge(sources, tmp_path / "run", attempts=attempts)
    rows = read_metrics(tmp_path / "run")
    told = {(row.t, row.index): row.notes["attempt"] for row in rows if "attempt" in row.notes}
    assert told == {(1, 1): attempts[0], (2, 2): attempts[1]}


def test_merging_again_replaces_the_earlier_run(tmp_path: Path) -> None:
    sources = [write_peer(tmp_path / f"peer-{i}", i) for i in range(4)]
    merge(sources, tmp_path / "run")
    merge(sources[:2], tmp_path / "run")
    assert {row.index for row in read_metrics(tmp_path / "run")} == {0, 1}
    assert len(list((tmp_path / "run" / "models").iterdir())) == 2


def test_merge_refuses_what_does_not_belong_together(tmp_path: Path) -> None:
    first = write_peer(tmp_path / "a", 0)
    twin = write_peer(tmp_path / "b", 0)
    other = write_peer(tmp_path / "c", 1, plan=PLAN.model_copy(update={"seed": 8}))
    with pytest.raises(UserError, match="both peer 0"):
        merge([first, twin], tmp_path / "run")
    with pytest.raises(UserError, match="another plan"):
        merge([first, other], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_runs_are_found_at_a_path_or_just_below(tmp_path: Path) -> None:
    sources = [write_peer(tmp_path / f"peer-{i}", i) for i in range(2)]
    assert find_runs(tmp_path) == sources
    assert find_runs(sources[0]) == sources[:1]
    with pytest.raises(UserError, match="not a run directory"):
        find_runs(tmp_path / "peer-0" / "models")
