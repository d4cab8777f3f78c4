"""Deals a data set to peers: whose samples are whose, and how a cluster's data differ.

Everything here is a pure function of the data set, the plan and a peer's index, so every peer deals
for itself and all agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.errors import UserError
from peer.learning.sources import Dataset, is_text
from peer.plan import Plan
from peer.randomness import Purpose, generator

Array = npt.NDArray[Any]
Labels = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PeerData:
    """One peer's data: inputs [m, *shape], float32, scaled, or int32, token ids; labels int64 [m]
    in 0 to classes - 1."""

    train_x: Array
    train_y: Labels
    test_x: Array
    test_y: Labels
    classes: int
    shape: tuple[int, ...]


def deal(dataset: Dataset, plan: Plan, index: int, *, own: bool) -> PeerData:
    """Return the data of peer `index`, transformed as its cluster's.

    `own`: the peer gave the data set itself, so it takes all of it. Only what is dealt is read and
    converted. Raises UserError when the transform or the partition does not fit the data, or there
    are too few samples for n peers.
    """
    if own and plan.partition.kind != "natural":
        train, test = np.arange(len(dataset.train_y)), np.arange(len(dataset.test_y))
    else:
        train, test = share(dataset, plan, index)
    transform = TRANSFORMS[plan.partition.kind]
    cluster = Cluster.of(plan, plan.cluster_of(index), dataset.classes)

    def take(x: Array, y: Labels, chosen: Indices) -> tuple[Array, Labels]:
        x, y = transform(x[chosen], y[chosen], cluster)
        return to_inputs(x, dataset.scale), y

    train_x, train_y = take(dataset.train_x, dataset.train_y, train)
    test_x, test_y = take(dataset.test_x, dataset.test_y, test)
    return PeerData(train_x, train_y, test_x, test_y, dataset.classes, dataset.shape)


def to_inputs(x: Array, scale: float) -> Array:
    """Return inputs as models take them: stored values times `scale`, but token ids as they are."""
    if is_text(x):
        return np.ascontiguousarray(x)
    return np.multiply(x, np.float32(scale), dtype=np.float32, order="C")


def blank_inputs(count: int, shape: tuple[int, ...], *, text: bool) -> Array:
    """Return `count` inputs [count, *shape] of zeros, as `to_inputs` makes them."""
    return np.zeros((count, *shape), dtype=np.int32 if text else np.float32)


def share(dataset: Dataset, plan: Plan, index: int) -> tuple[Indices, Indices]:
    """Return which training and which test samples of a data set peer `index` gets.

    Of a natural partition, peer i gets its part of group i mod K, train and test, and nothing of
    the others. Raises UserError when the data set has no such groups, or too few samples.
    """
    train_y, test_y = dataset.train_y, dataset.test_y
    if is_text(dataset.train_x):
        if plan.partition.skew == "dirichlet":
            raise UserError("the skew dirichlet needs classes: a text has words")
        # [choice] Words are dealt as often as they occur, for that is what a model of them learns.
        train_y, test_y = np.zeros_like(train_y), np.zeros_like(test_y)
    if plan.partition.kind != "natural":
        everyone = Hand(plan, plan.n, index)
        return train_indices(train_y, everyone), _tested(test_y, everyone)
    k, found = plan.partition.clusters, len(dataset.groups)
    if dataset.train_group is None or dataset.test_group is None:
        raise UserError(
            "the partition natural needs data that name their groups: these do not",
            "csv:FILE#label=COLUMN&group=COLUMN does, and text:FILE.csv",
        )
    if found != k:
        raise UserError(f"the data have {found} groups, but partition.clusters = {k}")
    group, rank = plan.cluster_of(index), index // k
    members = Hand(plan, len(range(group, plan.n, k)), rank)
    train = np.flatnonzero(dataset.train_group == group)
    test = np.flatnonzero(dataset.test_group == group)
    if not len(test):
        raise UserError(f"the group {dataset.groups[group]!r} has no sample to test on")
    return (
        train[train_indices(train_y[train], members)],
        test[_tested(test_y[test], members)],
    )


@dataclass(frozen=True)
class Hand:
    """Whose samples are dealt: number `index` of `n` peers that share a set of samples."""

    plan: Plan
    n: int
    index: int

    def proportions(self, size: int) -> npt.NDArray[np.float64]:
        """Return Dirichlet draws [n, size], the same at every peer."""
        rng = generator(self.plan.seed, Purpose.SKEW)
        return rng.dirichlet(np.full(size, self.plan.partition.concentration), size=self.n)


def train_indices(y: Labels, hand: Hand) -> Indices:
    """Return which of the training samples of labels `y` [m], shared by `hand.n`, are one's own.

    Raises UserError when they are too few.
    """
    if len(y) < hand.n and hand.plan.partition.train_per_peer is None:
        raise UserError(
            f"{len(y)} training samples are too few for {hand.n} peers",
            "set partition.train_per_peer: peers then share samples",
        )
    piles = _shuffled_by_class(y, generator(hand.plan.seed, Purpose.PARTITION))
    return SKEWS[hand.plan.partition.skew](piles, hand)


def balanced(piles: list[Indices], hand: Hand) -> Indices:
    """Equal shares of every class.

    With `train_per_peer`, the federation's samples are numbered through, class after class in turn,
    and each peer takes the next train_per_peer of them: class-balanced to one sample, and no two
    peers share one while the class lasts. Without, every class is dealt like cards, m // n samples
    a peer, and no sample twice: class-balanced as far as the data are.
    """
    count = hand.plan.partition.train_per_peer
    if count is None:
        everything = np.concatenate(piles)
        return everything[hand.index :: hand.n][: len(everything) // hand.n]
    return _numbered_through(piles, hand.index * count, count)


def dirichlet(piles: list[Indices], hand: Hand) -> Indices:
    """Label skew: a share of the usual size, its classes in proportions q_i ~ Dir(concentration).

    T.-M. H. Hsu, H. Qi, M. Brown, "Measuring the effects of non-identical data distribution for
    federated visual classification", 2019. Peers take the samples of a class one after the other,
    so that no two share one while the class lasts.
    """
    size = hand.plan.partition.train_per_peer or sum(map(len, piles)) // hand.n
    counts = np.array([apportion(q, size) for q in hand.proportions(len(piles))])
    starts = counts[: hand.index].sum(axis=0)
    return _from_piles(piles, starts, counts[hand.index])


def quantity(piles: list[Indices], hand: Hand) -> Indices:
    """Quantity skew: class-balanced shares of sizes ~ Dir(concentration).

    [choice] Each has one sample of each class at least; together they are as large as equal ones.
    """
    size = hand.plan.partition.train_per_peer or sum(map(len, piles)) // hand.n
    least = min(len(piles), size)
    proportions = generator(hand.plan.seed, Purpose.SKEW).dirichlet(
        np.full(hand.n, hand.plan.partition.concentration)
    )
    sizes = least + apportion(proportions, (size - least) * hand.n)
    return _numbered_through(piles, int(sizes[: hand.index].sum()), int(sizes[hand.index]))


Skew = Callable[[list[Indices], Hand], Indices]
"""Shuffled indices of each class -> those of one peer."""

SKEWS: dict[str, Skew] = {"none": balanced, "dirichlet": dirichlet, "quantity": quantity}
"""How shares differ, by the skew's name in a plan."""


