"""The commands that draw a tree and answer by the theorem."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bootstrap.cli import app
from bootstrap.coordination.tree import ParameterTree
from bootstrap.coordination.tree_picture import tree_figure
from bootstrap.coordination.tree_store import INDEX, TREE, TreeStore, read_index
from bootstrap.tree_cli import theory, tree
from peer.errors import StateError, UserError
from peer.plan import Plan

PLAN = Plan.model_validate(
    {"n": 12, "method": "fedavg", "partition": {"kind": "rotation", "clusters": 4}}
)


def write_run(run: Path, big: bool = False) -> None:
    """A run whose root was split after round 6, and both halves after 9 and 14; 11 was away."""
    run.mkdir(exist_ok=True)
    (run / "plan.toml").write_text(PLAN.to_toml())
    planted = ParameterTree.planted(3, 3)
    peers = range(400 if big else 12)
    for peer in peers:
        planted.admit(peer)
    update = np.ones(3, dtype=np.float32)
    present = [i for i in peers if i != 11]

    def halves(members: list[int], k: int) -> list[dict[int, np.ndarray]]:
        return [
            dict.fromkeys([i for i in members if (i % 4 >> k) % 2 == b], update) for b in (0, 1)
        ]

    for v, t, k in ((0, 6, 0), (1, 9, 1), (2, 14, 1)):
        planted.split(v, t, halves(present if v == 0 else planted.members(v), k))
    TreeStore(run / TREE, PLAN.digest).save(planted, 20)


def test_a_tree_is_drawn_and_told(tmp_path: Path) -> None:
    write_run(tmp_path)
    result = CliRunner().invoke(app, ["tree", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "node 0, split since: peers 11, to be routed when they return",
        "cluster 3, since round 9: peers 0, 4, 8",
        "cluster 4, since round 9: peers 2, 6, 10",
        "cluster 5, since round 14: peers 1, 5, 9",
        "cluster 6, since round 14: peers 3, 7",
        f"picture: {tmp_path / 'tree.png'}",
    ]
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
    svg = tmp_path / "a.svg"
    assert CliRunner().invoke(app, ["tree", str(tmp_path), "--out", str(svg)]).exit_code == 0
    assert svg.read_text().startswith("<?xml")


@pytest.mark.parametrize("big", [False, True])
def test_the_picture_says_when_and_who(tmp_path: Path, big: bool) -> None:
    write_run(tmp_path, big)
    index = read_index(tmp_path / TREE / INDEX)
    clusters = [i % 4 for i in range(400)]
    (axes,) = tree_figure(index, clusters).axes
    texts = [text.get_text() for text in axes.texts]
    assert [text for text in texts if "round" in text] == [
        "after round 6", "after round 9", "after round 14",
    ]  # fmt: skip
    # The leaves stand side by side, and every other node between its children.
    columns = [np.asarray(line.get_xdata()).tolist() for line in axes.lines]
    upright = [left for left, right in columns if left == right]
    assert upright == [1.5, 0.5, 2.5, 0, 1, 2, 3]
    if big:
        assert texts.count("100 peers\n100 of cluster 0") == 1
        assert "99 peers\n99 of cluster 3" in texts
    else:
        assert (texts.count("3 peers"), texts.count("2 peers")) == (3, 1)
        assert texts.count("\N{BLACK SQUARE}") == 11
        (plain,) = tree_figure(index).axes
        assert plain.get_legend() is None


def test_runs_without_a_tree(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no parameter tree"):
        tree(tmp_path)
    write_run(tmp_path)
    with pytest.raises(UserError, match="cannot write"):
        tree(tmp_path, out=tmp_path / "none" / "tree.png")
    with pytest.raises(UserError, match="cannot write"):
        tree(tmp_path, out=tmp_path / "tree.unknown")
    (tmp_path / TREE / INDEX).write_text("{}")
    with pytest.raises(StateError, match="damaged"):
        tree(tmp_path)


def test_the_theorem_answers() -> None:
    result = CliRunner().invoke(app, ["theory", "--clusters", "4", "--gamma", "0.2"])
    assert result.exit_code == 0
    assert "told apart? yes" in result.output
    assert CliRunner().invoke(app, ["theory", "--clusters", "1", "--gamma", "0.2"]).exit_code == 2
    with pytest.raises(UserError, match="not in"):
        theory(clusters=4, gamma=1.0)
