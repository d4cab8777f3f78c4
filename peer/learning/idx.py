"""Reads IDX files, the format of MNIST and its kin, plain or gzipped, as memory maps.

Format: two zero bytes, a type byte (8: unsigned byte), the number of axes, then the length of each
axis as a big-endian 32-bit number, then the values (LeCun, http://yann.lecun.com/exdb/mnist).
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from peer.errors import UserError
from peer.learning.cache import derived_file

_CHUNK = 1 << 20
_DEFLATE_RATIO = 1032
"""No deflate stream grows by more (zlib's technical details); a header that claims more lies."""


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Return the array of an IDX file of unsigned bytes, mapped from the disk.

    A gzipped file is unpacked into the cache once, so that all processes share its pages; into
    memory where there is no cache. Raises UserError when the file is not such an IDX file, or is
    shorter or longer than its header says.
    """
    if path.suffix != ".gz":
        return _map(path)

    def unpack(file: BinaryIO) -> None:
        for chunk in _inflate(path):
            file.write(chunk)

    plain = derived_file([path], "idx", unpack)
    if plain is not None:
        return _map(plain)
    data = b"".join(_inflate(path))
    shape, start = _header(data, path)
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def _header(data: bytes, path: Path) -> tuple[tuple[int, ...], int]:
    """Return the shape that a header claims, and the header's length in bytes."""
    if len(data) < 4 or data[:3] != b"\0\0\x08" or not 1 <= data[3] <= 4:
        raise UserError(f"{path} is not an IDX file of unsigned bytes")
    axes = data[3]
    start = 4 + 4 * axes
    if len(data) < start:
        raise UserError(f"{path} ends inside its header")
    shape = struct.unpack(f">{axes}I", data[4:start])
    if 0 in shape:
        raise UserError(f"{path} holds no samples")
    return shape, start


def _map(path: Path) -> npt.NDArray[np.uint8]:
    try:
        with path.open("rb") as file:
            shape, start = _header(file.read(20), path)
        size, claimed = path.stat().st_size, start + math.prod(shape)
        if size != claimed:
            raise UserError(f"{path} has {size} bytes, but its header says {claimed}")
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r", offset=start, shape=shape))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}") from None


def _inflate(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a gzipped IDX file, never more than its header says."""
    try:
        with gzip.open(path) as file:
            head = file.read(20)
            shape, start = _header(head, path)
            left = start + math.prod(shape) - len(head)
            if left > path.stat().st_size * _DEFLATE_RATIO:
                raise UserError(f"{path} cannot hold the {shape} values that its header says")
            yield head
            while left > 0 and (chunk := file.read(min(left, _CHUNK))):
                left -= len(chunk)
                yield chunk
            if left != 0 or file.read(1):
                raise UserError(f"{path} is shorter or longer than its header says")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot unpack {path}: {error}") from None
