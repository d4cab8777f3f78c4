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
from peer.learning.sources import Dataset
from peer.plan import Plan
from peer.randomness import Purpose, generator

Array = npt.NDArray[Any]
Labels = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PeerData:
    """One peer's data: inputs float32 [m, *shape], scaled; labels int64 [m] in 0 to classes - 1."""

    train_x: npt.NDArray[np.float32]
    train_y: Labels
    test_x: npt.NDArray[np.float32]
    test_y: Labels
    classes: int
    shape: tuple[int, ...]


def deal(dataset: Dataset, plan: Plan, index: int, *, own: bool) -> PeerData:
    """Return the data of peer `index`, transformed as its cluster's.

    `own`: the peer gave the data set itself, so it takes all of it. Only what is dealt is read and
    converted. Raises UserError when the transform does not fit the data, or there are too few
    samples for n peers.
    """
    if own:
        train, test = np.arange(len(dataset.train_y)), np.arange(len(dataset.test_y))
    else:
        train = train_indices(dataset.train_y, plan, index)
        test = pool_indices(dataset.test_y, plan)
    transform = TRANSFORMS[plan.partition.kind]
    cluster = Cluster(plan.cluster_of(index), plan.partition.clusters, dataset.classes)

    def share(x: Array, y: Labels, chosen: Indices) -> tuple[npt.NDArray[np.float32], Labels]:
        x, y = transform(x[chosen], y[chosen], cluster)
        return to_float(x, dataset.scale), y

    train_x, train_y = share(dataset.train_x, dataset.train_y, train)
    test_x, test_y = share(dataset.test_x, dataset.test_y, test)
    return PeerData(train_x, train_y, test_x, test_y, dataset.classes, dataset.shape)


def to_float(x: Array, scale: float) -> npt.NDArray[np.float32]:
    """Return inputs as models take them: stored values times the data set's `scale`."""
    return np.multiply(x, np.float32(scale), dtype=np.float32, order="C")


def train_indices(y: Labels, plan: Plan, index: int) -> Indices:
    """Return which training samples peer `index` gets; labels `y` [m].

    With `train_per_peer`, the federation's samples are numbered through, class after class in turn,
    and each peer takes the next train_per_peer of them: class-balanced to one sample, and no two
    peers share one while the class lasts. [choice] A class that is used up starts again from its
    first sample. Without, every class is dealt like cards, m // n samples a peer, and no sample
    twice: class-balanced as far as the data are.
    """
    piles = _shuffled_by_class(y, generator(plan.seed, Purpose.PARTITION))
    count = plan.partition.train_per_peer
    if count is None:
        if len(y) < plan.n:
            raise UserError(
                f"{len(y)} training samples are too few for {plan.n} peers",
                "set partition.train_per_peer: peers then share samples",
            )
        return np.concatenate(piles)[index :: plan.n][: len(y) // plan.n]
    turns, classes = np.divmod(np.arange(index * count, (index + 1) * count), len(piles))
    return np.array([piles[c][i % len(piles[c])] for i, c in zip(turns, classes, strict=True)])


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
    """Cluster `number` of K = `count`, of a data set with `classes` classes."""

    number: int
    count: int
    classes: int


Transform = Callable[[Array, Labels, Cluster], tuple[Array, Labels]]
"""Stored inputs [m, *shape] and labels [m] -> those that the cluster has instead."""


def keep(x: Array, y: Labels, _cluster: Cluster) -> tuple[Array, Labels]:
    """All peers share one distribution."""
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


TRANSFORMS: dict[str, Transform] = {"none": keep, "rotation": rotate, "label-swap": swap_labels}
"""How clusters differ, by the partition's name in a plan."""