def apportion(proportions: npt.NDArray[np.float64], total: int) -> Indices:
    """Return whole numbers in these proportions (which sum to 1) that sum to `total`.

    By largest remainders; ties go to the first.
    """
    exact = proportions * total
    counts = np.floor(exact).astype(np.int64)
    missing = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return counts


def _numbered_through(piles: list[Indices], start: int, count: int) -> Indices:
    """Return samples start to start + count - 1, numbered through class after class in turn."""
    turns, classes = np.divmod(np.arange(start, start + count), len(piles))
    return np.array([_nth(piles[c], i) for i, c in zip(turns, classes, strict=True)])


def _from_piles(piles: list[Indices], starts: Indices, counts: Indices) -> Indices:
    """Return counts[c] samples of each pile c from its place starts[c] on."""
    parts = (
        _nth(pile, np.arange(start, start + count))
        for pile, start, count in zip(piles, starts, counts, strict=True)
    )
    return np.concatenate(list(parts))


def _nth(pile: Indices, place: Any) -> Any:
    """[choice] A class that is used up starts again from its first sample."""
    return pile[place % len(pile)]


def _tested(y: Labels, hand: Hand) -> Indices:
    """Return which test samples of labels `y` [m] a peer gets.

    [choice] With label skew, test_per_peer of its own proportions, so that a peer is judged by what
    it has to do with; else the pool, the same for all.
    """
    if hand.plan.partition.skew != "dirichlet":
        return pool_indices(y, hand.plan)
    piles = _shuffled_by_class(y, generator(hand.plan.seed, Purpose.TEST_SPLIT))
    q = hand.proportions(len(piles))[hand.index]
    counts = apportion(q, min(hand.plan.partition.test_per_peer, len(y)))
    return _from_piles(piles, np.zeros_like(counts), counts)


