"""What the processes of an engine share: the federation's data and its models, each once.

Samples are kept as stored (bytes, for images), once for every cluster that transforms them, and
only those that some peer of the cluster trains on; a peer's own data is a list of row numbers.
The memory is one anonymous mapping that child processes inherit by file descriptor. It has no name,
so the system frees it with the last process that uses it, however that ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.learning.partition import (
    TRANSFORMS,
    Cluster,
    Dealer,
    PeerData,
    Poison,
    thinned,
    to_inputs,
)
from peer.learning.sources import Dataset
from peer.plan import Plan

Array = npt.NDArray[Any]
_ALIGNMENT = 64


@dataclass(frozen=True)
class Field:
    """An array's place in the arena."""

    start: int
    shape: tuple[int, ...]
    dtype: str


class Arena:
    """Named arrays in one mapping, zeros at first. `descriptor` is what children inherit."""

    def __init__(self, layout: Mapping[str, Field], descriptor: int | None = None) -> None:
        """Make a new arena, or map the one that was inherited as `descriptor`."""
        size = max(field.start + _bytes(field.shape, field.dtype) for field in layout.values())
        self.layout = dict(layout)
        self.descriptor = _anonymous(size) if descriptor is None else descriptor
        memory = mmap.mmap(self.descriptor, size)
        self.arrays: dict[str, Array] = {
            name: np.ndarray(field.shape, field.dtype, memory, field.start)
            for name, field in layout.items()
        }

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]


