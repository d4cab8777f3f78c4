from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from peer.matching.similarity import (
    GradientEvidence,
    cosine,
    faded,
    gradient_similarities,
    gradient_similarity,
    loss_similarity,
)

vectors = arrays(np.float32, 7, elements=st.floats(-1e3, 1e3, width=32))


def vector(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_cosine_exact_values() -> None:
    assert cosine(vector(3, 4), vector(3, 4)) == 1.0
    assert cosine(vector(3, 4), vector(-3, -4)) == -1.0
    assert cosine(vector(1, 0), vector(0, 2)) == 0.0
    assert cosine(vector(1, 0), vector(3, 4)) == pytest.approx(0.6, abs=1e-15)


def test_what_has_no_direction_resembles_nobody() -> None:
    assert cosine(vector(0, 0), vector(1, 2)) == 0.0
    assert cosine(vector(math.nan, 1), vector(1, 2)) == 0.0
    assert cosine(vector(math.inf, 1), vector(1, 2)) == 0.0


def test_cosine_survives_values_whose_squares_leave_float32() -> None:
    assert cosine(vector(3e30, 4e30), vector(3e30, 4e30)) == pytest.approx(1.0, abs=1e-15)
    assert cosine(vector(3e-30, 4e-30), vector(3, 4)) == pytest.approx(1.0, abs=1e-6)


def test_cosine_is_accurate_for_a_long_vector() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=200_000).astype(np.float32) for _ in range(2))
    exact = math.fsum(a.astype(float) * b) / math.sqrt(
        math.fsum(a.astype(float) ** 2) * math.fsum(b.astype(float) ** 2)
    )
    assert cosine(a, b) == pytest.approx(exact, abs=1e-14)


@given(vectors, vectors, st.sampled_from([0.25, 2.0, 1024.0]))
def test_cosine_is_symmetric_bounded_and_blind_to_scale(
    a: np.ndarray, b: np.ndarray, scale: float
) -> None:
    value = cosine(a, b)
    assert -1 <= value <= 1
    assert cosine(b, a) == value
    if not (np.any((a != 0) & (np.abs(a) < 1e-30)) or np.any((b != 0) & (np.abs(b) < 1e-30))):
        assert cosine(a * np.float32(scale), b) == pytest.approx(value, abs=1e-12)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="no cosine"):
        cosine(vector(1, 2), vector(1, 2, 3))


@pytest.mark.parametrize(("alpha", "expected"), [(1.0, 0.6), (0.0, -1.0), (0.25, 0.15 - 0.75)])
def test_gradient_similarity_weighs_the_two_cosines(alpha: float, expected: float) -> None:
    own = GradientEvidence(vector(1, 0), vector(1, 1))
    other = GradientEvidence(vector(3, 4), vector(-2, -2))
    assert gradient_similarity(own, other, alpha) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("fade", "weight"), [(0.0, 0.4), (0.125, 0.4), (0.25, 0.4), (0.5, 0.2), (1.0, 0.1)]
)
def test_small_updates_count_for_less(fade: float, weight: float) -> None:
    """||g_i|| is a quarter of ||h_i||; what the other's norms are does not matter."""
    own = GradientEvidence(vector(1, 0), vector(0, 4))
    other = GradientEvidence(vector(30, 40), vector(0, -2))
    expected = weight * 0.6 - (1 - weight)
    assert gradient_similarity(own, other, 0.4, fade) == pytest.approx(expected, abs=1e-15)


def test_what_has_no_norm_does_not_fade() -> None:
    assert faded(0.5, 0.1, 0.0, 1.0) == 0.0
    for g, h in ((0.0, 0.0), (math.nan, 1.0), (1.0, math.nan), (1.0, math.inf), (math.inf, 1.0)):
        assert faded(0.5, 0.1, g, h) == 0.5


@given(arrays(np.float32, (8, 7), elements=st.floats(-1e3, 1e3, width=32)))
def test_many_at_once_have_the_same_bits(values: np.ndarray) -> None:
    own, *others = (GradientEvidence(values[i], values[i + 4]) for i in range(4))
    for fade in (0.0, 0.7):
        assert gradient_similarities(own, others, 0.3, fade) == [
            gradient_similarity(own, other, 0.3, fade) for other in others
        ]


def test_loss_similarity() -> None:
    assert loss_similarity(0.5) == 2.0
    assert loss_similarity(4.0) == 0.25
    assert math.isfinite(loss_similarity(0.0))
    assert loss_similarity(0.0) > loss_similarity(1e-6)
    assert loss_similarity(math.nan) == loss_similarity(math.inf) == 0.0
