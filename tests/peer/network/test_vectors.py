"""Vectors on the wire: exact rounding, and what is refused."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import ProtocolError
from peer.network.messages import CHUNK
from peer.network.vectors import WIDTH, Precision, Vector, decode_vector, encode_vector, split

PRECISIONS: list[Precision] = ["float32", "float16", "bfloat16"]


def vector(*values: float) -> Vector:
    return np.array(values, np.float32)


def bits(value: int) -> Vector:
    return np.array([value], np.uint32).view(np.float32)


def there_and_back(values: Vector, precision: Precision) -> Vector:
    return decode_vector([encode_vector(values, precision)], len(values), precision, np.inf)


def test_float32_is_little_endian_and_not_copied() -> None:
    values = vector(1.0, -2.5)
    encoded = encode_vector(values, "float32")
    assert bytes(encoded) == bytes.fromhex("0000803f000020c0")
    assert np.shares_memory(np.frombuffer(encoded, np.float32), values)
    assert encoded.readonly


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_the_format_holds_comes_back(precision: Precision) -> None:
    values = vector(
        0.0, 1.0, -1.5, 2.0**-10, 240.0, -65504.0 if precision == "float16" else 2.0**100
    )
    np.testing.assert_array_equal(there_and_back(values, precision), values)


def test_bfloat16_rounds_to_nearest_even() -> None:
    # One bit of the upper half is 0x10000; 0x8000 is exactly between two.
    for given_bits, expected in [
        (0x3F800000, 0x3F80),
        (0x3F807FFF, 0x3F80),
        (0x3F808000, 0x3F80),
        (0x3F808001, 0x3F81),
        (0x3F818000, 0x3F82),
        (0xBF818000, 0xBF82),
        (0x3FFFFFFF, 0x4000),
    ]:
        encoded = encode_vector(bits(given_bits), "bfloat16")
        assert int.from_bytes(encoded, "little") == expected


@given(st.integers(0, 2**32 - 1))
def test_bfloat16_is_the_nearest(pattern: int) -> None:
    value = bits(pattern)
    encoded = int.from_bytes(encode_vector(value, "bfloat16"), "little")
    back = np.array([encoded << 16], np.uint32).view(np.float32)
    if np.isnan(value[0]):
        assert np.isnan(back[0])
    elif np.isinf(value[0]):
        assert back[0] == value[0]
    else:
        assert np.isfinite(back[0])
        distance = abs(float(back[0]) - float(value[0]))
        for neighbour in (encoded - 1, encoded + 1):
            other = np.array([(neighbour & 0xFFFF) << 16], np.uint32).view(np.float32)
            if np.isfinite(other[0]):
                assert distance <= abs(float(other[0]) - float(value[0]))


def test_finite_values_stay_finite_and_others_do_not_become_it() -> None:
    values = vector(1e6, -1e6, np.inf, -np.inf, np.nan, 3.4e38)
    half = np.frombuffer(encode_vector(values, "float16"), np.float16)
    np.testing.assert_array_equal(half, np.array([65504, -65504, np.inf, -np.inf, np.nan, 65504]))
    brain = np.frombuffer(encode_vector(bits(0xFF7FFFFF), "bfloat16"), np.uint16)
    assert brain[0] == 0xFF7F
    brain = np.frombuffer(encode_vector(bits(0x7FFFFFFF), "bfloat16"), np.uint16)
    assert brain[0] == 0x7FFF


@pytest.mark.parametrize("precision", PRECISIONS)
def test_length_must_be_exact(precision: Precision) -> None:
    width = WIDTH[precision]
    for length in (0, 1, 3 * width - 1, 3 * width + 1, 4 * width):
        with pytest.raises(ProtocolError, match=f"of {length} bytes, not {3 * width}"):
            decode_vector([bytes(length)], 3, precision, 1.0)
    with pytest.raises(ProtocolError, match="splits a value"):
        decode_vector([bytes(1), bytes(3 * width - 1)], 3, precision, 1.0)
    zeros = decode_vector([bytes(width), b"", bytes(2 * width)], 3, precision, 1.0)
    np.testing.assert_array_equal(zeros, vector(0, 0, 0))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_must_be_finite(precision: Precision, bad: float) -> None:
    with pytest.raises(ProtocolError, match="not finite"):
        there_and_back(vector(1.0, bad), precision)


def test_norm_is_bounded() -> None:
    encoded = encode_vector(vector(3.0, 4.0), "float32")
    np.testing.assert_array_equal(decode_vector([encoded], 2, "float32", 5.0), vector(3, 4))
    with pytest.raises(ProtocolError, match="norm 5, above 4"):
        decode_vector([encoded], 2, "float32", 4.99)
    with pytest.raises(ProtocolError, match="norm"):
        decode_vector([encode_vector(vector(3e38, 3e38), "float32")], 2, "float32", 1e38)


def test_what_is_asked_for_bounds_the_memory() -> None:
    claimed = [bytes(CHUNK)] * 64
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        decode_vector(claimed, 10, "float32", 1.0)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    encoded = list(split(encode_vector(np.ones(4 * CHUNK, np.float32), "bfloat16")))
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    decode_vector(encoded, 4 * CHUNK, "bfloat16", 1e6)
    assert tracemalloc.get_traced_memory()[1] - before < 16 * CHUNK + 4 * CHUNK
    tracemalloc.stop()


def test_split_covers_the_buffer_without_copying() -> None:
    buffer = np.arange(2 * CHUNK + 5, dtype=np.uint8)
    parts = list(split(buffer.data))
    assert [len(part) for part in parts] == [CHUNK, CHUNK, 5]
    assert b"".join(parts) == buffer.tobytes()
    assert all(np.shares_memory(np.frombuffer(part, np.uint8), buffer) for part in parts)
