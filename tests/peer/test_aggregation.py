from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from peer.aggregation import average, with_own_statistics


def vector(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_the_mean_counts_oneself() -> None:
    mean = average(vector(1, 2), [vector(3, 4), vector(8, 0)])
    assert mean.dtype == np.float32
    assert mean.tolist() == [4.0, 2.0]


def test_weights_begin_with_ones_own() -> None:
    assert average(vector(1, 2), [vector(5, 10)], [3, 1]).tolist() == [2.0, 4.0]
    assert average(vector(1, 2), [vector(5, 10)], [0, 1]).tolist() == [5.0, 10.0]


def test_alone_a_model_stays_bit_by_bit_and_is_not_shared() -> None:
    own = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    mean = average(own, [])
    assert np.array_equal(mean, own)
    assert not np.shares_memory(mean, own)


@given(arrays(np.float32, (4, 6), elements=st.floats(-1e6, 1e6, width=32)))
def test_equal_weights_are_no_weights_and_inputs_stay(models: np.ndarray) -> None:
    before = models.copy()
    mean = average(models[0], list(models[1:]))
    assert np.array_equal(mean, average(models[0], list(models[1:]), [2, 2, 2, 2]))
    exact = models.astype(np.float64).mean(axis=0)
    assert np.allclose(mean, exact, rtol=1e-6, atol=1e-30)
    assert np.array_equal(models, before)


@pytest.mark.parametrize("weights", [[1], [1, 1, 1], [-1, 2], [0, 0], [1, float("nan")]])
def test_bad_weights(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="not the weights"):
        average(vector(1), [vector(2)], weights)


def test_ones_own_statistics_stay() -> None:
    own, mixed = vector(1, 2, 3, 4, 5), vector(6, 7, 8, 9, 10)
    assert with_own_statistics(mixed, own, 3).tolist() == [6, 7, 8, 4, 5]
    assert (own.tolist(), mixed.tolist()) == ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])


def test_sizes_must_agree() -> None:
    with pytest.raises(ValueError, match="different sizes"):
        average(vector(1), [vector(1, 2)])
