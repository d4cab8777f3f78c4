"""Flat vectors as raw little-endian bytes: what travels in a message's chunks.

Bytes from outside are checked in this order: exact total length, then finite values, then the
Euclidean norm. Nothing larger than the expected vector is ever allocated for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import numpy.typing as npt

from peer.errors import ProtocolError
from peer.network.messages import CHUNK

if TYPE_CHECKING:
    from peer.network.transport import Buffer

Precision = Literal["float32", "float16", "bfloat16"]
Vector = npt.NDArray[np.float32]

WIDTH: Final[dict[str, int]] = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a value on the wire."""

LARGEST_FLOAT16 = np.float16(65504)
LARGEST_BFLOAT16 = np.uint16(0x7F7F)


def encode_vector(vector: Vector, precision: Precision) -> memoryview:
    """Return the bytes of a float32 vector [e], e >= 1, rounded to the nearest even.

    float32 is not copied: the vector must not change while the view is in use. A finite value that
    the narrower format cannot hold becomes its largest of that sign; NaN and infinities stay what
    they are, for the receiver to refuse.
    """
    vector = np.ascontiguousarray(vector, dtype="<f4")
    match precision:
        case "float32":
            encoded: npt.NDArray[np.generic] = vector
        case "float16":
            encoded = _to_float16(vector)
        case "bfloat16":
            encoded = _to_bfloat16(vector)
    return encoded.view(np.uint8).data.toreadonly()


def decode_vector(
    buffers: Sequence[Buffer], size: int, precision: Precision, norm_limit: float
) -> Vector:
    """Return the float32 vector [size] that the chunks hold, one after the other.

    Raises ProtocolError when their total length is not exactly that of `size` values, a chunk
    splits a value, a value is NaN or infinite, or the Euclidean norm exceeds `norm_limit`.
    """
    width = WIDTH[precision]
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    total = sum(len(view) for view in views)
    if total != size * width:
        raise ProtocolError(f"a vector of {total} bytes, not {size * width}")
    if any(len(view) % width for view in views):
        raise ProtocolError("a chunk splits a value")
    vector = np.empty(size, np.float32)
    filled = 0
    for view in views:
        part = vector[filled : filled + len(view) // width]
        _widen(view, precision, out=part)
        filled += len(part)
    _check_values(vector, norm_limit)
    return vector


def split(buffer: Buffer) -> Iterator[memoryview]:
    """Yield views of at most `CHUNK` bytes that make up the buffer, without copying."""
    view = memoryview(buffer).cast("B")
    for start in range(0, len(view), CHUNK):
        yield view[start : start + CHUNK]


def is_finite(vector: Vector) -> bool:
    """Tell whether a vector is worth sending: receivers refuse values that are not finite."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.sum(vector, dtype=np.float64)))


def _to_float16(vector: Vector) -> npt.NDArray[np.float16]:
    with np.errstate(over="ignore"):
        half = vector.astype("<f2")
    overflow = np.isinf(half) & np.isfinite(vector)
    half[overflow] = np.copysign(LARGEST_FLOAT16, vector[overflow])
    return half


def _to_bfloat16(vector: Vector) -> npt.NDArray[np.uint16]:
    """Keep the upper half of each float32, after adding what rounds it to the nearest even."""
    bits = vector.view(np.uint32)
    upper = (bits >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        rounded = ((bits + (0x7FFF + (upper & 1).astype(np.uint32))) >> 16).astype("<u2")
    overflow = np.isfinite(vector) & ((rounded & 0x7FFF) > LARGEST_BFLOAT16)
    rounded[overflow] = (upper[overflow] & 0x8000) | LARGEST_BFLOAT16
    # Rounding carries a NaN of many set bits into the sign; a quiet NaN keeps it one.
    nan = np.isnan(vector)
    rounded[nan] = upper[nan] | 0x0040
    return rounded


def _widen(view: memoryview, precision: Precision, *, out: Vector) -> None:
    match precision:
        case "float32":
            out[:] = np.frombuffer(view, "<f4")
        case "float16":
            out[:] = np.frombuffer(view, "<f2")
        case "bfloat16":
            np.left_shift(np.frombuffer(view, "<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


def _check_values(vector: Vector, norm_limit: float) -> None:
    square = 0.0
    with np.errstate(all="ignore"):
        # By parts, so that a check of float64 accuracy needs no second copy of the vector.
        for start in range(0, len(vector), CHUNK // 8):
            part = vector[start : start + CHUNK // 8].astype(np.float64)
            square += float(np.dot(part, part))
    # One pass for both: a NaN or an infinity anywhere makes the sum neither finite nor small.
    if not np.isfinite(square):
        raise ProtocolError("a vector with values that are not finite")
    if square > norm_limit**2:
        raise ProtocolError(f"a vector of norm {square**0.5:.3g}, above {norm_limit:.3g}")
