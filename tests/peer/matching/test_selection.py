from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.matching.base import MatcherSettings
from peer.matching.selection import check_round, draw, most_similar, read_count, read_peers

SETTINGS = MatcherSettings(index=2, n=6, seed=0, l=2, k=2, t1=3, tau=2)


@given(st.sets(st.integers(0, 50)), st.integers(1, 60), st.integers(0, 99))
def test_a_draw_is_sorted_distinct_and_of_the_pool(pool: set[int], size: int, seed: int) -> None:
    drawn = draw(pool, size, np.random.default_rng(seed))
    assert drawn == sorted(set(drawn))
    assert pool.issuperset(drawn)
    assert len(drawn) == min(size, len(pool))
    assert drawn == draw(sorted(pool, reverse=True), size, np.random.default_rng(seed))


def test_a_draw_is_uniform() -> None:
    rng = np.random.default_rng(0)
    counts = Counter(j for _ in range(3000) for j in draw(range(10), 3, rng))
    # 3,000 draws of 3 in 10: 900 each, standard deviation 25.
    assert all(abs(counts[j] - 900) < 100 for j in range(10))


def test_ties_go_to_the_lower_index() -> None:
    assert most_similar({5: 1.0, 3: 1.0, 4: 1.0, 0: 0.5}, 2) == [3, 4]
    assert most_similar({5: 1.0, 3: 2.0, 0: 0.5}, 2) == [3, 5]
    assert most_similar({1: 0.1}, 2) == [1]


@pytest.mark.parametrize(
    ("t", "known", "heard"),
    [(0, [0], ()), (1, [0, 2], ()), (1, [6], ()), (1, [-1], ()), (1, [0, 1], (1, 3))],
)
def test_rounds_that_cannot_be(t: int, known: list[int], heard: tuple[int, ...]) -> None:
    check_round(SETTINGS, 1, [0, 1, 5], (5,))
    with pytest.raises(ValueError):
        check_round(SETTINGS, t, known, heard)


@pytest.mark.parametrize(
    "value", [None, 3, "01", {"a": 1}, [0, 0], [2], [6], [-1], [1.0], [True], ["1"], [[1]]]
)
def test_only_distinct_other_peers_are_read(value: Any) -> None:
    assert read_peers([5, 0], SETTINGS) == [5, 0]
    with pytest.raises(ValueError):
        read_peers(value, SETTINGS)


@pytest.mark.parametrize("value", [-1, 1.0, True, None, "1"])
def test_only_counts_are_read(value: Any) -> None:
    assert read_count(0) == 0
    with pytest.raises(ValueError):
        read_count(value)
