from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from peer.matching.similarity import cosine
from peer.matching.sketch import CountSketch

whole = arrays(np.int64, 50, elements=st.integers(-1000, 1000)).map(lambda a: a.astype(np.float32))


def test_every_value_goes_to_one_bucket_with_one_sign() -> None:
    sketch = CountSketch(40, 8, seed=3)
    columns = np.array([sketch.apply(row) for row in np.eye(40, dtype=np.float32)])
    assert columns.shape == (40, 8)
    assert columns.dtype == np.float32
    assert (np.abs(columns).sum(axis=1) == 1).all()
    assert (np.count_nonzero(columns, axis=1) == 1).all()


@given(whole, whole, st.integers(-5, 5))
def test_it_is_linear(a: np.ndarray, b: np.ndarray, factor: int) -> None:
    sketch = CountSketch(50, 16, seed=1)
    both = sketch.apply(a + np.float32(factor) * b)
    assert np.array_equal(both, sketch.apply(a) + np.float32(factor) * sketch.apply(b))


def test_the_seed_decides() -> None:
    v = np.arange(100, dtype=np.float32)
    assert np.array_equal(CountSketch(100, 32, 5).apply(v), CountSketch(100, 32, 5).apply(v))
    assert not np.array_equal(CountSketch(100, 32, 5).apply(v), CountSketch(100, 32, 6).apply(v))


def test_inner_products_are_unbiased() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(size=200).astype(np.float32)
    b = (a + rng.normal(size=200)).astype(np.float32)
    buckets, trials = 32, 2000
    estimates = []
    for seed in range(trials):
        sketch = CountSketch(200, buckets, seed)
        estimates.append(float(sketch.apply(a) @ sketch.apply(b)))
    # Var <= (|a|^2 |b|^2 + <a, b>^2) / buckets: Charikar et al., for one row.
    bound = math.sqrt((float(a @ a) * float(b @ b) + float(a @ b) ** 2) / buckets)
    assert abs(np.mean(estimates) - float(a @ b)) < 4 * bound / math.sqrt(trials)
    assert np.std(estimates) < 1.1 * bound


@pytest.mark.parametrize("buckets", [64, 256, 1024])
def test_the_error_of_a_cosine_is_about_one_over_root_buckets(buckets: int) -> None:
    rng = np.random.default_rng(buckets)
    errors = []
    for seed in range(60):
        a, noise = (rng.normal(size=20_000).astype(np.float32) for _ in range(2))
        b = a * np.float32(0.5) + noise
        sketch = CountSketch(20_000, buckets, seed)
        errors.append(cosine(sketch.apply(a), sketch.apply(b)) - cosine(a, b))
    rms = math.sqrt(np.mean(np.square(errors)))
    assert 0.4 / math.sqrt(buckets) < rms < 1.3 / math.sqrt(buckets)


def test_sizes_are_checked() -> None:
    for size, buckets in ((0, 8), (8, 0), (8, 65_537)):
        with pytest.raises(ValueError, match="no sketch"):
            CountSketch(size, buckets, 0)
    with pytest.raises(ValueError, match="this sketch is of 8 values"):
        CountSketch(8, 4, 0).apply(np.zeros(9, dtype=np.float32))
