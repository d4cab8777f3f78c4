"""Who stands where: what is made of it, and its way over the wire."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import ProtocolError
from peer.standing import Standing

STANDING = Standing({0: 2, 1: 1, 3: 2, 4: 2}, {0: 1, 3: 1, 4: 2})


def test_bags_and_neighbours() -> None:
    assert STANDING.bag(0) == {3, 4}
    assert STANDING.bag(1) == frozenset()
    assert STANDING.neighbours(0, "ifca") == [3]  # trained the same model, whatever came of it
    assert STANDING.neighbours(0, "cfl") == [3, 4]
    assert STANDING.neighbours(1, "cfl") == STANDING.neighbours(1, "ifca") == []


def test_the_bytes_are_two_rows_of_int32() -> None:
    content = STANDING.encode(6)
    assert np.frombuffer(content, "<i4").tolist() == [2, 1, -1, 2, 2, -1, 1, -1, -1, 1, 2, -1]
    assert Standing.decode([content[:5], content[5:]], 6) == STANDING


@given(st.binary(max_size=64))
def test_any_bytes(content: bytes) -> None:
    try:
        standing = Standing.decode([content], 4)
    except ProtocolError:
        assert len(content) != 32 or {*np.frombuffer(content, "<i4")} - {*range(-1, 200_000)}
    else:
        assert standing.encode(4) == content


@pytest.mark.parametrize("row", [[-2, 0], [0, 200_000]])
def test_numbers_out_of_range(row: list[int]) -> None:
    with pytest.raises(ProtocolError, match="out of range"):
        Standing.decode([np.array(row, "<i4").tobytes()], 1)