def lay_out(arrays: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, Field]:
    """Return the places, one after another, of arrays given by (shape, dtype)."""
    layout, start = {}, 0
    for name, (shape, dtype) in arrays.items():
        layout[name] = Field(start, shape, dtype)
        start += -(-_bytes(shape, dtype) // _ALIGNMENT) * _ALIGNMENT
    return layout


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize


def _anonymous(size: int) -> int:
    """Return a descriptor of `size` bytes of memory without a name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("panmesh")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


@dataclass(frozen=True)
class Split:
    """The training or the test samples of all peers.

    `picked`: of every cluster, the samples of the data set that its part of the table holds; behind
    the clusters come the poisoners, each a cluster of its own, its samples in the order in which
    they were dealt. `rows`: of every peer, its rows of the table.
    """

    picked: list[Array]
    rows: list[Array]

    @classmethod
    def gather(cls, given: Sequence[Array], clusters: Sequence[int], count: int) -> Split:
        """Put together what the peers, each of its cluster, are given of a data set."""
        picked: list[Array] = []
        rows = [own[:0] for own in given]
        start = 0
        for cluster in range(count):
            members = [i for i, c in enumerate(clusters) if c == cluster]
            samples = given[members[0]] if len(members) == 1 else _united(given, members)
            for i in members:
                places = np.arange(len(samples))
                if len(members) > 1:
                    places = np.searchsorted(samples, given[i])
                rows[i] = start + places
            picked.append(samples)
            start += len(samples)
        return cls(picked, rows)


def _united(given: Sequence[Array], members: Sequence[int]) -> Array:
    """Return what any of the members was given, sorted."""
    return np.unique(np.concatenate([given[0][:0], *(given[i] for i in members)]))


@dataclass(frozen=True)
class Holding:
    """What a peer holds: of the samples that are dealt to it the given `part` (in (0, 1]), as its
    cluster, or another one, transforms them. `poison` is what else is done to its training samples,
    which then nobody shares."""

    index: int
    cluster: int
    part: float = 1.0
    poison: Poison | None = None


@dataclass(frozen=True)
class Shares:
    """Which samples are whose, and how the shared tables are made of a data set."""

    dataset: Dataset
    plan: Plan
    train: Split
    test: Split
    poisoned: tuple[Holding, ...]

    @classmethod
    def deal(
        cls, dataset: Dataset, plan: Plan, holdings: Sequence[Holding] | None = None
    ) -> Shares:
        """Deal the data set to all peers: holding i is that of peer i, those after the n-th what
        some peer may come to hold later. Raises UserError when it does not fit the partition."""
        if holdings is None:
            holdings = [Holding(i, plan.cluster_of(i)) for i in range(plan.n)]
        dealer = Dealer(dataset, plan)
        dealt = [dealer.share(i) for i in range(plan.n)]
        count = plan.partition.clusters
        poisoned = tuple(own for own in holdings if own.poison is not None)
        groups = [
            own.cluster if own.poison is None else count + poisoned.index(own) for own in holdings
        ]
        given = [thinned(dealt[own.index][0], own.part) for own in holdings]
        train = Split.gather(given, groups, count + len(poisoned))
        test = Split.gather(
            [dealt[own.index][1] for own in holdings], [own.cluster for own in holdings], count
        )
        return cls(dataset, plan, train, test, poisoned)

    def fields(self, *, channels_last: bool) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the shape and dtype of every array that `fill` writes."""
        shape = self.dataset.shape
        if channels_last:
            shape = (*shape[1:], shape[0])
        fields = {}
        for name, split, x, _ in self._parts():
            size = sum(map(len, split.picked))
            fields[f"{name}_x"] = ((size, *shape), x.dtype.str)
            fields[f"{name}_y"] = ((size,), "<i8")
            fields[f"{name}_rows"] = ((sum(map(len, split.rows)),), "<i8")
            fields[f"{name}_counts"] = ((len(split.rows),), "<i8")
        return fields

    def fill(self, arrays: Mapping[str, Array], *, channels_last: bool) -> None:
        """Write every cluster's transformed samples, and the peers' rows.

        Raises UserError when the transform does not fit the data.
        """
        for name, split, stored_x, stored_y in self._parts():
            start = 0
            for number, picked in enumerate(split.picked):
                x, y = self._made(stored_x[picked], stored_y[picked], number)
                stop = start + len(y)
                arrays[f"{name}_x"][start:stop] = np.moveaxis(x, 1, -1) if channels_last else x
                arrays[f"{name}_y"][start:stop] = y
                start = stop
            arrays[f"{name}_rows"][:] = np.concatenate(split.rows)
            arrays[f"{name}_counts"][:] = [len(own) for own in split.rows]

    def _made(self, x: Array, y: Array, number: int) -> tuple[Array, Array]:
        """Return stored samples as cluster `number` has them, or the poisoner behind the K-th."""
        poisoner = number - self.plan.partition.clusters
        own = self.poisoned[poisoner] if poisoner >= 0 else None
        cluster = number if own is None else own.cluster
        x, y = TRANSFORMS[self.plan.partition.kind](
            x, y, Cluster.of(self.plan, cluster, self.dataset.classes)
        )
        if own is None or own.poison is None:
            return x, y
        return own.poison(x, y, self.dataset.classes)

    def _parts(self) -> list[tuple[str, Split, Array, Array]]:
        data = self.dataset
        return [
            ("train", self.train, data.train_x, data.train_y),
            ("test", self.test, data.test_x, data.test_y),
        ]


def rows_of(arrays: Mapping[str, Array], name: str) -> list[Array]:
    """Return every peer's rows of the table `train` or `test`."""
    return np.split(arrays[f"{name}_rows"], np.cumsum(arrays[f"{name}_counts"])[:-1])


def peer_data(arrays: Mapping[str, Array], index: int, *, scale: float, classes: int) -> PeerData:
    """Return what `peer.learning.partition.deal` gives peer `index`, from tables as stored."""
    train, test = (rows_of(arrays, name)[index] for name in ("train", "test"))
    return PeerData(
        to_inputs(arrays["train_x"][train], scale),
        arrays["train_y"][train],
        to_inputs(arrays["test_x"][test], scale),
        arrays["test_y"][test],
        classes,
        arrays["train_x"].shape[1:],
    )
