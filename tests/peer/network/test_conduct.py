"""Whose offences are held against whom: never one peer's against another."""

from __future__ import annotations

from typing import cast

import pytest

from peer.network.conduct import Conduct
from peer.network.messages import PeerRecord
from peer.network.score import HALF_LIFE, Offence
from peer.network.traffic import Fault
from peer.network.transport import Transport

LIMIT = 100.0
PEER = PeerRecord(
    peer="1" * 32,
    index=1,
    control="tcp://127.0.0.1:7001",
    data="tcp://127.0.0.1:7002",
    incarnation=1,
    first_round=1,
    model="a" * 32,
)
ELSEWHERE = [
    PEER.model_copy(update={"data": "tcp://127.0.0.1:9"}),
    PEER.model_copy(update={"control": "tcp://127.0.0.1:9"}),
]
OTHER = PEER.model_copy(update={"peer": "2" * 32})


class Stub:
    """A transport that only counts."""

    def __init__(self, *, proves_senders: bool) -> None:
        self.proves_senders = proves_senders
        self.blamed: list[Fault] = []

    def blame(self, fault: Fault, culprit: object, detail: str) -> None:
        self.blamed.append(fault)

    def judge(self, sender: str, detail: str) -> None:
        raise AssertionError


def conduct(stub: Stub, now: list[float]) -> Conduct:
    return Conduct(cast(Transport, stub), LIMIT, lambda: now[0])


@pytest.mark.parametrize("proves_senders", [False, True])
def test_offences_are_held_against_whom_they_surely_are(proves_senders: bool) -> None:
    stub, now = Stub(proves_senders=proves_senders), [0.0]
    judged = conduct(stub, now)
    judged.misbehaved(PEER, "odd")
    for _ in range(3):
        judged.misbehaved(PEER, "a norm above the limit", Offence.MALFORMED)
    assert not judged.left_out(PEER)
    judged.misbehaved(PEER, "beyond the last round", Offence.LIED)
    assert judged.left_out(PEER)
    assert stub.blamed == [Fault.CONTENT] * 5 + [Fault.LEFT_OUT]
    # Without keys another may have said that it is this peer, elsewhere.
    assert [judged.left_out(record) for record in ELSEWHERE] == [proves_senders] * 2
    assert not judged.left_out(OTHER)
    now[0] = 3 * HALF_LIFE
    assert not judged.left_out(PEER)


def test_what_its_transport_saw_is_held_against_the_proved_sender() -> None:
    stub = Stub(proves_senders=True)
    judged = conduct(stub, [0.0])
    for _ in range(4):
        stub.judge(PEER.peer, "not one frame")
    assert judged.left_out(PEER)
    assert not judged.left_out(OTHER)
    assert stub.blamed == [Fault.LEFT_OUT]
