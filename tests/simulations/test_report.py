"""Reports: what is drawn, and from which files."""

from __future__ import annotations

import csv
import json
import re
from base64 import b64decode
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.collections import LineCollection
from safetensors.numpy import save_file

from peer.display import CLUSTER_COLOURS
from peer.errors import UserError
from peer.plan import Plan
from peer.rundir import (
    MetricRow,
    RunWriter,
    TopologyRow,
    read_metrics,
    read_plan,
    read_topology,
    summarise,
)
from simulations.figures import INK, accuracy_figure, aggregation_counts, heatmap_figure
from simulations.figures_bags import topology_figure
from simulations.model_cosines import model_cosines
from simulations.report import locate, write_report

PNG = b"\x89PNG\r\n\x1a\n"


def plan_of(n: int, clusters: int = 2) -> Plan:
    table = {"n": n, "rounds": 3, "partition": {"kind": "rotation", "clusters": clusters}}
    return Plan.model_validate(table)


def write_run(
    path: Path,
    n: int = 4,
    peers: range | None = None,
    *,
    accuracy: bool = True,
) -> Path:
    with RunWriter(path, plan_of(n)) as writer:
        for t in (1, 2, 3):
            for index in range(n) if peers is None else peers:
                partner = (index + 2) % n
                value = 0.2 * t if accuracy else None
                row = MetricRow(t=t, index=index, cluster=index % 2, accuracy=value)
                writer.append(
                    row, TopologyRow(t=t, index=index, neighbours=[partner], bag=[partner])
                )
    return path


def summarise_run(run: Path) -> dict[str, object]:
    return summarise(read_plan(run), read_metrics(run), read_topology(run), wall_s=1.0)


def choice(t: int, index: int, neighbours: list[int], bag: list[int]) -> TopologyRow:
    return TopologyRow(t=t, index=index, neighbours=neighbours, bag=bag)


def test_counts_say_how_often_a_row_took_a_column() -> None:
    rows = [choice(1, 0, [1, 2], []), choice(2, 0, [2], []), choice(1, 2, [0], [])]
    # Ordered 2, 0, 1; peer 9 is not among those drawn.
    rows.append(choice(2, 2, [9], []))
    counts = aggregation_counts(rows, [2, 0, 1])
    assert np.array_equal(counts, [[0, 1, 0], [2, 0, 1], [0, 0, 0]])


def test_lines_lead_from_a_peer_halfway_to_those_in_its_last_bag() -> None:
    rows = [
        choice(1, 0, [], [1]),
        choice(2, 0, [], [2]),
        choice(1, 2, [], [0]),
        choice(1, 1, [], [2]),
    ]
    axes = topology_figure(plan_of(3), rows).axes[0]
    lines, dots = axes.collections
    assert isinstance(lines, LineCollection)
    places = dict(zip((0, 1, 2), np.asarray(dots.get_offsets()), strict=True))
    # 0 and 2 are of cluster 0, and in the order of `layout` before 1.
    places = {0: places[0], 2: places[1], 1: places[2]}
    expected = [(places[i], (places[i] + places[j]) / 2) for i, j in ((0, 2), (1, 2), (2, 0))]
    np.testing.assert_allclose(lines.get_segments(), expected)
    colours = [mpl.colors.to_hex(tuple(own)).upper() for own in np.asarray(lines.get_colors())]
    assert colours == [CLUSTER_COLOURS[0], INK, CLUSTER_COLOURS[0]]


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


def test_a_report_is_one_page_with_its_pictures_and_repeats_exactly(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    comparison = {"local": {"accuracy_mean": 0.3, "curve": [[1, 0.1], [3, 0.3]]}}
    (run / "comparison.json").write_text(json.dumps(comparison))
    files = write_report(run, animate=True)
    assert [file.relative_to(run).as_posix() for file in files] == [
        "report.html", "rounds.csv", "report.tex",
        *(
            f"plots/{name}.{ending}"
            for name in ("accuracy", "heatmap", "topology", "evolution")
            for ending in ("png", "svg")
        ),
        "plots/bags.gif",
    ]  # fmt: skip
    page = files[0].read_text()
    pictures = re.findall(r'src="data:image/(png|gif);base64,([^"]+)"', page)
    assert [kind for kind, _ in pictures] == ["png"] * 4 + ["gif"]
    starts = {"png": PNG, "gif": b"GIF89a"}
    assert all(b64decode(text).startswith(starts[kind]) for kind, text in pictures)
    assert "The run was not finished: round 3 of 3" in page
    assert "local 30.0" in (run / "plots" / "accuracy.svg").read_text()
    before = [file.read_bytes() for file in files]
    write_report(run, animate=True)
    assert [file.read_bytes() for file in files] == before


def test_the_page_needs_nothing_from_elsewhere_and_escapes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "summary.json").write_text(json.dumps({**summarise_run(run), "version": "<script>"}))
    page = write_report(run)[0].read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", page)
    assert "http" not in page


def test_rounds_are_means_over_peers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_report(run)
    rows = [*csv.DictReader((run / "rounds.csv").open())]
    assert [(row["method"], row["round"]) for row in rows] == [
        ("panm-grad", "1"), ("panm-grad", "2"), ("panm-grad", "3"),
    ]  # fmt: skip
    assert [float(row["accuracy"]) for row in rows] == pytest.approx([0.2, 0.4, 0.6])
    assert {row["precision"] for row in rows} == {""}


def test_a_run_that_was_never_judged_still_has_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", accuracy=False)
    names = {file.stem for file in write_report(run)}
    assert "accuracy" not in names
    assert {"report", "heatmap", "topology"} <= names


def test_peers_directories_are_merged_first(tmp_path: Path) -> None:
    peers = [write_run(tmp_path / f"peer-{i}", peers=range(i, i + 1)) for i in range(4)]
    assert locate(peers[:1], None) == peers[0]
    assert locate([tmp_path], tmp_path / "run") == tmp_path / "run"
    assert tmp_path / "run" / "report.html" in write_report(tmp_path / "run")
    with pytest.raises(UserError, match="merged"):
        locate(peers, None)


def test_a_run_without_a_round_has_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no round was finished"):
        write_report(write_run(tmp_path / "run", peers=range(5, 5)))


def test_models_are_alike_by_the_way_off_their_mean(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    assert model_cosines(tmp_path) is None
    for index, way in enumerate(([1.0, 0.0], [0.0, 1.0], [-1.0, -1.0])):
        model = {"a": np.array([[5 + way[0]]]), "b": np.array([7 + way[1]])}
        save_file(model, tmp_path / "models" / f"peer-{2 * index:03}.safetensors")
    found = model_cosines(tmp_path)
    assert found is not None
    assert found[0] == [0, 2, 4]
    far = -(2**-0.5)
    np.testing.assert_allclose(found[1], [[1, 0, far], [0, 1, far], [far, far, 1]], atol=1e-12)
