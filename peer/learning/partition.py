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


Poison = Callable[[Array, Labels, int], tuple[Array, Labels]]
"""Stored training inputs [m, *shape], labels [m], number of classes -> what an attacker has."""


def deal(
    dataset: Dataset,
    plan: Plan,
    index: int,
    *,
    own: bool,
    poison: Poison | None = None,
    cluster: int | None = None,
    part: float = 1.0,
) -> PeerData:
    """Return the data of peer `index`, transformed as its cluster's.

    `own`: the peer gave the data set itself, so it takes all of it. `poison`: what an experiment
    does to its training samples; `cluster`: whose data it has instead of its own cluster's; `part`,
    in (0, 1]: how much of its training samples. Only what is dealt is read and converted. Raises
    UserError when the transform or the partition does not fit the data, or there are too few
    samples for n peers.
    """
    if own and plan.partition.kind != "natural":
        train, test = np.arange(len(dataset.train_y)), np.arange(len(dataset.test_y))
    else:
        train, test = Dealer(dataset, plan).share(index)
    transform = TRANSFORMS[plan.partition.kind]
    number = plan.cluster_of(index) if cluster is None else cluster
    kind = Cluster.of(plan, number, dataset.classes)
    train = thinned(train, part)

    train_x, train_y = transform(dataset.train_x[train], dataset.train_y[train], kind)
    if poison is not None:
        train_x, train_y = poison(train_x, train_y, dataset.classes)
    test_x, test_y = transform(dataset.test_x[test], dataset.test_y[test], kind)
    return PeerData(
        to_inputs(train_x, dataset.scale),
        train_y,
        to_inputs(test_x, dataset.scale),
        test_y,
        dataset.classes,
        dataset.shape,
    )


