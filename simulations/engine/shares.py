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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.learning.partition import (
    TRANSFORMS,
    Cluster,
    PeerData,
    pool_indices,
    to_float,
    train_indices,
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
class Shares:
    """Which samples are whose: rows of the shared tables, and how those tables are made."""

    dataset: Dataset
    plan: Plan
    picked: list[Array]
    """Of every cluster, the training samples of the data set that its part of the table holds."""
    rows: list[Array]
    """Of every peer, its rows of the training table."""
    tested: Array
    """The test samples of every cluster's part of the test table."""

    @classmethod
    def deal(cls, dataset: Dataset, plan: Plan) -> Shares:
        """Deal the data set to all peers. Raises UserError when there are too few samples."""
        given = [train_indices(dataset.train_y, plan, index) for index in range(plan.n)]
        clusters = range(plan.partition.clusters)
        picked: list[Array] = []
        starts: list[int] = []
        for cluster in clusters:
            members = [given[i] for i in range(plan.n) if plan.cluster_of(i) == cluster]
            starts.append(sum(map(len, picked)))
            picked.append(np.unique(np.concatenate(members)) if members else given[0][:0])
        rows = []
        for index, own in enumerate(given):
            cluster = plan.cluster_of(index)
            rows.append(starts[cluster] + np.searchsorted(picked[cluster], own))
        return cls(dataset, plan, picked, rows, pool_indices(dataset.test_y, plan))

    def fields(self, *, channels_last: bool) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the shape and dtype of every array that `fill` writes."""
        shape = self.dataset.shape
        if channels_last:
            shape = (*shape[1:], shape[0])
        train, test = sum(map(len, self.picked)), len(self.picked) * len(self.tested)
        stored = np.dtype(self.dataset.train_x.dtype).str
        return {
            "train_x": ((train, *shape), stored),
            "train_y": ((train,), "<i8"),
            "test_x": ((test, *shape), "<f4"),
            "test_y": ((test,), "<i8"),
            "rows": ((sum(map(len, self.rows)),), "<i8"),
            "counts": ((len(self.rows),), "<i8"),
        }

    def fill(self, arrays: Mapping[str, Array], *, channels_last: bool) -> None:
        """Write every cluster's transformed samples, and the peers' rows.

        Raises UserError when the transform does not fit the data.
        """
        dataset, partition = self.dataset, self.plan.partition
        train = test = 0
        for number, picked in enumerate(self.picked):
            cluster = Cluster(number, partition.clusters, dataset.classes)
            transform = TRANSFORMS[partition.kind]
            x, y = transform(dataset.train_x[picked], dataset.train_y[picked], cluster)
            stop = train + len(y)
            arrays["train_x"][train:stop] = np.moveaxis(x, 1, -1) if channels_last else x
            arrays["train_y"][train:stop] = y
            train = stop
            x, y = transform(dataset.test_x[self.tested], dataset.test_y[self.tested], cluster)
            x = to_float(x, dataset.scale)
            stop = test + len(y)
            arrays["test_x"][test:stop] = np.moveaxis(x, 1, -1) if channels_last else x
            arrays["test_y"][test:stop] = y
            test = stop
        arrays["rows"][:] = np.concatenate(self.rows)
        arrays["counts"][:] = [len(own) for own in self.rows]


def peer_data(
    arrays: Mapping[str, Array], plan: Plan, index: int, *, scale: float, classes: int
) -> PeerData:
    """Return what `peer.learning.partition.deal` gives peer `index`, from tables as stored.

    The test set is not copied: the peers of a cluster share it.
    """
    stop = int(arrays["counts"][: index + 1].sum())
    rows = arrays["rows"][stop - int(arrays["counts"][index]) : stop]
    pool = len(arrays["test_y"]) // plan.partition.clusters
    start = plan.cluster_of(index) * pool
    return PeerData(
        to_float(arrays["train_x"][rows], scale),
        arrays["train_y"][rows],
        arrays["test_x"][start : start + pool],
        arrays["test_y"][start : start + pool],
        classes,
        arrays["train_x"].shape[1:],
    )
