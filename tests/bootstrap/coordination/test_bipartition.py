"""The cut is optimal, and what is said of it is exact."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bootstrap.coordination.bipartition import (
    Cut,
    bipartition,
    contrast,
    cosines,
    estimate_gammas,
    gram,
    separation_gap,
    strays,
)

Matrix = np.ndarray


def random_alpha(rng: np.random.Generator, m: int, levels: int | None = None) -> Matrix:
    """A symmetric matrix of cosines; of few different values, if `levels` are given."""
    values = rng.uniform(-1, 1, size=(m, m))
    if levels:
        values = rng.integers(0, levels, size=(m, m)) / levels
    alpha: Matrix = np.triu(values, 1) + np.triu(values, 1).T
    np.fill_diagonal(alpha, 1)
    return alpha


def cross_max(alpha: Matrix, half: Matrix) -> float:
    return float(alpha[np.ix_(half, ~half)].max())


def brute_force(alpha: Matrix) -> float:
    m = len(alpha)
    halves = (np.arange(1, 2 ** (m - 1))[:, None] >> np.arange(m) & 1).astype(bool)
    return min(cross_max(alpha, half) for half in halves)


def papers_merging(alpha: Matrix) -> set[frozenset[int]]:
    """The paper's algorithm 1, line by line."""
    m = len(alpha)
    clusters = {frozenset([i]) for i in range(m)}
    for s in np.argsort(-alpha.ravel(), kind="stable").tolist():
        touched = {c for c in clusters if s // m in c or s % m in c}
        clusters = (clusters - touched) | {frozenset().union(*touched)}
        if len(clusters) == 2:
            break
    return clusters


def test_the_cut_is_as_good_as_the_best_of_all_cuts() -> None:
    rng = np.random.default_rng(0)
    for trial in range(1000):
        m = 2 + trial % 9
        alpha = random_alpha(rng, m, levels=(None, 2, 3, 8)[trial % 4])
        cut = bipartition(alpha)
        half = np.isin(np.arange(m), cut.first)
        assert cut.cross_max == cross_max(alpha, half) == brute_force(alpha)
        assert sorted(cut.first + cut.second) == list(range(m))
        assert cut.first[0] == 0
        assert cut.second


@pytest.mark.parametrize("seed", range(5))
def test_the_cut_is_that_of_the_papers_merging(seed: int) -> None:
    alpha = random_alpha(np.random.default_rng(seed), 100)
    cut = bipartition(alpha)
    assert {frozenset(cut.first), frozenset(cut.second)} == papers_merging(alpha)


def test_the_papers_merging_with_ties_is_as_good() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        alpha = random_alpha(rng, 30, levels=4)
        half = np.isin(np.arange(30), list(papers_merging(alpha).pop()))
        assert bipartition(alpha).cross_max == cross_max(alpha, half)


def test_all_equal_cosines_are_still_cut_in_two() -> None:
    cut = bipartition(np.ones((6, 6)))
    assert (cut.smaller, cut.cross_max) == (1, 1)


def test_one_client_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="one client"):
        bipartition(np.ones((1, 1)))


def test_complete_linkage_would_be_wrong() -> None:
    """A chain of likes belongs together, however unlike its ends are."""
    angles = np.array([0, 30, 60, 90, 180])
    alpha = np.cos(np.radians(angles[:, None] - angles[None, :]))
    cut = bipartition(alpha)
    assert cut.cross_max == pytest.approx(0, abs=1e-12)
    assert cut == Cut((0, 1, 2, 3), (4,), cut.cross_max)