def thinned(dealt: Indices, part: float) -> Indices:
    """Return the given part of the dealt samples, one at least. [choice] Evenly spaced: as
    class-balanced as the deal is."""
    count = max(1, round(part * len(dealt)))
    return dealt[np.arange(count) * len(dealt) // count]


def to_inputs(x: Array, scale: float) -> Array:
    """Return inputs as models take them: stored values times `scale`, but token ids as they are."""
    if is_text(x):
        return np.ascontiguousarray(x)
    return np.multiply(x, np.float32(scale), dtype=np.float32, order="C")


def blank_inputs(count: int, shape: tuple[int, ...], *, text: bool) -> Array:
    """Return `count` inputs [count, *shape] of zeros, as `to_inputs` makes them."""
    return np.zeros((count, *shape), dtype=np.int32 if text else np.float32)


class Dealer:
    """Says which training and which test samples of a data set each peer of a plan gets.

    Of a natural partition, peer i gets its part of group i mod K, train and test, and nothing of
    the others. What the peers of a group have in common, the shuffled samples above all, is
    computed once.
    """

    def __init__(self, dataset: Dataset, plan: Plan) -> None:
        """Raises UserError when the data have not the groups of a natural partition."""
        self._dataset = dataset
        self._plan = plan
        self._train_y, self._test_y = dataset.train_y, dataset.test_y
        if is_text(dataset.train_x):
            if plan.partition.skew == "dirichlet":
                raise UserError("the skew dirichlet needs classes: a text has words")
            # [choice] Words are dealt as often as they occur: that is what a model of them learns.
            self._train_y, self._test_y = map(np.zeros_like, (self._train_y, self._test_y))
        if plan.partition.kind == "natural":
            _check_groups(dataset, plan)
        self._decks: dict[int, tuple[Deal, Deal]] = {}

    def share(self, index: int) -> tuple[Indices, Indices]:
        """Return the training and the test samples of peer `index`.

        Raises UserError when there are too few.
        """
        natural = self._plan.partition.kind == "natural"
        group, rank = divmod(index, self._plan.partition.clusters)[::-1] if natural else (0, index)
        if group not in self._decks:
            self._decks[group] = self._group(group) if natural else self._everyone()
        train, test = self._decks[group]
        return train(rank), test(rank)

    def _everyone(self) -> tuple[Deal, Deal]:
        plan = self._plan
        return deal_training(self._train_y, plan, plan.n), _deal_tests(self._test_y, plan, plan.n)

    def _group(self, group: int) -> tuple[Deal, Deal]:
        """Return the deal of one group's samples to its members."""
        plan, dataset = self._plan, self._dataset
        members = len(range(group, plan.n, plan.partition.clusters))
        train, test = (
            np.flatnonzero(numbers == group)
            for numbers in (dataset.train_group, dataset.test_group)
        )
        if not len(test):
            raise UserError(f"the group {dataset.groups[group]!r} has no sample to test on")
        train_of = deal_training(self._train_y[train], plan, members)
        test_of = _deal_tests(self._test_y[test], plan, members)
        return lambda rank: train[train_of(rank)], lambda rank: test[test_of(rank)]


def _check_groups(dataset: Dataset, plan: Plan) -> None:
    k, found = plan.partition.clusters, len(dataset.groups)
    if dataset.train_group is None or dataset.test_group is None:
        raise UserError(
            "the partition natural needs data that name their groups: these do not",
            "csv:FILE#label=COLUMN&group=COLUMN does, and text:FILE.csv",
        )
    if found != k:
        raise UserError(f"the data have {found} groups, but partition.clusters = {k}")


Deal = Callable[[int], Indices]
"""The number of one of the peers that share a set of samples -> those that it gets."""


def deal_training(y: Labels, plan: Plan, n: int) -> Deal:
    """Return the deal of the training samples of labels `y` [m] to `n` peers.

    Raises UserError when they are too few.
    """
    if len(y) < n and plan.partition.train_per_peer is None:
        raise UserError(
            f"{len(y)} training samples are too few for {n} peers",
            "set partition.train_per_peer: peers then share samples",
        )
    piles = _shuffled_by_class(y, generator(plan.seed, Purpose.PARTITION))
    return SKEWS[plan.partition.skew](piles, plan, n)


def balanced(piles: list[Indices], plan: Plan, n: int) -> Deal:
    """Equal shares of every class.

    With `train_per_peer`, the federation's samples are numbered through, class after class in turn,
    and each peer takes the next train_per_peer of them: class-balanced to one sample, and no two
    peers share one while the class lasts. Without, every class is dealt like cards, m // n samples
    a peer, and no sample twice: class-balanced as far as the data are.
    """
    count = plan.partition.train_per_peer
    if count is not None:
        return lambda index: _numbered_through(piles, index * count, count)
    everything = np.concatenate(piles)
    return lambda index: everything[index::n][: len(everything) // n]


def dirichlet(piles: list[Indices], plan: Plan, n: int) -> Deal:
    """Label skew: a share of the usual size, its classes in proportions q_i ~ Dir(concentration).

    T.-M. H. Hsu, H. Qi, M. Brown, "Measuring the effects of non-identical data distribution for
    federated visual classification", 2019. Peers take the samples of a class one after the other,
    so that no two share one while the class lasts.
    """
    size = plan.partition.train_per_peer or sum(map(len, piles)) // n
    counts = np.array([apportion(q, size) for q in _proportions(plan, n, len(piles))])
    starts = counts.cumsum(axis=0) - counts
    return lambda index: _from_piles(piles, starts[index], counts[index])


def quantity(piles: list[Indices], plan: Plan, n: int) -> Deal:
    """Quantity skew: class-balanced shares of sizes ~ Dir(concentration).

    [choice] Each has one sample of each class at least; together they are as large as equal ones.
    """
    size = plan.partition.train_per_peer or sum(map(len, piles)) // n
    least = min(len(piles), size)
    proportions = generator(plan.seed, Purpose.SKEW).dirichlet(
        np.full(n, plan.partition.concentration)
    )
    sizes = least + apportion(proportions, (size - least) * n)
    starts = sizes.cumsum() - sizes
    return lambda index: _numbered_through(piles, int(starts[index]), int(sizes[index]))


Skew = Callable[[list[Indices], Plan, int], Deal]
"""Shuffled indices of each class, the plan, and how many peers share them -> their deal."""

SKEWS: dict[str, Skew] = {"none": balanced, "dirichlet": dirichlet, "quantity": quantity}
"""How shares differ, by the skew's name in a plan."""


def _proportions(plan: Plan, n: int, size: int) -> npt.NDArray[np.float64]:
    """Return Dirichlet draws [n, size], the same at every peer."""
    rng = generator(plan.seed, Purpose.SKEW)
    return rng.dirichlet(np.full(size, plan.partition.concentration), size=n)


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
    chosen = np.empty(count, dtype=np.int64)
    for c, pile in enumerate(piles):
        own = classes == c
        chosen[own] = _nth(pile, turns[own])
    return chosen


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


def _deal_tests(y: Labels, plan: Plan, n: int) -> Deal:
    """Return the deal of test samples of labels `y` [m] to `n` peers.

    [choice] With label skew, test_per_peer of its own proportions, so that a peer is judged by what
    it has to do with; else the pool, the same for all.
    """
    if plan.partition.skew != "dirichlet":
        pool = pool_indices(y, plan)
        return lambda _index: pool
    piles = _shuffled_by_class(y, generator(plan.seed, Purpose.TEST_SPLIT))
    size = min(plan.partition.test_per_peer, len(y))
    counts = [apportion(q, size) for q in _proportions(plan, n, len(piles))]
    first = np.zeros(len(piles), dtype=np.int64)
    return lambda index: _from_piles(piles, first, counts[index])


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
