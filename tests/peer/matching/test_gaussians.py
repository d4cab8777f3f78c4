from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from peer.matching.gaussians import MAX_STEPS, SIGMA_FLOOR, separate

# Sixteenths are exact in binary, so sums of them do not depend on their order or scale.
samples = st.lists(
    st.tuples(st.integers(-400, 400).map(lambda x: x / 16), st.booleans()), min_size=1, max_size=20
)


def split(pairs: list[tuple[float, bool]]) -> tuple[np.ndarray, np.ndarray]:
    y, initial = zip(*pairs, strict=True)
    return np.array(y), np.array(initial)


def test_exact_values_of_a_clear_case() -> None:
    y = [8.0, 9.0, 10.0, 0.0, 1.0, 2.0, 1.0]
    found = separate(y, [True, False, True, False, False, False, False])
    assert found.separated
    assert found.same.tolist() == [True, True, True, False, False, False, False]
    assert found.means == (9.0, 1.0)
    assert found.sigmas == pytest.approx((math.sqrt(2 / 3), math.sqrt(1 / 2)))
    assert found.weights == pytest.approx((3 / 7, 4 / 7))
    assert found.steps == 2


def test_the_first_step_matches_the_formulas() -> None:
    """One EM step by hand: beta_0 phi_0 > beta_1 phi_1 decides between the means."""
    y, initial = np.array([4.0, 5.0, 6.0, 3.4, 0.0, 1.0, 2.0, 0.5]), np.arange(8) < 3
    own, rest = y[initial], y[~initial]

    def density(x: float, part: np.ndarray) -> float:
        sigma = float(part.std())
        return part.size / 8 * math.exp(-((x - float(part.mean())) ** 2) / 2 / sigma**2) / sigma

    assert density(3.4, own) < density(3.4, rest)
    found = separate(y, initial)
    assert found.steps == 1
    assert found.same.tolist() == initial.tolist()


def test_an_impure_bag_that_turned_the_components_round_is_swapped() -> None:
    y = [0.0, 0.1, 0.2, 9.0, 9.1, 9.2, 9.3]
    found = separate(y, [True, True, True, False, False, False, False])
    assert found.separated
    assert found.same.tolist() == [False] * 3 + [True] * 4
    assert found.means[0] > found.means[1]


def test_the_most_similar_is_not_lost_to_a_wide_component() -> None:
    """The narrow own cluster's density at 100 is far below the wide strangers', yet 100 is own."""
    y = [10.0, 10.1, 10.2, 10.3, 30.0, -20.0, -5.0, 3.0, -12.0]
    found = separate(y, [True] * 5 + [False] * 4)
    assert found.same.tolist() == [True] * 5 + [False] * 4
    narrow = separate([*y[:4], 11.5, *y[5:]], [True] * 4 + [False] * 5)
    assert narrow.same[4]


def test_sigma_has_a_floor_relative_to_the_spread() -> None:
    y = np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    found = separate(y, y > 0.5)
    assert found.separated
    assert found.sigmas == pytest.approx((SIGMA_FLOOR * y.std(),) * 2)


def test_a_single_member_takes_the_pooled_sigma() -> None:
    y = [9.0, -1.0, 1.0, -2.0, 2.0, 0.0, 0.0]
    found = separate(y, [True] + [False] * 6)
    assert found.same.tolist() == [True] + [False] * 6
    assert found.sigmas == pytest.approx((math.sqrt(10 / 7), math.sqrt(10 / 6)))


@pytest.mark.parametrize("initial", [[True] * 8, [False] * 8])
def test_one_kind_alone_is_split_at_the_mean(initial: list[bool]) -> None:
    y = [0.9, 0.91, 0.93, 0.92, 0.1, 0.13, 0.12, 0.11]
    assert separate(y, initial).same.tolist() == [True] * 4 + [False] * 4


def test_one_gaussian_keeps_the_assignment() -> None:
    quantiles = [-1.5, -1.0, -0.65, -0.35, -0.1, 0.1, 0.35, 0.65, 1.0, 1.5]
    initial = [False, True] * 5
    found = separate(quantiles, initial)
    assert not found.separated
    assert found.same.tolist() == initial


def test_equal_similarities_and_few_of_them_tell_nothing() -> None:
    equal = separate([0.3] * 9, [True] * 3 + [False] * 6)
    assert not equal.separated
    assert equal.same.tolist() == [True] * 3 + [False] * 6
    few = separate([0.9, 0.9, 0.1, 0.1, 0.1], [False, True, False, True, False])
    assert not few.separated
    assert few.same.tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("y", [[], [math.nan, 1.0], [math.inf, 1.0], [[1.0, 2.0]]])
def test_bad_input(y: list[float]) -> None:
    with pytest.raises(ValueError, match="similarities are"):
        separate(y, np.zeros(np.shape(y), dtype=bool))
    with pytest.raises(ValueError, match="similarities are"):
        separate([1.0, 2.0], [True])


@given(samples, st.randoms(use_true_random=False))
def test_the_order_does_not_matter(pairs: list[tuple[float, bool]], random: object) -> None:
    y, initial = split(pairs)
    order = np.argsort([random.random() for _ in pairs])  # type: ignore[attr-defined]
    one, other = separate(y, initial), separate(y[order], initial[order])
    assert np.array_equal(one.same[order], other.same)
    assert one._replace(same=other.same) == other


@given(samples, st.sampled_from([0.125, 1.0, 32.0]), st.integers(-100, 100))
def test_scale_and_origin_do_not_matter(
    pairs: list[tuple[float, bool]], scale: float, origin: int
) -> None:
    y, initial = split(pairs)
    one, other = separate(y, initial), separate(y * scale + origin, initial)
    # At a tie of the two densities, or of the two BICs, rounding may decide; demand a margin.
    assume(one.steps < MAX_STEPS and other.steps < MAX_STEPS)
    nudged = separate(y * scale * (1 + 1e-9) + origin, initial)
    assume(np.array_equal(nudged.same, other.same))
    assert np.array_equal(one.same, other.same)
    assert one.separated == other.separated


@given(samples)
def test_it_is_monotone_ends_and_never_empties_a_side(pairs: list[tuple[float, bool]]) -> None:
    y, initial = split(pairs)
    found = separate(y, initial)
    assert found.steps <= MAX_STEPS
    assert all(map(math.isfinite, (*found.means, *found.sigmas, *found.weights)))
    if not found.separated:
        assert np.array_equal(found.same, initial)
        return
    assert found.same.any()
    assert not found.same.all()
    assert y[found.same].min() > y[~found.same].max()


@pytest.mark.parametrize("strangers", [6, 3])
def test_small_samples_of_well_separated_clusters(strangers: int) -> None:
    """What NAEM sees first with n = 20, K = 4, l = 6, k = 3; clusters 6 sigma apart."""
    rng = np.random.default_rng(strangers)
    wrong = missed = 0
    for _ in range(300):
        own, others = rng.normal(0.5, 0.05, 4), rng.normal(0.2, 0.05, strangers)
        y = np.concatenate([own, others])
        same = separate(y, np.arange(4 + strangers) < 3).same
        wrong += int(same[4:].sum())
        missed += int((~same[:4]).sum())
    assert wrong <= 3
    assert missed <= 0.15 * 1200
