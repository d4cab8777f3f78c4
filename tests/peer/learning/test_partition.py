"""Dealing a data set, and what makes clusters differ."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.errors import UserError
from peer.learning.partition import (
    Cluster,
    Dealer,
    PeerData,
    apportion,
    deal,
    deal_training,
    permute_labels,
    pool_indices,
    rotate,
    swap_labels,
)
from peer.learning.sources import Dataset, load_dataset
from peer.plan import PartitionPlan, Plan
from peer.randomness import Purpose, generator


def numbered(train: int = 200, test: int = 60, classes: int = 10, side: int = 4) -> Dataset:
    """Return images whose first pixel is their number, so that they can be told apart."""

    def part(m: int) -> tuple[Any, Any]:
        x = np.zeros((m, 1, side, side), dtype=np.uint8)
        x[:, 0, 0, 0] = np.arange(m)
        return x, np.arange(m) % classes

    return Dataset(*part(train), *part(test), classes, (1, side, side), scale=0.5)


def plan(n: int = 4, **partition: Any) -> Plan:
    return Plan(n=n, seed=11, partition=PartitionPlan(**partition))


def dealt(y: Any, plan: Plan, index: int) -> Any:
    return deal_training(y, plan, plan.n)(index)


def numbers(data: PeerData) -> list[int]:
    return [int(value) for value in data.train_x.reshape(len(data.train_y), -1).max(axis=1) * 2]


def test_shares_are_balanced_and_do_not_overlap_while_the_data_last() -> None:
    shares = [deal(numbered(), plan(train_per_peer=50), i, own=False) for i in range(4)]
    taken = [number for data in shares for number in numbers(data)]
    assert sorted(taken) == list(range(200))
    for data in shares:
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
    shares = [dealt(y, plan(n, train_per_peer=count), i) for i in range(n)]
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
    shares = [dealt(y, plan(n), i) for i in range(n)]
    everything = np.concatenate(shares)
    assert len(set(everything.tolist())) == len(everything) == len(y) // n * n
    for c in np.unique(y):
        per_peer = [int((y[share] == c).sum()) for share in shares]
        assert max(per_peer) - min(per_peer) <= 2  # one of dealing, one of the cards left over


def test_too_few_samples_for_equal_shares() -> None:
    with pytest.raises(UserError, match="3 training samples are too few for 4 peers"):
        dealt(np.array([0, 1, 2]), plan(), 0)


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


@pytest.mark.parametrize(
    ("skew", "count", "digest"),
    [
        ("none", None, "da6e0b70813bda6d"),
        ("none", 30, "ea531bb3ef62be54"),
        ("dirichlet", 30, "8dcc42effde497d6"),
        ("quantity", 30, "8ba833b516282906"),
    ],
)
def test_peers_of_any_version_deal_alike(skew: Any, count: int | None, digest: str) -> None:
    """Every peer deals for itself: a device that was updated must not hold others' samples."""
    dealer = Dealer(numbered(), plan(6, skew=skew, train_per_peer=count, test_per_peer=20))
    sha = hashlib.sha256()
    for index in range(6):
        for part in dealer.share(index):
            sha.update(part.astype("<i8").tobytes())
    assert sha.hexdigest()[:16] == digest


def test_samples_are_shuffled_once_for_all_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    draws: list[Purpose] = []

    def counting(seed: int, purpose: Purpose, **place: int) -> np.random.Generator:
        draws.append(purpose)
        return generator(seed, purpose, **place)

    monkeypatch.setattr("peer.learning.partition.generator", counting)
    for skew, extra in (("none", []), ("dirichlet", [Purpose.SKEW] * 2)):
        dealer = Dealer(numbered(), plan(20, skew=skew, train_per_peer=30))
        for index in range(20):
            dealer.share(index)
        assert sorted(draws) == sorted([Purpose.PARTITION, Purpose.TEST_SPLIT, *extra])
        draws.clear()


def test_scaling() -> None:
    data = deal(numbered(), plan(), 0, own=True)
    assert data.train_x[199, 0, 0, 0] == 99.5


