"""The theory of purity: the paper's worked values, and chance itself."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest

from peer.errors import UserError
from simulations.theory import all_true, expected_precision, nsmc, pens


def test_the_paper_s_table() -> None:
    quarter = [round(all_true(p), 3) for p in nsmc(100, 25, 10, 5, 5)]
    assert quarter == [0.059, 0.538, 0.881, 0.979, 0.997]
    assert round(all_true(pens(100, 25, 10, 5)), 3) == 0.059
    half = [round(all_true(p), 3) for p in nsmc(100, 50, 10, 5, 2)]
    assert half == [0.617, 0.996]
    assert round(all_true(pens(100, 50, 10, 5)), 3) == 0.617


def test_pens_is_the_tail_of_one_draw() -> None:
    n, a, l, k = 20, 8, 6, 3  # noqa: E741
    ways = sum(comb(a - 1, x) * comb(n - a, l - x) for x in range(k, l + 1))
    assert all_true(pens(n, a, l, k)) == pytest.approx(ways / comb(n - 1, l))


@pytest.mark.parametrize(("n", "a", "l", "k"), [(20, 5, 6, 3), (30, 15, 4, 4), (12, 12, 5, 2)])
def test_the_recursion_is_what_happens(n: int, a: int, l: int, k: int) -> None:  # noqa: E741
    rng = np.random.default_rng(3)
    rounds, trials = 4, 4000
    counts = np.zeros((rounds, k + 1))
    for _ in range(trials):
        neighbours: list[int] = []
        for t in range(rounds):
            # Peer 0 itself is of the cluster 0 .. a - 1; lower numbers are more similar.
            others = [j for j in range(1, n) if j not in neighbours]
            drawn = rng.choice(others, l, replace=False).tolist()
            neighbours = sorted([*drawn, *neighbours])[:k]
            counts[t, sum(j < a for j in neighbours)] += 1
    for expected, seen in zip(nsmc(n, a, l, k, rounds), counts / trials, strict=True):
        assert expected.sum() == pytest.approx(1)
        assert np.abs(expected - seen).max() < 0.04  # five standard deviations


def test_precision_grows_and_a_small_cluster_can_never_fill_the_list() -> None:
    shares = [expected_precision(p) for p in nsmc(100, 25, 10, 5, 6)]
    assert shares == sorted(shares)
    # Ten candidates of 99, of which 24 are true: 2.42 of them on average, five at most count.
    assert shares[0] == pytest.approx(0.48, abs=0.01)
    lonely = nsmc(100, 3, 10, 5, 40)[-1]
    assert all_true(lonely) == 0
    assert expected_precision(lonely) == pytest.approx(2 / 5, abs=1e-2)


def test_numbers_that_make_no_network() -> None:
    for n, a, l, k in ((10, 11, 3, 2), (10, 5, 2, 3), (10, 5, 7, 3)):  # noqa: E741
        with pytest.raises(UserError, match=f"n = {n}"):
            nsmc(n, a, l, k, 2)
