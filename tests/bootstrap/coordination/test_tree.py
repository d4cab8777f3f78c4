"""The tree grows, sends peers the right way, and survives the disk or says why not."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from pydantic import ConfigDict
from safetensors.numpy import save_file

from bootstrap.coordination.tree import ParameterTree
from bootstrap.coordination.tree_store import INDEX, TreeStore, read_index
from peer.errors import StateError
from peer.sealed import Sealed

SIZE, TRAINABLE = 5, 4


class Anything(Sealed):
    """A whole file, whatever it says."""

    model_config = ConfigDict(extra="allow")


def vector(*values: float) -> np.ndarray:
    return np.array([*values, *[0] * (SIZE - len(values))], dtype=np.float32)


def grown() -> ParameterTree:
    """Root 0 split by the first value, its child 1 by the second; peer 9 was away, 8 is new."""
    tree = ParameterTree.planted(SIZE, TRAINABLE)
    for peer in (0, 1, 2, 3, 4, 5, 9):
        tree.admit(peer)
    tree.nodes[0].update = vector(1, 1)
    tree.nodes[0].largest = 2.5
    east = {i: vector(1, 0.1 * i) for i in (0, 1, 2, 3)}
    tree.split(0, 7, [east, {4: vector(-1), 5: vector(-1, 0.2)}])
    tree.nodes[1].update = vector(2, 2)
    tree.split(1, 9, [{0: vector(0, 1), 1: vector(0.1, 1)}, {2: vector(0, -1), 3: vector(0, -2)}])
    cut = (frozenset({0}), frozenset({1}))
    tree.nodes[3].proposals = [cut, cut[::-1]]
    return tree


def test_a_split_makes_two_leaves_that_start_where_the_cluster_was() -> None:
    tree = grown()
    assert tree.leaves == [2, 3, 4]
    assert tree.nodes[0].children == (1, 2)
    assert [node.parent for node in tree.nodes] == [None, 0, 0, 1, 1]
    assert [node.t for node in tree.nodes] == [0, 7, 7, 9, 9]
    assert [node.largest for node in tree.nodes] == [2.5] * 5
    assert np.array_equal(tree.nodes[2].update, vector(1, 1))
    assert np.array_equal(tree.nodes[3].update, vector(2, 2))
    assert [tree.members(v) for v in range(5)] == [[9], [], [4, 5], [0, 1], [2, 3]]
    edge = tree.nodes[2].edge
    assert edge is not None
    assert edge.members == (4, 5)
    assert edge.updates.shape == (2, TRAINABLE)


def test_a_new_peer_walks_from_the_root() -> None:
    tree = grown()
    assert tree.admit(8) == 0
    assert tree.route(8, vector(3, 0.5)) == 1
    assert tree.route(8, vector(0.3, -4)) == 4
    with pytest.raises(ValueError, match="at a leaf"):
        tree.route(8, vector(1))


def test_a_member_that_was_away_goes_on_from_where_it_was() -> None:
    tree = grown()
    assert tree.admit(9) == 0
    assert not tree.at_leaf(9)
    assert tree.route(9, vector(-1, 0.1)) == 2
    assert tree.at_leaf(9)


def test_the_maximum_decides_not_the_mean() -> None:
    tree = ParameterTree.planted(SIZE, TRAINABLE)
    for peer in range(5):
        tree.admit(peer)
    near_and_far = {0: vector(1, 0), 1: vector(-1, 0)}
    tree.split(0, 1, [near_and_far, {2: vector(1, 1), 3: vector(1, 1.1)}])
    assert tree.route(4, vector(1, 0.1)) == 1


def test_buffers_do_not_route_and_ties_go_to_the_second() -> None:
    tree = grown()
    tree.admit(8)
    assert tree.route(8, np.array([0, 0, 0, 1, 100], dtype=np.float32)) == 2  # cosines of zero


def test_only_leaves_are_split_and_by_their_members() -> None:
    tree = grown()
    with pytest.raises(ValueError, match="split already"):
        tree.split(0, 10, [{0: vector(1)}, {1: vector(1)}])
    for halves in ([{4: vector(1)}, {}], [{4: vector(1)}, {0: vector(1)}]):
        with pytest.raises(ValueError, match="members"):
            tree.split(2, 10, halves)


def assert_equal(a: ParameterTree, b: ParameterTree) -> None:
    assert (a.trainable, a.places, len(a.nodes)) == (b.trainable, b.places, len(b.nodes))
    for x, y in zip(a.nodes, b.nodes, strict=True):
        assert (x.t, x.largest, x.parent, x.children) == (y.t, y.largest, y.parent, y.children)
        assert x.proposals == y.proposals
        assert np.array_equal(x.update, y.update)
        if x.edge is None or y.edge is None:
            assert x.edge is y.edge
        else:
            assert x.edge.members == y.edge.members
            assert np.array_equal(x.edge.updates, y.edge.updates)


def test_saved_and_loaded(tmp_path: Path) -> None:
    tree, store = grown(), TreeStore(tmp_path / "tree", "digest")
    assert store.load(SIZE, TRAINABLE) is None
    store.save(tree, 12)
    loaded = TreeStore(tmp_path / "tree", "digest").load(SIZE, TRAINABLE)
    assert loaded is not None
    assert_equal(loaded[0], tree)
    assert loaded[1] == 12


def test_only_what_changed_is_written_and_what_is_old_goes(tmp_path: Path) -> None:
    tree, store = grown(), TreeStore(tmp_path, "digest")
    store.save(tree, 12)
    before = set(tmp_path.glob("*.safetensors"))
    tree.nodes[4].update = vector(5)
    store.save(tree, 13)
    after = set(tmp_path.glob("*.safetensors"))
    # The children 3 and 4 and their parent had one file for their equal updates.
    assert len(after - before) == 1
    assert before <= after
    tree.nodes[4].update = vector(6)
    store.save(tree, 14)
    assert len(set(tmp_path.glob("*.safetensors")) - before) == 1


def test_a_crash_between_the_files_leaves_the_tree_of_the_round_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, store = grown(), TreeStore(tmp_path, "digest")
    store.save(tree, 12)
    expected = grown()
    tree.nodes[2].update = vector(7)

    real = store._tensors.write
    calls = 0

    def write(values: np.ndarray) -> str:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return real(values)

    monkeypatch.setattr(store._tensors, "write", write)
    with pytest.raises(KeyboardInterrupt):
        store.save(tree, 13)
    loaded = TreeStore(tmp_path, "digest").load(SIZE, TRAINABLE)
    assert loaded is not None
    assert_equal(loaded[0], expected)
    assert loaded[1] == 12


@pytest.mark.parametrize(
    ("plan", "size", "trainable"),
    [("other", SIZE, TRAINABLE), ("digest", SIZE + 1, TRAINABLE), ("digest", SIZE, TRAINABLE - 1)],
)
def test_trees_of_other_federations_are_refused(
    tmp_path: Path, plan: str, size: int, trainable: int
) -> None:
    TreeStore(tmp_path, "digest").save(grown(), 12)
    with pytest.raises(StateError, match="another plan or model"):
        TreeStore(tmp_path, plan).load(size, trainable)


def test_damaged_tensors_are_refused(tmp_path: Path) -> None:
    store = TreeStore(tmp_path, "digest")
    store.save(grown(), 12)
    file = max(tmp_path.glob("*.safetensors"))
    content = file.read_bytes()
    for damaged in (b"", content[:-1], content[:-1] + b"\xff", content + bytes(5000)):
        file.write_bytes(damaged)
        with pytest.raises(StateError, match=r"damaged|larger"):
            store.load(SIZE, TRAINABLE)
    file.unlink()
    with pytest.raises(StateError, match="missing"):
        store.load(SIZE, TRAINABLE)


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(SIZE, dtype=np.float64),
        np.zeros(SIZE + 1, dtype=np.float32),
        np.full(SIZE, np.nan, dtype=np.float32),
    ],
)
def test_tensors_of_another_kind_are_refused(tmp_path: Path, values: np.ndarray) -> None:
    store = TreeStore(tmp_path, "digest")
    store.save(grown(), 12)
    index = Anything.load(tmp_path / INDEX).model_dump()
    save_file({"values": values}, tmp_path / "new")
    digest = hashlib.sha256((tmp_path / "new").read_bytes()).hexdigest()
    (tmp_path / "new").rename(tmp_path / f"{digest}.safetensors")
    index["nodes"][0]["update"] = digest
    Anything.model_validate(index).write(tmp_path / INDEX)
    with pytest.raises(StateError, match="does not hold"):
        store.load(SIZE, TRAINABLE)


@pytest.mark.parametrize(
    ("node", "key", "value"),
    [
        (0, "children", None),
        (0, "children", [1, 1]),
        (0, "children", [1, 3]),
        (0, "parent", 0),
        (1, "children", [0, 3]),
        (1, "parent", None),
        (3, "parent", 2),
        (2, "edge", None),
        (2, "update", "../../etc/passwd"),
        (2, "largest", float("nan")),
        (2, "extra", 1),
        (2, "t", -1),
    ],
)
def test_what_is_no_tree_is_refused(tmp_path: Path, node: int, key: str, value: object) -> None:
    TreeStore(tmp_path, "digest").save(grown(), 12)
    index = Anything.load(tmp_path / INDEX).model_dump()
    index["nodes"][node][key] = value
    Anything.model_validate(index).write(tmp_path / INDEX)
    with pytest.raises(StateError, match=r"not a tree|damaged"):
        read_index(tmp_path / INDEX)


def test_peers_at_nodes_that_are_not_there_are_refused(tmp_path: Path) -> None:
    TreeStore(tmp_path, "digest").save(grown(), 12)
    index = Anything.load(tmp_path / INDEX).model_dump()
    index["places"]["3"] = 5
    Anything.model_validate(index).write(tmp_path / INDEX)
    with pytest.raises(StateError, match="not a tree"):
        read_index(tmp_path / INDEX)
    with pytest.raises(StateError, match="missing"):
        read_index(tmp_path / "none.json")
