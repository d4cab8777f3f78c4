from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from peer.errors import UserError
from peer.matching.base import MatcherSettings
from peer.matching.registry import create_matcher

RNG = np.random.default_rng
OTHERS = [j for j in range(20) if j != 5]


def settings(seed: int = 1, index: int = 5, k: int = 3) -> MatcherSettings:
    clusters = tuple(j % 4 for j in range(20))
    return MatcherSettings(index=index, n=20, seed=seed, l=6, k=k, t1=4, tau=2, clusters=clusters)


def test_local_has_nobody() -> None:
    matcher = create_matcher("local", settings())
    assert matcher.settle(1, OTHERS, {}, RNG(0)) == []
    assert matcher.bag == frozenset()


def test_random_draws_k_anew_every_round_and_its_bag_is_the_draw() -> None:
    matcher = create_matcher("random", settings())
    counts: Counter[int] = Counter()
    for t in range(1, 1901):
        neighbours = matcher.settle(t, OTHERS, {}, RNG([9, t]))
        assert matcher.bag == frozenset(neighbours)
        assert len(neighbours) == 3
        counts.update(neighbours)
    # 1,900 draws of 3 in 19: 300 each, standard deviation 16.
    assert set(counts) == set(OTHERS)
    assert all(abs(count - 300) < 65 for count in counts.values())


def test_fixed_keeps_k_drawn_from_all_and_uses_those_known() -> None:
    matcher = create_matcher("fixed", settings())
    kept = matcher.settle(1, OTHERS, {}, RNG(0))
    assert len(kept) == 3
    assert matcher.settle(2, OTHERS, {}, RNG(1)) == kept
    assert create_matcher("fixed", settings()).bag == frozenset(kept) == matcher.bag
    assert matcher.settle(3, [j for j in OTHERS if j != kept[0]], {}, RNG(2)) == kept[1:]
    draws = {create_matcher("fixed", settings(seed=s, index=i)).bag for s in (1, 2) for i in (5, 6)}
    assert len(draws) == 4


def test_oracle_draws_from_its_true_cluster() -> None:
    matcher = create_matcher("oracle", settings())
    assert matcher.bag == {1, 9, 13, 17}
    drawn = {tuple(matcher.settle(t, OTHERS, {}, RNG([3, t]))) for t in range(1, 60)}
    assert drawn == {(1, 9, 13), (1, 9, 17), (1, 13, 17), (9, 13, 17)}
    assert matcher.settle(99, [0, 1, 13], {}, RNG(0)) == [1, 13]
    wide = create_matcher("oracle", settings(k=10))
    assert wide.settle(1, OTHERS, {}, RNG(0)) == [1, 9, 13, 17]


def test_oracle_needs_the_clusters() -> None:
    with pytest.raises(UserError, match="true clusters"):
        create_matcher("oracle", MatcherSettings(index=0, n=4, seed=0, l=2, k=2, t1=2, tau=2))
