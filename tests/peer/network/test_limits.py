"""Token buckets: a flood is held to its rate, whoever asks for less is never refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.network import limits as module
from peer.network.limits import Allowance, Limiter, TokenBucket

SMALL = Allowance(requests=2.0, request_burst=10.0, bytes=100.0, byte_burst=1000.0)
PAUSES = st.lists(st.floats(0, 5), min_size=1, max_size=60)


def test_a_bucket_fills_up_to_its_burst_and_pays_its_debt() -> None:
    bucket = TokenBucket(rate=2.0, burst=10.0, now=0.0)
    bucket.take(4, 0.0)
    assert bucket.tokens(1.0) == 8.0
    assert bucket.tokens(100.0) == 10.0
    bucket.take(30, 100.0)
    assert bucket.tokens(105.0) == -10.0
    # A clock that is read out of order gives no tokens twice.
    bucket.take(0, 110.0)
    bucket.take(0, 105.0)
    assert bucket.tokens(110.0) == 0.0


@given(PAUSES)
def test_no_flood_gets_more_than_burst_and_rate(pauses: list[float]) -> None:
    limiter, now, admitted = Limiter(SMALL), 0.0, 0
    for pause in pauses:
        now += pause
        admitted += sum(limiter.admits(b"flood", now) for _ in range(20))
        assert admitted <= SMALL.request_burst + SMALL.requests * now + 1e-6


@given(st.lists(st.floats(0.5, 5), min_size=1, max_size=60))
def test_who_asks_within_the_rate_is_never_refused(pauses: list[float]) -> None:
    limiter, now = Limiter(SMALL), 0.0
    for pause in pauses:
        now += pause
        while limiter.admits(b"flood", now):
            pass
        assert limiter.admits(b"honest", now)
        limiter.spend(b"honest", int(SMALL.bytes * 0.5), now)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 5000)), min_size=1, max_size=60))
def test_bytes_are_held_to_their_rate_but_for_one_answer(asked: list[tuple[float, int]]) -> None:
    limiter, now, sent, largest = Limiter(SMALL), 0.0, 0, 0
    for pause, size in asked:
        now += pause
        if limiter.admits(b"a", now):
            limiter.spend(b"a", size, now)
            sent, largest = sent + size, max(largest, size)
        assert sent <= SMALL.byte_burst + SMALL.bytes * now + largest + 1e-6


def test_senders_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SENDERS", 2)
    limiter = Limiter(SMALL)
    for sender in (b"a", b"b"):
        while limiter.admits(sender, 0.0):
            pass
    assert limiter.admits(b"c", 0.0)
    # The one that asked longest ago was forgotten; the other was not.
    assert not limiter.admits(b"b", 0.0)
    assert limiter.admits(b"a", 0.0)


def test_an_allowance_grows_with_the_model() -> None:
    digits, large = Allowance.of_snapshots(40_000, 4), Allowance.of_snapshots(10**9, 4)
    assert (digits.bytes, digits.byte_burst) == (16 * 2**20, 64 * 2**20)
    assert (large.bytes, large.byte_burst) == (1e9, 8e9)
    assert digits.requests == large.requests == 200
