"""Points for offences: they add up, decay, and keep a peer out for as long as they must."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.network import score as module
from peer.network.score import HALF_LIFE, MOST, POINTS, Offence, Scores

LIMIT = 100.0
EVENTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(Offence), st.floats(0, 3 * HALF_LIFE)),
    max_size=40,
)


def test_points_halve_in_a_half_life() -> None:
    scores = Scores(LIMIT)
    scores.offend("a", Offence.FORGED, 10.0)
    assert scores.points("a", 10.0) == 60.0
    assert scores.points("a", 10.0 + HALF_LIFE) == 30.0
    assert scores.points("a", 10.0 + 3 * HALF_LIFE) == 7.5
    assert scores.points("b", 10.0) == 0.0


def test_left_out_from_the_limit_until_half_of_it() -> None:
    scores = Scores(LIMIT)
    # From 120 points to 50.
    expected = HALF_LIFE * math.log2(2.4)
    assert [scores.offend("a", Offence.MALFORMED, 0.0) for _ in range(4)] == [0, 0, 0, expected]
    assert scores.left_out("a", expected - 1)
    assert not scores.left_out("a", expected)
    assert not scores.left_out("b", 0.0)
    # Who returns has half of the limit still, and soon goes again.
    assert scores.offend("a", Offence.FORGED, expected) > HALF_LIFE


def test_seldom_offences_never_add_up() -> None:
    scores = Scores(LIMIT)
    assert not any(scores.offend("a", Offence.MALFORMED, i * HALF_LIFE) for i in range(100))


@given(EVENTS)
def test_any_offences(events: list[tuple[str, Offence, float]]) -> None:
    scores, now, total = Scores(LIMIT), 0.0, dict.fromkeys("abc", 0.0)
    for peer, offence, pause in events:
        now += pause
        others = {other: scores.points(other, now) for other in "abc" if other != peer}
        before, out = scores.points(peer, now), scores.left_out(peer, now)
        seconds = scores.offend(peer, offence, now)
        after = scores.points(peer, now)
        total[peer] += POINTS[offence]
        assert before <= after <= min(total[peer], MOST * LIMIT)
        assert {other: scores.points(other, now) for other in others} == others
        # Over the limit it is out, and back in three half-lives whatever it did.
        assert scores.left_out(peer, now) == (seconds > 0)
        assert (seconds > 0) == (after >= LIMIT or out)
        assert seconds <= 3 * HALF_LIFE
        assert not scores.left_out(peer, now + seconds)
        assert scores.points(peer, now + seconds) <= max(LIMIT / 2, after * (seconds == 0)) + 1e-6
    for peer, count in total.items():
        assert count or not scores.left_out(peer, now)


def test_no_more_peers_are_remembered_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SCORED", 3)
    scores = Scores(LIMIT)
    for _ in range(4):
        scores.offend("bad", Offence.MALFORMED, 0.0)
    for number in range(20):
        scores.offend(f"invented {number}", Offence.MALFORMED, 0.0)
    assert scores.left_out("bad", 0.0)
    assert sum(scores.points(f"invented {number}", 0.0) > 0 for number in range(20)) == 2
