from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb

import numpy as np
import pytest

from peer.matching.base import Matcher, MatcherSettings
from peer.matching.registry import create_matcher

RNG = np.random.default_rng
N = 20
OTHERS = list(range(1, N))
CLUSTER = {0, 4, 8, 12, 16}
"""Peer 0's true cluster, K = 4."""


def similarity(j: int) -> float:
    """Separate clusters clearly, and no two peers equally."""
    return (0.6 if j in CLUSTER else 0.1) + j / 1000


def matcher(t1: int = 4, tau: int = 3) -> Matcher:
    settings = MatcherSettings(index=0, n=N, seed=0, l=6, k=3, t1=t1, tau=tau)
    return create_matcher("panm-grad", settings)


def play(
    peer: Matcher, t: int, known: Sequence[int] = OTHERS, deaf: Sequence[int] = (), seed: int = 0
) -> tuple[list[int], list[int]]:
    asked = peer.candidates(t, known, RNG([seed, t, 1]))
    heard = {j: similarity(j) for j in asked if j not in deaf}
    return asked, peer.settle(t, known, heard, RNG([seed, t, 2]))


def in_stage_2(bag: list[int], t1: int = 4, tau: int = 3) -> Matcher:
    peer = matcher(t1, tau)
    peer.restore({"neighbours": bag[:3], "searches": t1, "bag": bag})
    return peer


def test_nsmc_remembers_its_neighbours_and_draws_l_others() -> None:
    peer = matcher(t1=9)
    before: list[int] = []
    for t in range(1, 10):
        asked, neighbours = play(peer, t)
        assert set(before) <= set(asked)
        assert len(asked) == 6 + len(before)
        best = sorted(sorted(asked, key=similarity)[-3:])
        assert neighbours == best == sorted(peer.bag)
        before = neighbours
    assert set(before) <= CLUSTER


def test_nsmc_draws_uniformly_from_outside_its_neighbours() -> None:
    counts: Counter[int] = Counter()
    for seed in range(1600):
        peer = matcher()
        peer.restore({"neighbours": [3, 7, 11], "searches": 1, "bag": None})
        counts.update(peer.candidates(2, OTHERS, RNG(seed)))
    assert all(counts.pop(j) == 1600 for j in (3, 7, 11))
    # 1,600 draws of 6 in 16: 600 each, standard deviation 19.
    assert all(abs(count - 600) < 80 for count in counts.values())
    assert len(counts) == 16


def test_purity_follows_the_hypergeometric_recursion() -> None:
    """P(all k true), from m_t = min(k, m_{t-1} + X_t) with X_t hypergeometric; a = 5."""
    theory = np.array([1.0, 0, 0, 0])
    expected = []
    for t in range(1, 5):
        population, state = (19 if t == 1 else 16), np.zeros(4)
        for m, p in enumerate(theory):
            good = 4 - m
            for x in range(good + 1):
                ways = comb(good, x) * comb(population - good, 6 - x) / comb(population, 6)
                state[min(3, m + x)] += p * ways
        theory = state
        expected.append(state[3])
    runs = 1500
    pure = np.zeros(4)
    for seed in range(runs):
        peer = matcher()
        for t in range(1, 5):
            _, neighbours = play(peer, t, seed=seed)
            pure[t - 1] += CLUSTER.issuperset(neighbours)
    assert pure / runs == pytest.approx(expected, abs=0.05)


def test_neighbours_unheard_are_dropped_but_silence_forgets_nothing() -> None:
    peer = matcher()
    _, first = play(peer, 1)
    _, second = play(peer, 2, deaf=first[:1])
    assert first[0] not in second
    assert play(peer, 3, deaf=OTHERS)[1] == []
    assert peer.bag == frozenset(second)
    gone = [j for j in OTHERS if j != second[0]]
    asked, _ = play(peer, 4, known=gone)
    assert set(second[1:]) <= set(asked)
    assert second[0] not in asked


def test_the_bag_is_the_last_neighbours_of_stage_1() -> None:
    peer = matcher()
    for t in range(1, 5):
        _, neighbours = play(peer, t)
    asked, drawn = play(peer, 5)
    assert asked == []
    assert peer.bag == frozenset(neighbours) == frozenset(drawn)


def test_stage_2_draws_k_of_the_bag_that_are_known() -> None:
    peer = in_stage_2([4, 8, 12, 16])
    drawn = {tuple(play(peer, 5, seed=seed)[1]) for seed in range(60)}
    assert drawn == {(4, 8, 12), (4, 8, 16), (4, 12, 16), (8, 12, 16)}
    assert play(peer, 7, known=[1, 2, 8, 16])[1] == [8, 16]
    assert peer.bag == {4, 8, 12, 16}


def test_naem_asks_when_tau_divides_the_round() -> None:
    peer = in_stage_2([4, 8, 12, 16, 1, 2, 3, 5])
    for t in (5, 7, 8):
        assert peer.candidates(t, OTHERS, RNG(0)) == []
    for seed in range(20):
        asked = set(peer.candidates(6, OTHERS, RNG(seed)))
        assert len(asked & peer.bag) == len(asked - peer.bag) == 6


def test_naem_takes_in_its_cluster_and_puts_strangers_out() -> None:
    peer = in_stage_2([4, 8, 12, 5])
    for t in range(6, 40, 3):
        play(peer, t)
    assert peer.bag == CLUSTER - {0}


def test_naem_says_what_it_did() -> None:
    peer = in_stage_2([4, 8, 5])
    outside = {j: similarity(j) for j in (12, 1, 2, 3, 6, 7)}
    bag = {j: similarity(j) for j in (4, 8, 5)}
    peer.settle(6, OTHERS, outside | bag, RNG(0))
    assert peer.notes == {"naem": "updated", "joined": [12], "left": [5]}
    assert peer.bag == {4, 8, 12}
    peer.settle(7, OTHERS, {}, RNG(0))
    assert peer.notes == {}


def test_naem_keeps_the_bag_when_nothing_tells_clusters_apart() -> None:
    peer = in_stage_2([4, 8, 12])
    quantiles = dict(zip([4, 1, 8, 2, 12, 3, 5, 6, 7], np.linspace(-1, 1, 9) ** 3, strict=True))
    peer.settle(6, OTHERS, quantiles, RNG(0))
    assert peer.notes == {"naem": "kept", "joined": [], "left": []}
    assert peer.bag == {4, 8, 12}


def test_members_unheard_or_dead_stay_in_the_bag() -> None:
    peer = in_stage_2([4, 8, 12])
    known = [j for j in OTHERS if j != 4]
    play(peer, 6, known=known, deaf=[8])
    assert {4, 8, 12} <= peer.bag
    before = peer.bag
    play(peer, 9, deaf=OTHERS)
    assert peer.bag == before


def test_a_late_peer_searches_before_it_trusts_a_bag() -> None:
    peer = matcher(t1=10)  # 19 others, 6 a round: ceil(19 / 6) = 4 searches
    for t in range(15, 19):
        asked, neighbours = play(peer, t)
        assert len(asked) >= 6
        assert peer.notes == {"searching": True}
    assert play(peer, 19)[0] == []
    assert peer.bag == frozenset(neighbours)
    assert peer.notes == {}


def test_a_round_that_heard_nobody_is_no_search() -> None:
    peer = matcher(t1=1)
    play(peer, 1, deaf=OTHERS)
    assert len(play(peer, 2)[0]) == 6
    assert play(peer, 4)[0] == []
