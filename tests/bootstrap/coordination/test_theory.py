"""The bounds of the separation theorem hold on simulated gradients, and are met where they can."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from bootstrap.coordination.bipartition import bipartition, cosines, gram
from bootstrap.coordination.theory import (
    alignment,
    answer,
    can_separate,
    cross_bound,
    gate,
    intra_bound,
    largest_gamma,
)

Vectors = np.ndarray


def cancelling(rng: np.random.Generator, clusters: int, dimension: int) -> Vectors:
    """K true gradients [K, d] of any sizes whose weighted sum is zero."""
    free = rng.normal(size=(clusters - 1, dimension)) * rng.exponential(size=(clusters - 1, 1))
    weights = rng.exponential(size=(clusters - 1, 1)) + 0.05
    return np.concatenate([free, -(weights * free).sum(axis=0, keepdims=True)])


def observed(rng: np.random.Generator, true: Vectors, gammas: Vectors) -> Vectors:
    """Empirical gradients [m, K, d]: the true ones with errors of relative size gammas [m, K]."""
    noise = rng.normal(size=(*gammas.shape, true.shape[1]))
    noise /= np.linalg.norm(noise, axis=2, keepdims=True)
    found: Vectors = true + noise * (gammas * np.linalg.norm(true, axis=1))[..., None]
    return found


@pytest.mark.parametrize("clusters", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("dimension", [2, 3, 20])
def test_bounds_hold_on_simulated_gradients(clusters: int, dimension: int) -> None:
    rng = np.random.default_rng(clusters * 100 + dimension)
    for _ in range(200):
        gamma = rng.uniform(0, 1) * (largest_gamma(clusters) if rng.random() < 0.7 else 0.99)
        gammas = rng.uniform(0, gamma, size=(2, clusters))
        true = cancelling(rng, clusters, dimension)
        alpha = cosines(gram(list(observed(rng, true, gammas).reshape(2 * clusters, -1))))
        cross = bipartition(alpha).cross_max
        intra = min(float(alpha[k, k + clusters]) for k in range(clusters))
        assert cross <= cross_bound(clusters, gamma) + 1e-9
        assert intra >= intra_bound(gamma) - 1e-9
        if can_separate(clusters, gamma):
            assert intra > cross


@pytest.mark.parametrize("gamma", [0.0, 0.1, 0.5, 0.7])
def test_two_clusters_meet_both_bounds(gamma: float) -> None:
    """Errors at right angles to what is observed turn clients the most: these are the bounds."""
    angle = math.asin(gamma)
    turned = [angle, -angle, math.pi - angle, math.pi + angle]
    alpha = cosines(gram([np.array([math.cos(a), math.sin(a)]) for a in turned]))
    assert alpha[0, 1] == pytest.approx(intra_bound(gamma))
    assert alpha[:2, 2:].max() == pytest.approx(cross_bound(2, gamma))


def test_three_clusters_meet_the_cross_bound() -> None:
    """Two gradients nearly opposite, and the third at right angles to both."""
    eps = 1e-5
    alpha = cosines(gram(list(np.array([[1, eps], [-1, eps], [0, -2 * eps]]))))
    assert bipartition(alpha).cross_max == pytest.approx(cross_bound(3, 0), abs=1e-4)


def test_exact_values() -> None:
    assert (intra_bound(0), cross_bound(2, 0)) == (1, -1)
    assert cross_bound(3, 0) == pytest.approx(0)
    assert cross_bound(4, 0) == pytest.approx(0.5)
    assert cross_bound(5, 0) == pytest.approx(math.sqrt(0.5))
    assert intra_bound(0.5) == pytest.approx(0.5)
    assert cross_bound(2, 0.5) == pytest.approx(-0.5)
    assert cross_bound(6, 0.9) == 1
    assert alignment(0.6, 0.8) == pytest.approx(0)
    assert largest_gamma(2) == pytest.approx(math.sqrt(0.5))


@pytest.mark.parametrize("clusters", range(2, 10))
def test_separation_ends_where_the_bounds_meet(clusters: int) -> None:
    limit = largest_gamma(clusters)
    assert intra_bound(limit) == pytest.approx(cross_bound(clusters, limit))
    assert can_separate(clusters, limit * 0.999)
    assert not can_separate(clusters, limit * 1.001)


def test_bounds_are_monotone() -> None:
    grid = np.linspace(0, 0.99, 50).tolist()
    for clusters in range(2, 7):
        values = [cross_bound(clusters, gamma) for gamma in grid]
        assert all(a <= b + 1e-12 for a, b in itertools.pairwise(values))
        assert all(cross_bound(clusters, g) <= cross_bound(clusters + 1, g) for g in grid)


def test_a_gate_that_opens_keeps_its_promise() -> None:
    for gamma, cross in itertools.product(np.linspace(0, 0.99, 34), np.linspace(-1, 1, 41)):
        if abs(1 - 2 * gamma**2 - cross) > 1e-9:
            assert gate(float(cross), float(gamma)) == (intra_bound(float(gamma)) > cross)
    assert not gate(1.0000001, 0.0)


def test_answers() -> None:
    assert "told apart? yes" in answer(2, 0.5)
    assert "told apart? not for certain" in answer(4, 0.5)
    assert "gamma = 0.259" in answer(4, 0.5)


@pytest.mark.parametrize(("clusters", "gamma"), [(1, 0.1), (0, 0.1), (2, 1.0), (2, -0.1)])
def test_what_the_theorem_does_not_cover(clusters: int, gamma: float) -> None:
    with pytest.raises(ValueError, match=r"fewer than 2|not in \[0, 1\)"):
        cross_bound(clusters, gamma)
