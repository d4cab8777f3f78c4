"""The membership state machine, driven by a clock that the tests turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from peer.network.membership import (
    FORGET_AFTER,
    LEAP,
    MAX_INCARNATION,
    RETRANSMISSIONS,
    Change,
    Membership,
)
from peer.network.messages import PeerRecord, Reason, State, Status, Update
from peer.plan import NetworkPlan

NETWORK = NetworkPlan(probe_interval=1.0, probe_timeout=0.5, suspicion=4.0)
TICK = 0.2


def record(index: int, *, peer: int | None = None, incarnation: int = 1) -> PeerRecord:
    return PeerRecord(
        peer=f"{index if peer is None else peer:032x}",
        index=index,
        control=f"tcp://127.0.0.1:{7000 + index}",
        data=f"tcp://127.0.0.1:{8000 + index}",
        incarnation=incarnation,
        first_round=1,
        model="a" * 32,
    )


def update(
    index: int,
    state: State = State.ALIVE,
    *,
    peer: int | None = None,
    incarnation: int = 1,
    status: Status | None = None,
) -> Update:
    return Update(
        record=record(index, peer=peer, incarnation=incarnation),
        state=state,
        status=status or Status(),
    )


def membership(index: int = 0, n: int = 10, others: Sequence[int] = ()) -> Membership:
    view = Membership(
        record(index), settings=NETWORK, n=n, rounds=9, rng=np.random.default_rng(index), now=0.0
    )
    view.hear([update(other) for other in others], 0.0)
    view.drain_events()
    return view


def told(view: Membership, word: Update, now: float = 0.0) -> None:
    """Let a peer answer for itself, where it is."""
    view.confirm(word, word.record.control, now)


def changes(view: Membership) -> list[tuple[Change, int]]:
    return [(event.change, event.record.index) for event in view.drain_events()]


def ticks(view: Membership, start: float, end: float) -> list[tuple[float, int]]:
    """Tick from `start` to `end`; return when whom was to be pinged, all answering."""
    pinged = []
    for step in range(round((end - start) / TICK) + 1):
        now = start + step * TICK
        for target in view.tick(now):
            pinged.append((round(now, 6), target.index))
            view.ping_ok(target.peer)
    return pinged


def test_a_peer_hears_of_those_alone_that_it_can_reach() -> None:
    view = Membership(
        record(0),
        settings=NETWORK,
        n=10,
        rounds=9,
        rng=np.random.default_rng(0),
        now=0.0,
        reach=frozenset({1, 3}),
    )
    told(view, update(1))
    told(view, update(2))
    assert view.hear([update(4, incarnation=MAX_INCARNATION + 1)], 0.0) == []
    told(view, update(3))
    assert view.known(1) == [1, 3]
    assert view.member(2) is None
    told(view, update(0, State.DEAD))
    assert view.own.record.incarnation == 2


def test_joined_peers_are_known_by_index() -> None:
    view = membership()
    late = update(3)
    late = late.model_copy(update={"record": late.record.model_copy(update={"first_round": 7})})
    view.hear([update(5), update(2), late], 0.0)
    assert changes(view) == [(Change.JOINED, 5), (Change.JOINED, 2), (Change.JOINED, 3)]
    assert (view.known(1), view.known(6), view.known(7)) == ([2, 5], [2, 5], [2, 3, 5])
    assert [member.record.index for member in view.members()] == [2, 3, 5]
    assert view.member(4) is None
    assert view.member(3) == late


@pytest.mark.parametrize(
    ("old", "new", "believed"),
    [
        ((1, State.ALIVE), (1, State.SUSPECT), State.SUSPECT),
        ((1, State.SUSPECT), (1, State.ALIVE), State.SUSPECT),
        ((1, State.SUSPECT), (2, State.ALIVE), State.ALIVE),
        ((1, State.SUSPECT), (1, State.DEAD), State.SUSPECT),
        ((1, State.ALIVE), (1, State.DEAD), State.SUSPECT),
        ((1, State.DEAD), (1, State.ALIVE), State.DEAD),
        ((1, State.DEAD), (1, State.SUSPECT), State.DEAD),
        ((1, State.DEAD), (2, State.ALIVE), State.ALIVE),
        ((1, State.ALIVE), (1, State.LEFT), State.ALIVE),
        ((1, State.LEFT), (1, State.DEAD), State.LEFT),
        ((1, State.LEFT), (2, State.ALIVE), State.ALIVE),
        ((2, State.ALIVE), (1, State.LEFT), State.ALIVE),
        ((2, State.ALIVE), (1, State.DEAD), State.ALIVE),
    ],
)
def test_precedence(old: tuple[int, State], new: tuple[int, State], believed: State) -> None:
    view = membership()
    view.hear([update(1, old[1], incarnation=old[0])], 0.0)
    view.hear([update(1, new[1], incarnation=new[0])], 0.0)
    member = view.member(1)
    assert member is not None
    assert member.state is believed
    assert member.record.incarnation == max(old[0], new[0])


def test_suspicion_ends_in_death_unless_refuted() -> None:
    view = membership(n=100, others=[1, 2])
    assert view.suspicion == 8.0  # 4 s times log10(100)
    ticks(view, 0.0, 1.0)
    view.hear([update(1, State.SUSPECT), update(2, State.SUSPECT)], 1.0)
    ticks(view, 1.2, 5.0)
    view.hear([update(2, incarnation=2)], 5.0)
    ticks(view, 5.2, 8.8)
    assert view.known(1) == [1, 2]
    ticks(view, 9.0, 9.0)
    assert view.known(1) == [2]
    assert changes(view) == [
        (Change.SUSPECTED, 1),
        (Change.SUSPECTED, 2),
        (Change.REFUTED, 2),
        (Change.DEAD, 1),
    ]


def test_suspicion_of_a_small_federation_is_not_scaled() -> None:
    assert membership(n=3).suspicion == 4.0


def test_every_peer_is_probed_once_a_round() -> None:
    view = membership(others=[1, 2, 3, 4])
    pinged = ticks(view, 0.0, 7.8)
    assert [when for when, _ in pinged] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    first, second = [index for _, index in pinged[:4]], [index for _, index in pinged[4:]]
    assert sorted(first) == sorted(second) == [1, 2, 3, 4]


def test_nobody_to_probe() -> None:
    assert ticks(membership(), 0.0, 3.0) == []


def test_failed_probe_goes_through_helpers_to_suspicion() -> None:
    view = membership(others=[1, 2, 3, 4, 5])
    (target,) = view.tick(0.0)
    helpers = view.ping_failed(target.peer, 0.2)
    assert len({helper.index for helper in helpers} - {target.index}) == 3
    assert changes(view) == []
    view.tick(0.2)
    view.helpers_failed(target.peer, 0.4, answered=True)
    assert changes(view) == [(Change.SUSPECTED, target.index)]
    assert view.probe_timeout == 0.5
    assert target.index in view.known(1)


def test_helper_that_hears_the_target_clears_it() -> None:
    view = membership(others=[1, 2])
    (target,) = view.tick(0.0)
    assert len(view.ping_failed(target.peer, 0.2)) == 1
    view.ping_ok(target.peer)
    assert changes(view) == []


def test_without_helpers_suspicion_is_at_once() -> None:
    view = membership(others=[1])
    (target,) = view.tick(0.0)
    assert view.ping_failed(target.peer, 0.2) == []
    assert changes(view) == [(Change.SUSPECTED, 1)]


def test_silent_helpers_make_a_peer_doubt_itself() -> None:
    view = membership(others=[1, 2, 3])
    (target,) = view.tick(0.0)
    view.ping_failed(target.peer, 0.2)
    view.helpers_failed(target.peer, 0.2, answered=False)
    assert view.probe_timeout == 1.0
    (second,) = [t for step in range(1, 6) for t in view.tick(step * TICK)]
    # The second probe, made at 1.0, is followed by the next only after 2 s.
    view.ping_failed(second.peer, 1.0)
    view.helpers_failed(second.peer, 1.0, answered=False)
    assert view.probe_timeout == 1.5
    assert [round(step * TICK, 6) for step in range(6, 18) if view.tick(step * TICK)] == [3.0]
    for peer in (1, 2, 3):
        view.ping_ok(f"{peer:032x}")
    assert view.probe_timeout == 0.5


def test_unreachable_is_probed_next_but_not_judged() -> None:
    view = membership(others=[1, 2, 3])
    ticks(view, 0.0, 0.0)
    view.unreachable(2)
    view.unreachable(9)
    assert [target.index for target in view.tick(TICK)] == [2]
    assert changes(view) == []
    view.unreachable(2)
    assert view.tick(2 * TICK) == []  # its probe is still under way


def test_blocked_peer_blames_nobody() -> None:
    view = membership(others=[1, 2, 3])
    (target,) = view.tick(0.0)
    # The loop stood still for ten seconds: the ping's time-out fires before the next tick.
    assert view.ping_failed(target.peer, 10.0) == []
    assert changes(view) == []
    assert view.probe_timeout == 1.0
    again = view.tick(10.0)
    assert target in again


def test_blocked_helpers_phase_blames_nobody() -> None:
    view = membership(others=[1, 2, 3])
    (target,) = view.tick(0.0)
    view.ping_failed(target.peer, 0.2)
    view.helpers_failed(target.peer, 10.0, answered=False)
    assert changes(view) == []


def test_blockage_extends_suspicions() -> None:
    view = membership(others=[1, 2])
    ticks(view, 0.0, 1.0)
    view.hear([update(1, State.SUSPECT)], 1.0)
    view.tick(11.0)  # 9.8 s later than it should be
    ticks(view, 11.2, 14.6)
    assert view.known(1) == [1, 2]
    ticks(view, 14.8, 14.8)
    assert view.known(1) == [2]


def test_own_suspicion_is_refuted() -> None:
    view = membership(others=[1])
    view.hear([update(0, State.SUSPECT, incarnation=1)], 0.0)
    assert (view.own.record.incarnation, view.own.state) == (2, State.ALIVE)
    view.hear([update(0, State.DEAD, incarnation=1)], 0.0)
    assert view.own.record.incarnation == 2
    view.hear([update(0, State.DEAD, incarnation=41)], 0.0)
    assert view.own.record.incarnation == 42
    assert changes(view) == [(Change.REFUTED, 0), (Change.REFUTED, 0)]
    assert view.probe_timeout == 1.5


def test_record_of_an_earlier_life_is_outbid() -> None:
    view = membership()
    old = update(0)
    old = old.model_copy(
        update={"record": old.record.model_copy(update={"control": "tcp://127.0.0.1:1"})}
    )
    view.hear([old], 0.0)
    assert view.own.record.incarnation == 2
    assert view.own.record.control == "tcp://127.0.0.1:7000"
    view.hear([view.own], 0.0)
    assert view.own.record.incarnation == 2


def test_incarnation_that_nobody_can_have_reached_is_a_lie() -> None:
    view = membership(others=[1])
    for index, least in ((0, LEAP + 2), (1, LEAP + 2), (2, MAX_INCARNATION + 1)):
        lies = view.hear([update(index, State.LEFT, incarnation=least)], 0.0)
        assert lies == [f"peer {index} is said to be of incarnation {least}"]
    assert view.own.record.incarnation == 1
    assert view.known(1) == [1]
    assert view.member(2) is None
    # The last that is believed can still be refuted.
    assert view.hear([update(0, State.DEAD, incarnation=LEAP + 1)], 0.0) == []
    assert view.own.record.incarnation == LEAP + 2


def test_rounds_beyond_the_plan_are_a_lie() -> None:
    view = membership(others=[1])
    for index, status in ((1, Status(finished=10)), (2, Status(published=10**9))):
        lies = view.hear([update(index, incarnation=2, status=status)], 0.0)
        assert lies == [f"peer {index} is said to be beyond round 9"]
    assert view.known(1) == [1]
    before = view.members()
    own = update(1, status=Status(finished=10))
    assert view.confirm(own, record(1).control, 0.0) == ["peer 1 is said to be beyond round 9"], (
        "not by its own word either: it would be passed on"
    )
    assert view.members() == before


def test_progress_that_others_invent_is_refuted() -> None:
    view = membership(others=[1])
    view.set_status(Status(published=2, finished=1))
    view.hear([update(0, status=Status(published=2, finished=1))], 0.0)
    assert view.own.record.incarnation == 1
    view.hear([update(0, status=Status(published=9, finished=9, done=True))], 0.0)
    assert view.own.record.incarnation == 2
    assert view.own.status.finished == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"control": "tcp://10.0.0.1:1"},
        {"data": "tcp://10.0.0.1:1"},
        {"index": 2},
        {"first_round": 10**9},
    ],
)
def test_rumour_moves_nobody_who_is_present(fields: dict[str, Any]) -> None:
    view = membership(others=[1])
    forged = update(1, incarnation=7)
    forged = forged.model_copy(update={"record": forged.record.model_copy(update=fields)})
    assert view.hear([forged], 0.0) == []
    member = view.member(1)
    assert member is not None
    assert member.record == record(1)
    # It is asked at once, where it was.
    assert [target.index for target in view.tick(TICK)] == [1]
    assert view.confirm(update(1), record(1).control, TICK) == ["what was said of peer 1 is not so"]
    assert view.confirm(update(1), record(1).control, TICK) == []
    view.hear([forged], TICK)
    if "first_round" in fields:
        # What it says there itself is so.
        assert view.confirm(forged, record(1).control, TICK) == []
        assert view.known(1) == []
    else:
        # Whoever does not answer there any more may be elsewhere.
        view.hear([update(1, State.SUSPECT)], TICK)
        ticks(view, 2 * TICK, 5.0)
        view.hear([forged], 5.0)
        assert view.members() == [forged]


def test_peer_is_where_rumour_has_it_once_its_old_place_is_deserted() -> None:
    view = membership(others=[1])
    view.vacated(record(1).peer, 0.0)  # nobody says where it went
    assert view.members() == [update(1)]
    moved = record(1, incarnation=2).model_copy(update={"control": "tcp://10.0.0.1:1"})
    view.hear([update(1).model_copy(update={"record": moved})], 0.0)
    assert view.rumoured_elsewhere(record(1).peer)
    assert view.members() == [update(1)]
    view.vacated(record(1).peer, 0.0)
    member = view.member(1)
    assert member is not None
    assert (member.record, member.state) == (moved, State.ALIVE)
    assert changes(view) == [(Change.MOVED, 1)]
    assert not view.rumoured_elsewhere(record(1).peer)


def test_a_peer_that_began_a_new_life_is_known_by_its_own_word() -> None:
    view = membership(others=[1])
    told(view, update(1, status=Status(published=5, finished=4)))
    assert changes(view) == []
    again = update(1, incarnation=2, status=Status(finished=4))
    view.hear([again], 0.0)
    assert changes(view) == []  # it may be a lie: the peer is asked
    assert [target.index for target in view.tick(0.1)] == [1]
    told(view, again)
    assert changes(view) == [(Change.RESTARTED, 1)]
    told(view, again)
    # Raising the incarnation to refute something is no new life.
    told(view, update(1, incarnation=3, status=Status(published=6, finished=5)))
    assert changes(view) == []


@pytest.mark.parametrize("state", [State.SUSPECT, State.DEAD, State.LEFT])
def test_answer_of_a_peer_outweighs_every_rumour_of_it(state: State) -> None:
    view = membership(others=[1])
    address = record(1).control
    view.hear([update(1, State.SUSPECT, incarnation=9), update(1, state, incarnation=9)], 0.0)
    member = view.member(1)
    assert member is not None
    assert member.state is State.SUSPECT
    assert view.confirm(update(1, incarnation=2), address, 0.0) == [
        "what was said of peer 1 is not so"
    ]
    member = view.member(1)
    assert member is not None
    assert (member.state, member.record.incarnation) == (State.ALIVE, 2)
    # At an address where it was not believed to be its word is a rumour.
    moved = update(1, incarnation=3)
    elsewhere = "tcp://10.0.0.1:1"
    moved = moved.model_copy(
        update={"record": moved.record.model_copy(update={"control": elsewhere})}
    )
    view.confirm(moved, elsewhere, 0.0)
    assert view.members() == [member]
    view.confirm(update(1, State.LEFT, incarnation=4), address, 0.0)
    assert view.known(1) == []


def test_peer_that_says_another_model_of_itself_is_not_believed() -> None:
    view = membership(others=[1])
    other = update(1, incarnation=2)
    other = other.model_copy(update={"record": other.record.model_copy(update={"model": "b" * 32})})
    lies = view.confirm(other, record(1).control, 0.0)
    assert lies == ["peer 1 says of itself: model-mismatch"]
    member = view.member(1)
    assert member is not None
    assert member.record == record(1)


def test_status_moves_on_within_an_incarnation_only() -> None:
    view = membership(others=[1])

    def heard(incarnation: int, finished: int) -> int:
        status = Status(finished=finished)
        view.hear([update(1, incarnation=incarnation, status=status)], 0.0)
        member = view.member(1)
        assert member is not None
        return member.status.finished

    assert [heard(1, 5), heard(1, 3), heard(1, 6)] == [5, 5, 6]
    assert [heard(2, 4), heard(1, 9), heard(2, 5)] == [4, 4, 5]
    version = view.version
    view.note_status(1, Status(finished=2))
    assert view.version == version
    view.note_status(1, Status(finished=8))
    assert view.version > version


def test_status_survives_a_suspicion_that_knows_less() -> None:
    view = membership()
    view.hear([update(1, status=Status(finished=5))], 0.0)
    view.hear([update(1, State.SUSPECT, status=Status(finished=2))], 0.0)
    member = view.member(1)
    assert member is not None
    assert (member.state, member.status.finished) == (State.SUSPECT, 5)


def test_index_of_the_living_is_not_given_away() -> None:
    view = membership(others=[1])
    rival = update(1, peer=77)
    assert view.objection(rival.record) is Reason.INDEX_CLASH
    assert view.hear([rival], 0.0) == [f"peer 1 is said to be {77:032x}: index-clash"]
    member = view.member(1)
    assert member is not None
    assert member.record == record(1)
    assert view.objection(record(0, peer=77)) is Reason.INDEX_CLASH
    assert view.objection(record(10)) is Reason.INDEX_CLASH


def test_index_of_the_dead_is() -> None:
    view = membership(others=[1])
    told(view, update(1, State.LEFT))
    view.hear([update(1, peer=77)], 0.0)
    assert changes(view) == [(Change.LEFT, 1), (Change.JOINED, 1)]
    # Old gossip about the first holder does not bring it back, not even when the second is gone.
    assert len(view.hear([update(1)], 0.0)) == 1
    told(view, update(1, State.LEFT, peer=77))
    view.hear([update(1)], 0.0)
    assert view.known(1) == []
    view.hear([update(1, incarnation=2)], 0.0)
    assert view.known(1) == [1]


def test_peer_under_a_new_index_is_not_there_twice() -> None:
    view = membership(others=[1])
    view.hear([update(2, peer=1, incarnation=1)], 0.0)
    assert view.known(1) == [1]
    moved = update(2, peer=1, incarnation=2)
    view.confirm(moved, record(1).control, 0.0)
    assert view.known(1) == [2]


def test_other_model_never_joins() -> None:
    view = membership()
    stranger = update(1)
    stranger = stranger.model_copy(
        update={"record": stranger.record.model_copy(update={"model": "b" * 32})}
    )
    assert view.objection(stranger.record) is Reason.MODEL_MISMATCH
    assert view.hear([stranger], 0.0) == [f"peer 1 is said to be {1:032x}: model-mismatch"]
    assert view.known(1) == []


def test_gossip_is_own_first_then_least_sent_and_ends() -> None:
    view = membership(others=[1, 2, 3])
    first = [u.record.index for u in view.gossip(3)]
    second = [u.record.index for u in view.gossip(3)]
    assert first == [0, 1, 2]
    assert second == [0, 3, 1]
    sent = first[1:] + second[1:]
    while len(batch := view.gossip(3)) > 1:
        sent += [u.record.index for u in batch[1:]]
    assert {index: sent.count(index) for index in (1, 2, 3)} == dict.fromkeys(
        (1, 2, 3), RETRANSMISSIONS * math.ceil(math.log2(5))
    )
    view.hear([update(2, State.SUSPECT)], 0.0)
    assert [u.record.index for u in view.gossip(9)] == [0, 2]


def test_gossip_tells_the_receiver_what_is_believed_of_it() -> None:
    view = membership(others=[1, 2])
    while len(view.gossip(9)) > 1:
        pass
    told(view, update(2, State.LEFT))
    while len(view.gossip(9)) > 1:
        pass
    assert view.gossip(9, to=f"{2:032x}")[1] == update(2, State.LEFT)
    assert view.gossip(9, to=f"{1:032x}") == (view.own, update(1))
    everyone = view.everyone(to=f"{2:032x}")
    assert [u.record.index for u in everyone] == [0, 2, 1]
    assert [u.record.index for u in view.everyone()] == [0, 1, 2]


def test_leaving_outweighs_and_is_final() -> None:
    view, other = membership(0), membership(1, others=[0])
    view.leave()
    told(other, view.own)
    assert changes(other) == [(Change.LEFT, 0)]
    view.hear([update(0, State.DEAD, incarnation=9)], 0.0)
    assert view.own.state is State.LEFT


def test_first_round_raises_the_incarnation() -> None:
    view = membership()
    view.set_first_round(7)
    assert (view.own.record.first_round, view.own.record.incarnation) == (7, 2)


def test_dead_are_kept_for_long_and_then_forgotten() -> None:
    view = membership()
    view.hear([update(1, State.DEAD)], 0.0)
    assert changes(view) == []
    view.tick(FORGET_AFTER - 1)
    assert len(view.members()) == 1
    view.tick(FORGET_AFTER)
    assert view.members() == []


class Federation(RuleBasedStateMachine):
    """Five peers that exchange gossip, lose messages, suspect, bury and restart each other.

    Whatever happened, once messages flow again all living peers come to believe in each other, and
    those that left stay gone.
    """

    N = 5

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.views = [membership(index, n=self.N) for index in range(self.N)]
        self.gone: set[int] = set()
        self.stale: list[Update] = []

    peers = st.integers(0, N - 1)

    @rule(a=peers, b=peers, limit=st.integers(1, 6))
    def gossip(self, a: int, b: int, limit: int) -> None:
        if {a, b} & self.gone:
            return
        sent = self.views[a].gossip(limit, to=f"{b:032x}")
        self.stale.extend(sent)
        self.views[b].hear(sent, self.now)

    @rule(a=peers, b=peers, answered=st.booleans())
    def false_suspicion(self, a: int, b: int, answered: bool) -> None:
        if a in self.gone or self.views[a].member(b) is None:
            return
        view, peer = self.views[a], f"{b:032x}"
        view.unreachable(b)
        view.tick(self.now)
        if view.ping_failed(peer, self.now):
            view.helpers_failed(peer, self.now, answered=answered)

    @rule(seconds=st.floats(0.1, 8))
    def time_passes(self, seconds: float) -> None:
        for step in range(1, math.ceil(seconds / TICK) + 1):
            for index, view in enumerate(self.views):
                if index not in self.gone:
                    view.tick(self.now + step * TICK)
        self.now += math.ceil(seconds / TICK) * TICK

    @rule(index=peers)
    def restart(self, index: int) -> None:
        """A peer forgets all, its incarnation included, as after a kill without its state."""
        if index not in self.gone:
            self.views[index] = membership(index, n=self.N)
            self.views[index].tick(self.now)

    @rule(index=peers)
    def leave(self, index: int) -> None:
        if index in self.gone or len(self.gone) >= 2:
            return
        self.views[index].leave()
        self.gone.add(index)
        for other in set(range(self.N)) - self.gone:
            told(self.views[other], self.views[index].own, self.now)

    @rule(index=peers, which=st.integers(0, 1000))
    def old_gossip_arrives_again(self, index: int, which: int) -> None:
        if self.stale and index not in self.gone:
            self.views[index].hear([self.stale[which % len(self.stale)]], self.now)

    @invariant()
    def nobody_holds_itself_for_another(self) -> None:
        for index, view in enumerate(self.views):
            assert index not in view.known(1)
            assert view.known(1) == [record.index for record in view.living()]

    @invariant()
    def the_departed_stay_gone(self) -> None:
        for index in set(range(self.N)) - self.gone:
            for left in self.gone:
                member = self.views[index].member(left)
                held = self.views[left].own.record.incarnation
                if member is not None and member.record.incarnation >= held:
                    assert member.state is not State.ALIVE

    def teardown(self) -> None:
        living = sorted(set(range(self.N)) - self.gone)
        # Two exchanges of all views between all: the first brings accusations, the second refutes.
        for _ in range(3):
            for a in living:
                for b in living:
                    if a != b:
                        self.views[b].hear(self.views[a].everyone(to=f"{b:032x}"), self.now)
                        self.views[a].hear(self.views[b].everyone(to=f"{a:032x}"), self.now)
        for index in living:
            known = set(self.views[index].known(1)) - self.gone
            assert known == set(living) - {index}
            for other in known:
                member = self.views[index].member(other)
                assert member is not None
                assert member.state is State.ALIVE


Federation.TestCase.settings = hypothesis_settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestFederation = Federation.TestCase