@pytest.mark.parametrize(("clusters", "turns"), [(1, [0]), (2, [0, 2]), (4, [0, 1, 2, 3])])
def test_rotation(clusters: int, turns: list[int]) -> None:
    x = np.array([[[[1, 2], [3, 4]]]], dtype=np.uint8)
    counter_clockwise = [[[1, 2], [3, 4]], [[2, 4], [1, 3]], [[4, 3], [2, 1]], [[3, 1], [4, 2]]]
    y = np.array([5])
    for number, turn in enumerate(turns):
        rotated, labels = rotate(x, y, Cluster(number, clusters, 10, 0))
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
        assert swap_labels(x, y, Cluster(number, clusters, 10, 0))[1].tolist() == expected
    assert y.tolist() == list(range(10))


def test_label_permutation() -> None:
    """The k-th cluster's is the permutation that numpy draws of (seed, k, purpose 16)."""
    x, y = np.zeros((10, 3)), np.arange(10)
    for number in range(5):
        entropy = np.random.SeedSequence((11, number + 1, 0, 16))
        expected = np.random.Generator(np.random.PCG64(entropy)).permutation(10)
        named = permute_labels(x, y, Cluster(number, 5, 10, 11))[1]
        assert named.tolist() == expected.tolist()
        assert sorted(named.tolist()) == list(range(10))
    assert y.tolist() == list(range(10))
    own = [
        deal(numbered(), plan(kind="label-permutation", clusters=5), i, own=True) for i in (0, 1)
    ]
    assert (
        own[0].train_y[:10].tolist()
        == own[0].test_y[:10].tolist()
        == [2, 9, 8, 0, 5, 4, 3, 1, 7, 6]
    )
    assert (
        own[1].train_y[:10].tolist() == own[1].test_y[:10].tolist() != own[0].test_y[:10].tolist()
    )


def test_words_are_dealt_as_often_as_they_occur() -> None:
    """Of classes every one would be as frequent in a share of given size, however rare it is."""
    y = np.repeat([1, 2], [900, 100])
    x = np.arange(3000, dtype=np.int32).reshape(1000, 3) % 3
    text = Dataset(x, y, x, y, 3, (3,), scale=0.5)
    shares = [deal(text, plan(train_per_peer=200, test_per_peer=100), i, own=False) for i in (0, 1)]
    for data in shares:
        assert data.train_x.dtype == np.int32
        assert data.train_x.max() == 2
        assert 10 <= (data.train_y == 2).sum() <= 30
        assert 2 <= (data.test_y == 2).sum() <= 20
    with pytest.raises(UserError, match="needs classes"):
        deal(text, plan(skew="dirichlet"), 0, own=False)


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


def test_whole_numbers_by_largest_remainders() -> None:
    assert apportion(np.array([0.5, 0.3, 0.2]), 10).tolist() == [5, 3, 2]
    assert apportion(np.array([0.25, 0.25, 0.5]), 3).tolist() == [1, 1, 1]
    assert apportion(np.array([0.49, 0.26, 0.25]), 2).tolist() == [1, 1, 0]


@settings(max_examples=40)
@given(st.integers(2, 12), st.floats(0.01, 100), st.integers(1, 30), st.integers(0, 99))
def test_skewed_labels_keep_the_size_and_share_nothing_while_a_class_lasts(
    n: int, concentration: float, count: int, seed: int
) -> None:
    y = np.arange(n * 30 * 5) % 5
    skewed = Plan(
        n=n,
        seed=seed,
        partition=PartitionPlan(
            skew="dirichlet", concentration=concentration, train_per_peer=count
        ),
    )
    shares = [dealt(y, skewed, i) for i in range(n)]
    assert {len(share) for share in shares} == {count}
    everything = np.concatenate(shares)
    for c in range(5):
        uses = np.bincount(everything[y[everything] == c], minlength=len(y))[y == c]
        assert uses.max() - uses.min() <= 1


def test_a_small_concentration_is_uneven_and_a_large_one_even() -> None:
    def largest_class(concentration: float) -> float:
        skewed = plan(20, skew="dirichlet", concentration=concentration, train_per_peer=100)
        y = np.arange(20_000) % 10
        shares = [np.bincount(y[dealt(y, skewed, i)]) for i in range(20)]
        return float(np.mean([share.max() for share in shares]))

    # E max of Dir(0.1) with 10 classes is about 0.7; of Dir(1000) about 0.1.
    assert 55 < largest_class(0.1) < 85
    assert 10 <= largest_class(1000) < 13


