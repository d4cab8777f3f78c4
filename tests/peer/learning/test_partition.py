"""Dealing a data set, and what makes clusters differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.errors import UserError
from peer.learning.partition import (
    Cluster,
    PeerData,
    deal,
    pool_indices,
    rotate,
    swap_labels,
    train_indices,
)
from peer.learning.sources import Dataset
from peer.plan import PartitionPlan, Plan


def numbered(train: int = 200, test: int = 60, classes: int = 10, side: int = 4) -> Dataset:
    """Return images whose first pixel is their number, so that they can be told apart."""

    def part(m: int) -> tuple[Any, Any]:
        x = np.zeros((m, 1, side, side), dtype=np.uint8)
        x[:, 0, 0, 0] = np.arange(m)
        return x, np.arange(m) % classes

    return Dataset(*part(train), *part(test), classes, (1, side, side), scale=0.5)


def plan(n: int = 4, **partition: Any) -> Plan:
    return Plan(n=n, seed=11, partition=PartitionPlan(**partition))


def numbers(data: PeerData) -> list[int]:
    return [int(value) for value in data.train_x.reshape(len(data.train_y), -1).max(axis=1) * 2]


def test_shares_are_balanced_and_do_not_overlap_while_the_data_last() -> None:
    dealt = [deal(numbered(), plan(train_per_peer=50), i, own=False) for i in range(4)]
    taken = [number for data in dealt for number in numbers(data)]
    assert sorted(taken) == list(range(200))
    for data in dealt:
        assert np.bincount(data.train_y).tolist() == [5] * 10
        assert data.train_x.dtype == np.float32
        assert data.train_y.dtype == np.int64
        assert data.shape == (1, 4, 4)


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 6), min_size=20, max_size=120),
    st.integers(2, 9),
    st.integers(1, 40),
)
def test_given_counts_are_balanced_and_wrap_only_when_a_class_is_used_up(
    labels: list[int], n: int, count: int
) -> None:
    y = np.array(labels)
    shares = [train_indices(y, plan(n, train_per_peer=count), i) for i in range(n)]
    present = np.unique(y)
    for share in shares:
        assert len(share) == count
        per_class = [int((y[share] == c).sum()) for c in present]
        assert max(per_class) - min(per_class) <= 1
    everything = np.concatenate(shares)
    for c in present:
        uses = np.bincount(everything[y[everything] == c], minlength=len(y))[y == c]
        assert uses.max() - uses.min() <= 1


@settings(max_examples=60)
@given(st.lists(st.integers(0, 6), min_size=9, max_size=120), st.integers(2, 9))
def test_equal_shares_follow_the_data_and_never_overlap(labels: list[int], n: int) -> None:
    y = np.array(labels)
    shares = [train_indices(y, plan(n), i) for i in range(n)]
    everything = np.concatenate(shares)
    assert len(set(everything.tolist())) == len(everything) == len(y) // n * n
    for c in np.unique(y):
        per_peer = [int((y[share] == c).sum()) for share in shares]
        assert max(per_peer) - min(per_peer) <= 2  # one of dealing, one of the cards left over


def test_too_few_samples_for_equal_shares() -> None:
    with pytest.raises(UserError, match="3 training samples are too few for 4 peers"):
        train_indices(np.array([0, 1, 2]), plan(), 0)


def test_the_test_pool_is_balanced_and_shared() -> None:
    assert (
        np.bincount(pool_indices(np.arange(60) % 10, plan(test_per_peer=20)) % 10).tolist()
        == [2] * 10
    )
    first, second = (deal(numbered(), plan(test_per_peer=20), i, own=False) for i in (0, 3))
    assert np.array_equal(first.test_x, second.test_x)
    everything = deal(numbered(), plan(test_per_peer=1000), 0, own=False)
    assert sorted(everything.test_x[:, 0, 0, 0] * 2) == list(range(60))


def test_a_small_class_is_filled_up_from_the_others() -> None:
    y = np.array([0] * 10 + [1] * 2)
    chosen = pool_indices(y, plan(test_per_peer=8))
    assert np.bincount(y[chosen]).tolist() == [6, 2]
    assert len(set(chosen.tolist())) == 8


def test_own_data_are_all_used_and_still_transformed() -> None:
    data = deal(numbered(), plan(kind="label-swap", clusters=2, train_per_peer=3), 1, own=True)
    assert len(data.train_y) == 200
    assert data.train_y[:10].tolist() == [0, 1, 2, 3, 4, 5, 7, 6, 8, 9]
    assert numbers(data)[:3] == [0, 1, 2]


def test_scaling() -> None:
    data = deal(numbered(), plan(), 0, own=True)
    assert data.train_x[199, 0, 0, 0] == 99.5


@pytest.mark.parametrize(("clusters", "turns"), [(1, [0]), (2, [0, 2]), (4, [0, 1, 2, 3])])
def test_rotation(clusters: int, turns: list[int]) -> None:
    x = np.array([[[[1, 2], [3, 4]]]], dtype=np.uint8)
    counter_clockwise = [[[1, 2], [3, 4]], [[2, 4], [1, 3]], [[4, 3], [2, 1]], [[3, 1], [4, 2]]]
    y = np.array([5])
    for number, turn in enumerate(turns):
        rotated, labels = rotate(x, y, Cluster(number, clusters, 10))
        assert rotated[0, 0].tolist() == counter_clockwise[turn]
        assert labels.tolist() == [5]
    assert x[0, 0].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("clusters", "pairs"),
    [(1, [()]), (2, [(0, 1), (6, 7)]), (4, [(0, 1), (2, 3), (4, 5), (6, 7)])],
)
def test_label_swap(clusters: int, pairs: list[tuple[int, ...]]) -> None:
    x, y = np.zeros((10, 3)), np.arange(10)
    for number, pair in enumerate(pairs):
        expected = list(range(10))
        if pair:
            expected[pair[0]], expected[pair[1]] = pair[1], pair[0]
        assert swap_labels(x, y, Cluster(number, clusters, 10))[1].tolist() == expected
    assert y.tolist() == list(range(10))


def test_train_and_test_are_transformed_alike() -> None:
    rotated = deal(numbered(), plan(kind="rotation", clusters=4), 1, own=True)
    assert rotated.train_x[7, 0, 3, 0] == rotated.test_x[7, 0, 3, 0] == 3.5
    swapped = deal(numbered(), plan(kind="label-swap", clusters=4), 1, own=True)
    assert swapped.train_y[:4].tolist() == swapped.test_y[:4].tolist() == [0, 1, 3, 2]


def test_transforms_that_do_not_fit() -> None:
    y = np.arange(4)
    tall, flat = (
        Dataset(np.zeros((4, *shape)), y, np.zeros((4, *shape)), y, 4, shape)
        for shape in ((1, 3, 2), (9,))
    )
    for data in (tall, flat):
        with pytest.raises(UserError, match="needs square images"):
            deal(data, plan(kind="rotation", clusters=2), 0, own=True)
    with pytest.raises(UserError, match="8 classes or more, not 4"):
        deal(flat, plan(kind="label-swap", clusters=2), 0, own=True)
    assert deal(flat, plan(kind="label-swap", clusters=1), 0, own=True).classes == 4
