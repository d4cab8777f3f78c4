"""Reads CIFAR-10, as binary batches or as Python batches; both become the binary format's records.

A record is a label byte and 3 x 32 x 32 image bytes, channels first
(https://www.cs.toronto.edu/~kriz/cifar.html).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from peer.errors import UserError
from peer.learning.cache import derived_file
from peer.learning.plain_pickle import RefusedPickleError, read_plain_pickle

Bytes = npt.NDArray[np.uint8]

LABELS = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
SHAPE = (3, 32, 32)
_RECORD = 1 + 3 * 32 * 32
_LARGEST_PICKLE = 64 << 20
"""Twice the size of a true batch: a larger file is no CIFAR-10 batch and is not read."""


def find_batches(folder: Path) -> tuple[list[Path], Path] | None:
    """Return (training batches, test batch) in `folder` or the usual folder inside it, or None."""
    for suffix, inner in ((".bin", "cifar-10-batches-bin"), ("", "cifar-10-batches-py")):
        for place in (folder, folder / inner):
            test = place / f"test_batch{suffix}"
            train = sorted(place.glob(f"data_batch_[0-9]{suffix}"))
            if train and test.is_file():
                return train, test
    return None


def read_batches(paths: Sequence[Path]) -> tuple[Bytes, Bytes]:
    """Return images [m, 3, 32, 32] and labels [m] of batches, mapped from the disk where possible.

    Raises UserError when a file is no CIFAR-10 batch.
    """
    records = _mapped_records(paths)
    return records[:, 1:].reshape(-1, *SHAPE), records[:, 0]


def _mapped_records(paths: Sequence[Path]) -> Bytes:
    def join(file: BinaryIO) -> None:
        for path in paths:
            file.write(_records(path).data)

    whole: Path | None = paths[0]
    if len(paths) > 1 or paths[0].suffix != ".bin":
        whole = derived_file(paths, "cifar", join)
    if whole is None:
        return np.concatenate([_records(path) for path in paths])
    return _records(whole)


def _records(path: Path) -> Bytes:
    """Return the records [m, 3073] of one file."""
    try:
        size = path.stat().st_size
        if path.suffix:
            if size == 0 or size % _RECORD:
                raise UserError(f"{path} is not a whole number of CIFAR-10 records")
            return np.asarray(np.memmap(path, dtype=np.uint8, mode="r")).reshape(-1, _RECORD)
        if size > _LARGEST_PICKLE:
            raise UserError(f"{path} is too large for a CIFAR-10 batch")
        return _unpickled_records(read_plain_pickle(path.read_bytes()))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}") from None
    except RefusedPickleError as error:
        raise UserError(f"{path} is not a CIFAR-10 batch: it holds {error}") from None


def _unpickled_records(batch: dict[str, object]) -> Bytes:
    images, labels = batch.get("data"), batch.get("labels")
    if not isinstance(images, np.ndarray) or not isinstance(labels, list):
        raise RefusedPickleError("no data and labels")
    if images.shape != (len(labels), _RECORD - 1):
        raise RefusedPickleError(f"images of shape {images.shape} and {len(labels)} labels")
    if not all(isinstance(label, int) and 0 <= label < len(LABELS) for label in labels):
        raise RefusedPickleError("a label that is not a number from 0 to 9")
    return np.column_stack([np.array(labels, dtype=np.uint8), images])
