"""Robust rules against hand values and brute force."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from statistics import fmean
from statistics import median as median_of

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from peer import robust
from peer.aggregation import BLOCK, Vector, average

MODELS = arrays(
    np.float32,
    st.tuples(st.integers(1, 8), st.integers(1, 5)),
    elements=st.floats(-100, 100, width=16),
)


def vectors(*rows: tuple[float, ...]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.float32) for row in rows]


@settings(deadline=None)
@given(MODELS, st.integers(0, 5))
def test_ranks_coordinate_by_coordinate(models: np.ndarray, f: int) -> None:
    m, e = models.shape
    columns = [sorted(models[:, c].tolist()) for c in range(e)]
    assert robust.median(list(models)).tolist() == pytest.approx(
        [median_of(column) for column in columns], rel=1e-6, abs=1e-6
    )
    cut = f if m > 2 * f else (m - 1) // 2
    assert robust.trimmed_mean(list(models), f).tolist() == pytest.approx(
        [fmean(column[cut : m - cut]) for column in columns], rel=1e-6, abs=1e-5
    )


@pytest.mark.parametrize("m", [robust.FEW, robust.FEW + 1])
def test_ranks_of_few_and_of_many(m: int) -> None:
    models = list(np.random.default_rng(m).standard_normal((m, 40)).astype(np.float32))
    np.testing.assert_allclose(robust.median(models), np.median(models, axis=0), rtol=1e-6)


def brute_scores(models: np.ndarray, f: int) -> list[float]:
    """Blanchard et al.: the least sum of squared distances to any m - f - 2 of the others."""
    m = len(models)
    exact = models.astype(np.float64)
    scores = []
    for i in range(m):
        others = [float(((exact[i] - exact[j]) ** 2).sum()) for j in range(m) if j != i]
        sets = itertools.combinations(others, max(0, m - f - 2))
        scores.append(min(sum(chosen) for chosen in sets))
    return scores


@settings(deadline=None)
@given(MODELS, st.integers(0, 3))
def test_krum_by_brute_force(models: np.ndarray, f: int) -> None:
    m = len(models)
    allowed = max(0, min(f, (m - 3) // 2))  # m >= 2 f + 3
    scores = brute_scores(models, allowed)
    assert robust.krum_scores(list(models), f) == pytest.approx(scores, rel=1e-9, abs=1e-9)
    exact = robust.krum_scores(list(models), f)
    order = sorted(range(m), key=lambda i: (exact[i], i))
    assert np.array_equal(robust.krum(list(models), f), models[order[0]])
    kept = sorted(order[: m - allowed])
    expected = average(models[kept[0]], [models[i] for i in kept[1:]])
    assert np.array_equal(robust.multi_krum(list(models), f), expected)


def test_krum_by_hand() -> None:
    models = vectors((0,), (1,), (3,), (4,), (100,))
    # f = 1: the sums over the two closest others are 1 + 9, 1 + 4, 1 + 4, 1 + 9 and 96^2 + 97^2.
    assert robust.krum_scores(models, 1) == [10.0, 5.0, 5.0, 10.0, 96**2 + 97**2]
    assert robust.krum(models, 1).tolist() == [1.0]  # a tie: the first
    assert robust.multi_krum(models, 1).tolist() == [2.0]


def clipped_by_hand(centre: np.ndarray, model: np.ndarray, bound: float) -> np.ndarray:
    """Sun et al.: the difference from the centre, shortened; in float64 throughout."""
    difference = model.astype(np.float64) - centre
    length = sum(value**2 for value in difference.tolist()) ** 0.5
    clipped: np.ndarray = centre + difference * (1.0 if length <= bound else bound / length)
    return clipped


@settings(deadline=None)
@given(MODELS, st.floats(0.1, 300))
def test_norm_clipping_by_brute_force(models: np.ndarray, bound: float) -> None:
    centre = models[0]
    for model in models:
        made = robust.clip_difference(centre, model, bound)
        assert made.tolist() == pytest.approx(
            clipped_by_hand(centre, model, bound).tolist(), rel=1e-6, abs=1e-5
        )
        assert robust.norm(made, centre) <= bound * (1 + 1e-5) + 1e-5


@settings(deadline=None)
@given(MODELS, st.floats(0.1, 300), st.integers(1, 6), st.booleans())
def test_centred_clipping_by_brute_force(
    models: np.ndarray, radius: float, steps: int, own: bool
) -> None:
    begin = models[0] if own else np.ones_like(models[0])
    centre = begin.astype(np.float64)
    for _ in range(steps):
        moves = [clipped_by_hand(centre, model, radius) - centre for model in models]
        centre = centre + sum(moves) / len(models)
    made = robust.centred_clipping(list(models), begin, radius, steps)
    assert made.tolist() == pytest.approx(centre.tolist(), rel=1e-5, abs=1e-4)


def test_the_clipped_by_hand() -> None:
    own, other = vectors((1, 1), (4, 5))  # 5 apart
    assert robust.clip_difference(own, other, 2.5).tolist() == [2.5, 3.0]
    assert robust.clip_difference(own, other, 5.0).tolist() == [4.0, 5.0]
    # One step from 0 by radius 5: (0 + 3 + (-5)) / 3; the next one from -2/3: (2/3 + 11/3 - 5) / 3.
    models = vectors((0,), (3,), (-300,))
    assert robust.centred_clipping(models, models[0], 5.0, 1).tolist() == pytest.approx([-2 / 3])
    assert robust.centred_clipping(models, models[0], 5.0, 2).tolist() == pytest.approx(
        [-2 / 3 - 2 / 9]
    )


@settings(deadline=None)
@given(MODELS, st.floats(0.1, 300))
def test_one_step_of_centred_clipping_is_norm_clipping_and_the_mean(
    models: np.ndarray, radius: float
) -> None:
    own, *others = models
    clipped = [robust.clip_difference(own, other, radius) for other in others]
    assert np.allclose(
        robust.centred_clipping(list(models), own, radius, 1), average(own, clipped), atol=1e-4
    )


ZERO = np.zeros(1, dtype=np.float32)
RULES: dict[str, Callable[[list[Vector]], Vector]] = {
    "median": robust.median,
    "trimmed-mean": lambda models: robust.trimmed_mean(models, 2),
    "krum": lambda models: robust.krum(models, 2),
    "multi-krum": lambda models: robust.multi_krum(models, 2),
    "centred-clipping": lambda models: robust.centred_clipping(
        models, models[0] if models else ZERO, 1.0, 3
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_two_of_nine_cannot_carry_the_rest_away(name: str) -> None:
    rng = np.random.default_rng(4)
    honest = [rng.normal(size=2 * BLOCK + 7).astype(np.float32) * 0.01 for _ in range(7)]
    evil = [np.full(2 * BLOCK + 7, 1e6, dtype=np.float32)] * 2
    before = [model.copy() for model in (*honest, *evil)]
    made = RULES[name]([*honest, *evil])
    assert made.dtype == np.float32
    assert robust.norm(made) < 3.0
    assert robust.norm(average(honest[0], [*honest[1:], *evil])) > 1e6
    for model, old in zip((*honest, *evil), before, strict=True):
        assert np.array_equal(model, old)
    assert not any(np.shares_memory(made, model) for model in (*honest, *evil))


@pytest.mark.parametrize("name", RULES)
def test_alone_a_model_stays_and_sizes_must_agree(name: str) -> None:
    (own,) = vectors((1.5, -2))
    assert RULES[name]([own]).tolist() == [1.5, -2.0]
    with pytest.raises(ValueError, match="different sizes"):
        RULES[name](vectors((1,), (1, 2)))
    with pytest.raises(ValueError, match="no model"):
        RULES[name]([])


def test_norms_are_exact_beyond_a_block() -> None:
    vector = np.full(3 * BLOCK + 1, 2.0, dtype=np.float32)
    assert robust.norm(vector) == pytest.approx(2 * (3 * BLOCK + 1) ** 0.5, rel=1e-12)
    assert robust.norm(vector, vector) == 0.0
