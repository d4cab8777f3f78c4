from __future__ import annotations

import numpy as np

from peer.matching.base import Matcher, MatcherSettings
from peer.matching.registry import create_matcher

RNG = np.random.default_rng


def pens(n: int = 9, l: int = 4, k: int = 2, t1: int = 3) -> Matcher:  # noqa: E741
    return create_matcher("pens", MatcherSettings(index=0, n=n, seed=0, l=l, k=k, t1=t1, tau=1))


def hear(peer: Matcher, t: int, similarities: dict[int, float]) -> list[int]:
    return peer.settle(t, list(range(1, 9)), similarities, RNG(t))


def test_stage_1_takes_the_k_best_of_l_fresh_candidates() -> None:
    peer, known = pens(), list(range(1, 9))
    assert hear(peer, 1, {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}) == [3, 4]
    assert peer.bag == {3, 4}
    drawn = [frozenset(peer.candidates(2, known, RNG(seed))) for seed in range(40)]
    assert {len(each) for each in drawn} == {4}
    assert not all({3, 4} <= each for each in drawn)


def test_the_bag_is_those_selected_more_often_than_expected() -> None:
    peer = pens()
    hear(peer, 1, {1: 9, 2: 8, 3: 1, 4: 1})
    hear(peer, 2, {1: 9, 2: 1, 3: 8, 5: 7})
    hear(peer, 3, {1: 9, 2: 8, 4: 9, 5: 1})
    # k / l = 1/2, so only 1 is above: 2 is below, 3 and 4 are exactly at what was expected.
    assert peer.state()["counts"] == [[1, 3, 3], [2, 3, 1], [3, 2, 1], [4, 2, 1], [5, 2, 0]]
    assert hear(peer, 4, {}) == [1]
    assert peer.bag == {1}
    assert peer.candidates(5, list(range(1, 9)), RNG(0)) == []


def test_nobody_above_what_was_expected() -> None:
    peer = pens(t1=2)
    hear(peer, 1, {1: 4, 2: 3, 3: 2, 4: 1})
    hear(peer, 2, {1: 1, 2: 2, 3: 3, 4: 4})
    # Each was met twice and chosen once, exactly as expected: ties go to the lower index.
    assert hear(peer, 3, {}) == [1, 2]
    assert peer.bag == {1, 2}


def test_an_l_beyond_everybody_does_not_lower_what_is_expected() -> None:
    peer = pens(n=4, l=100, k=1, t1=2)
    for t in (1, 2):
        assert peer.candidates(t, [1, 2, 3], RNG(0)) == [1, 2, 3]
        peer.settle(t, [1, 2, 3], {1: 0.3, 2: 0.2, 3: 0.1 if t == 1 else 0.9}, RNG(0))
    # 1 and 3 were chosen once of twice met: more than 2/3. With k / l = 1/100 all would do.
    peer.settle(3, [1, 2, 3], {}, RNG(0))
    assert peer.bag == {1, 3}


def test_a_late_peer_searches_first() -> None:
    peer = pens(t1=6)  # 8 others, 4 a round: 2 searches
    for t in (9, 10):
        assert len(peer.candidates(t, list(range(1, 9)), RNG(t))) == 4
        hear(peer, t, {1: 4, 2: 3, 3: 2, 4: 1})
        assert peer.notes == {"searching": True}
    assert hear(peer, 11, {}) == [1, 2]