def test_skewed_labels_are_tested_as_they_are_trained() -> None:
    skewed = plan(6, skew="dirichlet", concentration=0.3, train_per_peer=40, test_per_peer=40)
    for index in range(6):
        data = deal(numbered(400, 400), skewed, index, own=False)
        trained, tested = (np.bincount(y, minlength=10) for y in (data.train_y, data.test_y))
        assert np.array_equal(trained, tested)


def test_skewed_quantities_share_out_as_much_as_equal_ones() -> None:
    skewed = plan(8, skew="quantity", concentration=0.5, train_per_peer=50)
    y = np.arange(400) % 10
    shares = [dealt(y, skewed, i) for i in range(8)]
    assert sorted(np.concatenate(shares)) == list(range(400))
    sizes = [len(share) for share in shares]
    assert min(sizes) >= 10
    assert max(sizes) > 2 * min(sizes)
    for share in shares:
        per_class = np.bincount(y[share], minlength=10)
        assert per_class.max() - per_class.min() <= 1
    rotated = plan(8, kind="rotation", clusters=4, skew="quantity", train_per_peer=50)
    assert len(deal(numbered(400), rotated, 3, own=False).train_y) == sizes[3]


def table(path: Path) -> str:
    """Write 60 rows of three sites, whose feature says which site and row it is."""
    rows = [f"{100 * site + row},{row % 2},s{site}" for site in (2, 0, 1) for row in range(20)]
    path.write_text("\n".join(["x,y,site", *rows]))
    return f"csv:{path}#label=y&group=site&test=0.2"


def test_a_natural_partition_keeps_to_its_groups(tmp_path: Path) -> None:
    dataset = load_dataset(table(tmp_path / "sites.csv"), seed=0)
    assert (dataset.groups, dataset.shape) == (("s0", "s1", "s2"), (1,))
    natural = plan(7, kind="natural", clusters=3)
    shares = [deal(dataset, natural, i, own=False) for i in range(7)]
    for index, data in enumerate(shares):
        assert np.array_equal(data.train_x, deal(dataset, natural, index, own=True).train_x)
        assert (data.train_x // 100 == index % 3).all()
        assert (data.test_x // 100 == index % 3).all()
        assert len(data.test_y) == 4
    # Group 0 has three members (peers 0, 3 and 6) for its 16 training samples, the others two.
    assert [len(data.train_y) for data in shares] == [5, 8, 8, 5, 8, 8, 5]
    assert len(set(np.concatenate([data.train_x.ravel() for data in shares]))) == 47


def test_natural_partitions_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data that name their groups"):
        deal(numbered(), plan(kind="natural", clusters=2), 0, own=False)
    dataset = load_dataset(table(tmp_path / "sites.csv"), seed=0)
    with pytest.raises(UserError, match=r"have 3 groups, but partition\.clusters = 2"):
        deal(dataset, plan(kind="natural", clusters=2), 0, own=False)
    everything = deal(dataset, plan(kind="none"), 0, own=True)
    assert len(everything.train_y) == 48


def test_an_experiment_may_deal_a_part_and_as_another_cluster() -> None:
    dataset = numbered()
    plan = Plan(n=4, partition=PartitionPlan(kind="rotation", clusters=2, train_per_peer=20))
    usual = deal(dataset, plan, 0, own=False)
    half = deal(dataset, plan, 0, own=False, part=0.5)
    assert np.array_equal(half.train_x, usual.train_x[::2])
    assert np.array_equal(half.test_x, usual.test_x)
    least = deal(dataset, plan, 0, own=False, part=0.001)
    assert len(least.train_y) == 1
    turned = deal(dataset, plan, 0, own=False, cluster=1)
    assert np.array_equal(turned.train_x, np.rot90(usual.train_x, 2, axes=(2, 3)))
    assert np.array_equal(turned.test_x, np.rot90(usual.test_x, 2, axes=(2, 3)))
