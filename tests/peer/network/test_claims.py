"""Claims to indices: exact steps, and many peers that start at any time behind a slow broker."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.network.claims import SETTLE, VOID_AFTER, Claim, Claims, Stamp

A, B, C = "a" * 32, "b" * 32, "c" * 32
STEP = 0.1


def applicant(own: str = B, *, n: int = 3, wanted: int | None = None, **more: bool) -> Claims:
    """A peer that starts at 0."""
    return Claims(own, n=n, wanted=wanted, now=0.0, **more)


def test_alone_it_reads_claims_and_holds() -> None:
    claims = applicant()
    assert not claims.tick(SETTLE - STEP)
    assert (claims.claim, claims.held) == (Claim(), None)
    assert claims.tick(SETTLE)
    assert (claims.claim, claims.held) == (Claim(0), None)
    assert not claims.tick(2 * SETTLE - STEP)
    assert claims.tick(2 * SETTLE)
    assert (claims.claim, claims.held) == (Claim(0, held=True), 0)
    assert not claims.tick(1e6)


@pytest.mark.parametrize(
    ("rival", "claim", "yields"),
    [
        (A, Claim(0), True),
        (C, Claim(0), False),
        (C, Claim(0, held=True), True),
        (A, Claim(1), False),
        (A, Claim(), False),
    ],
)
def test_who_yields(rival: str, claim: Claim, yields: bool) -> None:
    claims = applicant()
    claims.tick(SETTLE)
    claims.hear(rival, claim, Stamp(1, 1), SETTLE)
    assert claims.tick(SETTLE + STEP) == yields
    assert claims.claim == Claim(1 if yields else 0)


def test_applicants_choose_in_the_order_of_their_ids() -> None:
    claims = applicant(C)
    claims.hear(A, Claim(), Stamp(1, 1), 0.5)
    claims.hear(B, Claim(1, held=True), Stamp(1, 1), 0.5)
    claims.tick(SETTLE)
    assert claims.claim == Claim(2)


@pytest.mark.parametrize(("strict", "chosen"), [(False, 0), (True, None)])
def test_a_wish_and_a_demand(strict: bool, chosen: int | None) -> None:
    free = applicant(wanted=2, strict=strict)
    assert free.claim == Claim(2)
    assert free.tick(SETTLE)
    assert free.held == 2
    taken = applicant(wanted=2, strict=strict)
    taken.hear(C, Claim(2, held=True), Stamp(1, 1), 0.0)
    assert taken.tick(0.0)
    assert taken.claim == Claim(chosen)


def test_claims_that_are_not_renewed_give_way_when_no_other_is_left() -> None:
    claims = applicant(n=2)
    claims.hear(A, Claim(0, held=True), Stamp(1, 1), 0.0)
    claims.hear(C, Claim(1, held=True), Stamp(1, 1), 0.0)
    claims.hear(C, Claim(1, held=True), Stamp(1, 1), 60.0)  # the same again is no renewal
    claims.hear(A, Claim(0, held=True), Stamp(1, 2), 60.0)
    assert not claims.tick(VOID_AFTER - STEP)
    assert claims.holder(1, VOID_AFTER - STEP) == C
    assert claims.tick(VOID_AFTER)
    assert claims.claim == Claim(1)
    other = applicant(n=2)
    other.hear(A, Claim(0, held=True), Stamp(1, 1), 0.0)
    other.tick(VOID_AFTER)
    assert other.claim == Claim(1), "one that nobody ever claimed comes first"


def test_a_new_life_goes_on_from_the_last_one_and_an_old_word_counts_no_more() -> None:
    claims = applicant(n=1)
    claims.hear(A, Claim(0, held=True), Stamp(7, 900), 0.0)
    claims.hear(A, Claim(0, held=True), Stamp(8, 0), 60.0)
    assert not claims.tick(VOID_AFTER)
    assert claims.hopeless(VOID_AFTER)
    claims.hear(A, Claim(0, held=True), Stamp(7, 901), 120.0)
    assert claims.tick(60.0 + VOID_AFTER)
    assert claims.claim == Claim(0)


def test_it_is_hopeless_once_all_others_are_seen_to_live() -> None:
    claims = applicant(n=2)
    claims.hear(A, Claim(0, held=True), Stamp(1, 1), 0.0)
    claims.hear(C, Claim(1, held=True), Stamp(1, 1), 0.0)
    claims.hear(A, Claim(0, held=True), Stamp(1, 2), 20.0)
    assert not claims.hopeless(20.0)
    claims.hear(C, Claim(1, held=True), Stamp(1, 2), 21.0)
    assert claims.hopeless(21.0)
    claims.forget(C)
    assert not claims.hopeless(22.0)
    assert claims.tick(22.0)
    assert claims.claim == Claim(1)


def test_what_was_not_seen_is_waited_for_again() -> None:
    claims = applicant()
    claims.tick(SETTLE)
    claims.lost_sight(1.9 * SETTLE)
    assert not claims.tick(2.5 * SETTLE)
    assert claims.tick(2.9 * SETTLE)
    assert claims.held == 0


def test_nobody_is_heard_of_itself_and_invented_peers_are_forgotten() -> None:
    claims = applicant(n=2)
    claims.hear(B, Claim(0, held=True), Stamp(1, 1), 0.0)
    assert claims.holder(0, 0.0) is None
    for number in range(100):
        claims.hear(f"{number:032x}", Claim(number % 2), Stamp(1, 1), 0.0)
    assert len(claims._rivals) == 8


def test_one_that_holds_an_index_from_before_keeps_it() -> None:
    claims = applicant(wanted=1, settled=True)
    claims.hear(A, Claim(1, held=True), Stamp(1, 1), 0.0)
    assert not claims.tick(100.0)
    assert claims.held == 1


def play(n: int, starts: list[float], seed: int, slowest: float) -> list[Claims]:
    """Let peers start behind a broker that delivers every message to each of them within `slowest`
    seconds, until nothing happens any more."""
    rng = np.random.default_rng(seed)
    ids = [rng.bytes(16).hex() for _ in starts]
    wishes = [None if rng.random() < 0.5 else int(rng.integers(n)) for _ in starts]
    peers = [
        Claims(own, n=n, wanted=wanted, now=start)
        for own, wanted, start in zip(ids, wishes, starts, strict=True)
    ]
    events: list[tuple[float, int, int, int, Claim, Stamp]] = []
    register: dict[int, tuple[Claim, Stamp]] = {}
    stamps = 0

    def write(writer: int, now: float) -> None:
        nonlocal stamps
        stamps += 1
        register[writer] = peers[writer].claim, Stamp(1, stamps)
        for reader in range(len(starts)):
            if starts[reader] <= now:
                send(writer, reader, now)

    def send(writer: int, reader: int, now: float) -> None:
        claim, stamp = register[writer]
        when = now + float(rng.uniform(0, slowest))
        heapq.heappush(events, (when, len(events) + stamps, writer, reader, claim, stamp))

    now = 0.0
    while now < max(starts) + 20 * SETTLE:
        for number, start in enumerate(starts):
            if start <= now and number not in register:
                for writer in list(register):
                    send(writer, number, now)
                write(number, now)
        while events and events[0][0] <= now:
            _, _, writer, reader, claim, stamp = heapq.heappop(events)
            peers[reader].hear(ids[writer], claim, stamp, now)
        for number in register:
            if peers[number].tick(now):
                write(number, now)
        now += STEP
    return peers


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 12).flatmap(
        lambda n: st.tuples(
            st.just(n), st.lists(st.floats(0, 8), min_size=1, max_size=n).map(sorted)
        )
    ),
    st.integers(0, 2**32),
)
def test_no_two_hold_one_index_and_all_get_one(
    federation: tuple[int, list[float]], seed: int
) -> None:
    n, starts = federation
    # Half of SETTLE, less the step of this clock at either end.
    peers = play(n, starts, seed, slowest=SETTLE / 2 - 2 * STEP)
    held = [peer.held for peer in peers]
    assert None not in held
    assert len(set(held)) == len(held)


def test_twenty_that_start_at_once_all_get_one() -> None:
    peers = play(20, [0.0] * 20, 1, slowest=SETTLE / 4)
    assert sorted(peer.held for peer in peers if peer.held is not None) == list(range(20))
