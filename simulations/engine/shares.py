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

    `picked`: of every cluster, the samples of the data set that its part of the table holds.
    `rows`: of every peer, its rows of the table.
    """

    picked: list[Array]
    rows: list[Array]

    @classmethod
    def gather(cls, given: Sequence[Array], clusters: Sequence[int], count: int) -> Split:
        """Put together what the peers, each of its cluster, are given of a data set."""
        picked: list[Array] = []
        starts: list[int] = []
        for cluster in range(count):
            members = [own for own, c in zip(given, clusters, strict=True) if c == cluster]
            starts.append(sum(map(len, picked)))
            picked.append(np.unique(np.concatenate(members)) if members else given[0][:0])
        rows = [
            starts[cluster] + np.searchsorted(picked[cluster], own)
            for own, cluster in zip(given, clusters, strict=True)
        ]
        return cls(picked, rows)


@dataclass(frozen=True)
class Shares:
    """Which samples are whose, and how the shared tables are made of a data set."""

    dataset: Dataset
    plan: Plan
    train: Split
    test: Split

    @classmethod
    def deal(cls, dataset: Dataset, plan: Plan) -> Shares:
        """Deal the data set to all peers. Raises UserError when it does not fit the partition."""
        clusters = [plan.cluster_of(index) for index in range(plan.n)]
        dealer = Dealer(dataset, plan)
        train, test = zip(*map(dealer.share, range(plan.n)), strict=True)
        count = plan.partition.clusters
        return cls(
            dataset, plan, Split.gather(train, clusters, count), Split.gather(test, clusters, count)
        )

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
        transform = TRANSFORMS[self.plan.partition.kind]
        for name, split, stored_x, stored_y in self._parts():
            start = 0
            for number, picked in enumerate(split.picked):
                cluster = Cluster.of(self.plan, number, self.dataset.classes)
                x, y = transform(stored_x[picked], stored_y[picked], cluster)
                stop = start + len(y)
                arrays[f"{name}_x"][start:stop] = np.moveaxis(x, 1, -1) if channels_last else x
                arrays[f"{name}_y"][start:stop] = y
                start = stop
            arrays[f"{name}_rows"][:] = np.concatenate(split.rows)
            arrays[f"{name}_counts"][:] = [len(own) for own in split.rows]

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