@given(st.integers(2, 12), st.integers(0, 2**32 - 1))
def test_the_cut_does_not_depend_on_the_order(m: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    alpha, order = random_alpha(rng, m), rng.permutation(m)
    cut, shuffled = bipartition(alpha), bipartition(alpha[np.ix_(order, order)])
    halves = {frozenset(cut.first), frozenset(cut.second)}
    assert halves == {frozenset(order[list(h)].tolist()) for h in (shuffled.first, shuffled.second)}


def test_inner_products_and_cosines() -> None:
    rng = np.random.default_rng(2)
    updates = list(rng.normal(size=(5, 40_000)).astype(np.float32))
    updates.append(np.zeros(40_000, dtype=np.float32))
    products = gram(updates)
    exact = np.array(updates, dtype=np.float64)
    np.testing.assert_allclose(products, exact @ exact.T, rtol=1e-12, atol=1e-9)
    alpha = cosines(products)
    norm = np.linalg.norm
    assert alpha[0, 1] == pytest.approx(exact[0] @ exact[1] / norm(exact[0]) / norm(exact[1]))
    assert (np.diag(alpha) == 1).all()
    assert (alpha[5, :5] == 0).all()
    with pytest.raises(ValueError, match="no updates"):
        gram([])


def test_contrast_is_means_and_t_tests() -> None:
    alpha = random_alpha(np.random.default_rng(3), 7)
    cut = Cut((0, 2, 4), (1, 3, 5, 6), 0.0)
    found = contrast(alpha, cut)
    inside = [np.array([alpha[i, j] for i in half for j in half if i < j]) for half in cut[:2]]
    across = np.array([alpha[i, j] for i in cut.first for j in cut.second])
    means = (inside[0].mean(), inside[1].mean())
    assert found.within == pytest.approx(means)
    assert found.across == pytest.approx(across.mean())
    tests = [stats.ttest_ind(half, across, alternative="greater").pvalue for half in inside]
    assert found.p == pytest.approx(tuple(tests))


def test_contrast_where_there_is_no_spread() -> None:
    same = np.array([0, 0, 1, 1])
    alpha = np.where(same[:, None] == same[None, :], 1.0, -1.0)
    assert contrast(alpha, bipartition(alpha)) == ((1, 1), -1, (0, 0))
    peeled = contrast(alpha, Cut((0,), (1, 2, 3), 1.0))
    assert math.isnan(peeled.within[0])
    assert peeled.p[0] == 1
    assert contrast(np.ones((4, 4)), Cut((0, 1), (2, 3), 1.0)).p == (1, 1)


def test_noisy_clients_are_no_cluster() -> None:
    """Two clients of much noise are unlike the others, but no more like each other."""
    signal = np.array([0.3, 0.3] + [0.9] * 18)
    alpha = np.outer(signal, signal)
    np.fill_diagonal(alpha, 1)
    found = contrast(alpha, Cut((0, 1), tuple(range(2, 20)), 0.27))
    assert found.within[0] < found.across < found.within[1]
    assert found.p[0] > 0.5


def test_separation_gap() -> None:
    alpha = np.array([[1, 0.8, -0.2, 0.1], [0.8, 1, 0, 0], [-0.2, 0, 1, 0.6], [0.1, 0, 0.6, 1.0]])
    cut = bipartition(alpha)
    assert cut.cross_max == pytest.approx(0.1)
    assert separation_gap(alpha, cut, [0, 0, 1, 1]) == pytest.approx(0.5)
    assert separation_gap(alpha, cut, [0, 1, 2, 3]) is None


def test_gammas_are_exact_where_errors_are_orthogonal() -> None:
    gammas = np.array([0.1, 0.5, 0.9, 1.5, 0.3])
    noise = np.diag(gammas)
    alpha = cosines(np.ones((5, 5)) + noise**2)
    np.testing.assert_allclose(estimate_gammas(alpha), gammas, rtol=1e-9)


@pytest.mark.parametrize("gamma", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("clusters", [1, 2, 4])
def test_gammas_of_simulated_clients(gamma: float, clusters: int) -> None:
    """Within a tenth, whatever the number of clusters, and of use to the gate of the paper."""
    rng = np.random.default_rng(clusters)
    true = rng.normal(size=(clusters, 20_000))
    true -= true.mean(axis=0) if clusters > 1 else 0
    noise = rng.normal(size=(24, 20_000))
    signal = true[np.arange(24) % clusters]
    scale = gamma * np.linalg.norm(signal, axis=1) / np.linalg.norm(noise, axis=1)
    found = estimate_gammas(cosines(gram(list(signal + scale[:, None] * noise))))
    np.testing.assert_allclose(found, gamma, rtol=0.1)


def test_gammas_of_clients_that_agree_on_nothing_are_infinite() -> None:
    assert np.isinf(estimate_gammas(np.ones((2, 2)))).all()
    assert np.isinf(estimate_gammas(np.eye(4))).all()
    rng = np.random.default_rng(5)
    pure_noise = estimate_gammas(cosines(gram(list(rng.normal(size=(20, 2000))))))
    assert pure_noise.max() > 1


def test_noise_is_what_resembles_nobody() -> None:
    alpha = np.full((5, 5), 0.0)
    alpha[:3, :3] = 0.061
    alpha[3, 4] = alpha[4, 3] = 0.059
    np.fill_diagonal(alpha, 1)
    assert strays(alpha, 10_000) == [3, 4]  # six standard deviations are 0.06
    assert strays(alpha, 9_000) == []  # then nobody resembles anybody
    assert strays(alpha, 40_000) == []
    assert strays(alpha, 2) == []
    opposed = np.full((4, 4), 0.9)
    opposed[3] = opposed[:, 3] = -0.9
    np.fill_diagonal(opposed, 1)
    assert strays(opposed, 10_000) == [3]  # as unlike everybody as one can be
    assert strays(alpha[1:4, 1:4], 10_000) == [2]
    assert strays(alpha[2:4, 2:4], 10_000) == []  # of two, none is the odd one
