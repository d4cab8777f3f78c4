"""Tensors on the disk, one a file, named by the checksum of what it holds and never rewritten.

Whoever writes an index that names them after they are written, and lets go of others after that,
has at any moment, after a crash too, an index whose tensors are all there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import load, save

from peer.errors import StateError
from peer.files import remove_unfinished, write_atomically
from peer.learning.learner import Vector

_HEADER = 4096
"""Bytes that a file of one tensor may have beside its values."""

TensorDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TensorFiles:
    """The tensors in a directory, which must be there when the first is written."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, values: npt.NDArray[np.float32]) -> str:
        """Write an array and return its digest. Raises OSError."""
        content = save({"values": np.ascontiguousarray(values)})
        digest = hashlib.sha256(content).hexdigest()
        path = self._file(digest)
        if not path.exists():
            write_atomically(path, content)
        return digest

    def read(self, digest: str, shape: tuple[int, ...]) -> Vector:
        """Return the array of a digest. Raises StateError unless it is whole, finite float32 of
        the shape."""
        path, expected = self._file(digest), 4 * int(np.prod(shape, dtype=np.int64))
        try:
            if path.stat().st_size > expected + _HEADER:
                raise StateError(f"{path} is larger than its {expected} bytes of values")
            content = path.read_bytes()
            values: Vector = load(content)["values"]
        except (OSError, SafetensorError, KeyError, ValueError):
            raise StateError(f"{path} is missing or damaged") from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise StateError(f"{path} is damaged: its checksum differs")
        if values.dtype != np.float32 or values.shape != shape or not np.isfinite(values).all():
            raise StateError(f"{path} does not hold {shape} finite float32 values")
        return values

    def keep(self, digests: Collection[str]) -> None:
        """Remove all other tensors, and what was not finished writing. Raises OSError."""
        for path in self._directory.glob("*.safetensors"):
            if path.stem not in digests:
                path.unlink(missing_ok=True)
        remove_unfinished(self._directory)

    def _file(self, digest: str) -> Path:
        return self._directory / f"{digest}.safetensors"
