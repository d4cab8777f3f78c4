"""Reports: what is drawn, and from which files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from peer.errors import UserError
from peer.plan import Plan
from peer.rundir import MetricRow, RunWriter, TopologyRow
from simulations.figures import (
    accuracy_figure,
    aggregation_counts,
    bag_graph,
    heatmap_figure,
    topology_figure,
)
from simulations.report import locate, write_report

PNG = b"\x89PNG\r\n\x1a\n"


def plan_of(n: int, clusters: int = 2) -> Plan:
    return Plan.model_validate(
        {"n": n, "rounds": 3, "partition": {"kind": "rotation", "clusters": clusters}}
    )


def write_run(path: Path, n: int = 4, peers: range | None = None) -> Path:
    with RunWriter(path, plan_of(n)) as writer:
        for t in (1, 2, 3):
            for index in range(n) if peers is None else peers:
                partner = (index + 2) % n
                row = MetricRow(t=t, index=index, cluster=index % 2, accuracy=0.2 * t)
                writer.append(
                    row, TopologyRow(t=t, index=index, neighbours=[partner], bag=[partner])
                )
    return path


def choice(t: int, index: int, neighbours: list[int], bag: list[int]) -> TopologyRow:
    return TopologyRow(t=t, index=index, neighbours=neighbours, bag=bag)


def test_counts_say_how_often_a_row_took_a_column() -> None:
    rows = [choice(1, 0, [1, 2], []), choice(2, 0, [2], []), choice(1, 2, [0], [])]
    # Ordered 2, 0, 1; peer 9 is not among those drawn.
    rows.append(choice(2, 2, [9], []))
    counts = aggregation_counts(rows, [2, 0, 1])
    assert np.array_equal(counts, [[0, 1, 0], [2, 0, 1], [0, 0, 0]])


def test_the_graph_is_of_the_last_bags() -> None:
    rows = [
        choice(1, 0, [], [1]),
        choice(2, 0, [], [2]),
        choice(1, 2, [], [0]),
        choice(1, 1, [], []),
    ]
    assert sorted(bag_graph(rows).edges) == [(0, 2), (2, 0)]
    assert sorted(bag_graph(rows).nodes) == [0, 1, 2]


def test_accuracy_shows_each_peer_the_mean_and_the_references() -> None:
    rows = [
        MetricRow(t=t, index=index, cluster=index % 2, accuracy=0.1 * t + 0.2 * index)
        for t in (1, 2, 3)
        for index in range(2)
    ]
    figure = accuracy_figure(plan_of(2), rows, {"local": [(1, 0.2), (3, 0.25)]})
    lines = {
        tuple(np.round(np.asarray(line.get_ydata()), 6)) for line in figure.axes[0].get_lines()
    }
    assert {(0.1, 0.2, 0.3), (0.3, 0.4, 0.5), (0.2, 0.3, 0.4), (0.2, 0.25)} <= lines
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert "panm-grad 40.0" in texts
    assert "local 25.0" in texts


def test_the_heatmap_orders_peers_by_cluster() -> None:
    rows = [choice(1, index, [(index + 2) % 4], []) for index in range(4)]
    axes = heatmap_figure(plan_of(4), rows).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "2", "1", "3"]
    drawn = np.asarray(axes.get_images()[0].get_array())
    assert np.array_equal(drawn, [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]])


@pytest.mark.parametrize(("n", "clusters"), [(2, 1), (30, 2), (120, 4)])
def test_topologies_of_any_size_are_drawn(n: int, clusters: int) -> None:
    plan = plan_of(n, clusters) if clusters > 1 else Plan(n=n)
    rows = [choice(1, index, [], [(index + clusters) % n]) for index in range(n)]
    figure = topology_figure(plan, rows)
    points = np.asarray(figure.axes[0].collections[-1].get_offsets())
    assert len(np.unique(points.round(9), axis=0)) == n


def test_a_report_is_six_files_and_repeats_exactly(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    comparison = {"local": {"accuracy_mean": 0.3, "curve": [[1, 0.1], [3, 0.3]]}}
    (run / "comparison.json").write_text(json.dumps(comparison))
    files = write_report(run)
    assert [file.name for file in files] == [
        f"{name}.{ending}"
        for name in ("accuracy", "heatmap", "topology")
        for ending in ("png", "svg")
    ]
    assert all(file.read_bytes().startswith(PNG) for file in files if file.suffix == ".png")
    before = [file.read_bytes() for file in files]
    assert "local 30.0" in before[1].decode()
    write_report(run)
    assert [file.read_bytes() for file in files] == before


def test_peers_directories_are_merged_first(tmp_path: Path) -> None:
    peers = [write_run(tmp_path / f"peer-{i}", peers=range(i, i + 1)) for i in range(4)]
    assert locate(peers[:1], None) == peers[0]
    assert locate([tmp_path], tmp_path / "run") == tmp_path / "run"
    assert len(write_report(tmp_path / "run")) == 6
    with pytest.raises(UserError, match="merged"):
        locate(peers, None)


def test_a_run_without_a_round_has_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no round was finished"):
        write_report(write_run(tmp_path / "run", peers=range(5, 5)))