def pool_indices(y: Labels, plan: Plan) -> Indices:
    """Return the test pool: `test_per_peer` class-balanced samples of labels `y` [m], or all.

    [choice] One draw serves all clusters, each with its own transform: clusters then differ by the
    transform alone. A class with too few samples is filled up from the others.
    """
    piles = _shuffled_by_class(y, generator(plan.seed, Purpose.TEST_SPLIT))
    ranks = np.concatenate([np.arange(len(pile)) for pile in piles])
    in_turn = np.concatenate(piles)[np.argsort(ranks, kind="stable")]
    return in_turn[: plan.partition.test_per_peer]


def _shuffled_by_class(y: Labels, rng: np.random.Generator) -> list[Indices]:
    """Return the shuffled indices of each class that occurs in `y` [m]."""
    order = rng.permutation(len(y))
    return [order[y[order] == c] for c in np.unique(y)]


@dataclass(frozen=True)
class Cluster:
    """Cluster `number` of K = `count`, of data with `classes` classes; `seed` is the plan's."""

    number: int
    count: int
    classes: int
    seed: int

    @classmethod
    def of(cls, plan: Plan, number: int, classes: int) -> Cluster:
        """Return cluster `number` of a plan."""
        return cls(number, plan.partition.clusters, classes, plan.seed)


Transform = Callable[[Array, Labels, Cluster], tuple[Array, Labels]]
"""Stored inputs [m, *shape] and labels [m] -> those that the cluster has instead."""


def keep(x: Array, y: Labels, _cluster: Cluster) -> tuple[Array, Labels]:
    """Leave the samples as they are: clusters differ, if at all, by whose samples they hold."""
    return x, y


def rotate(x: Array, y: Labels, cluster: Cluster) -> tuple[Array, Labels]:
    """Rotate images [m, c, s, s] by number * 360 / K degrees (PANM, Section V).

    [choice] Counter-clockwise.

    Raises UserError when the inputs are not square images.
    """
    if x.ndim != 4 or x.shape[2] != x.shape[3]:
        raise UserError(f"the partition rotation needs square images, not shape {x.shape[1:]}")
    return np.rot90(x, k=4 // cluster.count * cluster.number, axes=(2, 3)), y


SWAPS: dict[int, tuple[tuple[int, int], ...]] = {
    1: (),
    2: ((0, 1), (6, 7)),
    4: ((0, 1), (2, 3), (4, 5), (6, 7)),
}
"""The pair of labels that each cluster exchanges, by K (PANM, Section V)."""


def swap_labels(x: Array, y: Labels, cluster: Cluster) -> tuple[Array, Labels]:
    """Exchange the cluster's pair of labels.

    Raises UserError when there are fewer than 8 classes.
    """
    pairs = SWAPS[cluster.count]
    if not pairs:
        return x, y
    if cluster.classes < 8:
        raise UserError(f"the partition label-swap needs 8 classes or more, not {cluster.classes}")
    a, b = pairs[cluster.number]
    renamed = np.arange(cluster.classes)
    renamed[[a, b]] = b, a
    return x, renamed[y]


def permute_labels(x: Array, y: Labels, cluster: Cluster) -> tuple[Array, Labels]:
    """Rename the labels by the cluster's own random permutation of all classes.

    As in CFL, Section VI. Permutations are drawn one by one: two may agree, or one change nothing.
    """
    rng = generator(cluster.seed, Purpose.LABELS, index=cluster.number)
    return x, rng.permutation(cluster.classes)[y]


TRANSFORMS: dict[str, Transform] = {
    "none": keep,
    "natural": keep,
    "rotation": rotate,
    "label-swap": swap_labels,
    "label-permutation": permute_labels,
}
"""How clusters differ, by the partition's name in a plan."""
