"""What a shelf gives out: exactly round t in lockstep, fresh enough in bounded mode, the newest.
And what is believed of what others give.
"""

from __future__ import annotations

import asyncio
from typing import cast

import numpy as np
import pytest

from peer import exchange as module
from peer.errors import RefusedError
from peer.exchange import Exchange, Received, Shelf, Snapshot
from peer.matching.base import Evidence
from peer.network.limits import Allowance
from peer.network.messages import (
    Model,
    PeerRecord,
    Reached,
    Reason,
    Reply,
    Sketches,
    State,
    Status,
    Update,
)
from peer.network.score import Offence
from peer.network.swarm import Swarm
from peer.network.transport import Transport
from peer.network.vectors import encode_vector
from peer.plan import Plan
from peer.rounds import confirmed, typical


def snapshot(t: int) -> Snapshot:
    return Snapshot(t=t, model=memoryview(bytes([t])), gradient=memoryview(b""), sketches=None)


async def shelf_with(*rounds: int, history: int = 2) -> Shelf:
    shelf = Shelf(history)
    for t in rounds:
        await shelf.publish(snapshot(t))
    return shelf


@pytest.mark.parametrize(
    ("asked", "staleness", "given"),
    [
        (3, 0, 3),
        (2, 0, 2),
        (2, 1, 3),  # newer than asked for is fresh enough
        (4, 1, 3),
        (5, 2, 3),
        (9, None, 3),
        (1, None, 3),
    ],
)
async def test_a_request_gets_the_snapshot_its_staleness_allows(
    asked: int, staleness: int | None, given: int
) -> None:
    shelf = await shelf_with(1, 2, 3)
    assert (await shelf.get(asked, staleness, wait=0.0)).t == given


@pytest.mark.parametrize(
    ("asked", "staleness", "reason"),
    [
        (1, 0, Reason.GONE),
        (4, 0, Reason.NOT_YET),
        (5, 1, Reason.NOT_YET),
    ],
)
async def test_what_a_shelf_cannot_give_is_refused(
    asked: int, staleness: int | None, reason: Reason
) -> None:
    shelf = await shelf_with(1, 2, 3)
    with pytest.raises(RefusedError) as refusal:
        await shelf.get(asked, staleness, wait=0.01)
    assert refusal.value.reason == reason


@pytest.mark.parametrize("staleness", [0, 2, None])
async def test_an_empty_shelf_has_nothing_yet(staleness: int | None) -> None:
    with pytest.raises(RefusedError) as refusal:
        await Shelf(2).get(1, staleness, wait=0.0)
    assert refusal.value.reason == Reason.NOT_YET


async def test_rounds_before_a_restart_are_gone_not_waited_for() -> None:
    shelf = Shelf(2)
    shelf.first = 8
    with pytest.raises(RefusedError) as refusal:
        await shelf.get(7, 0, wait=60.0)
    assert refusal.value.reason == Reason.GONE


async def test_a_waiting_request_is_answered_when_its_round_is_published() -> None:
    shelf = await shelf_with(1)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(shelf.get(2, 0, wait=30.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        await shelf.publish(snapshot(2))
    assert waiting.result().t == 2


async def test_a_republished_round_replaces_its_snapshot() -> None:
    shelf = await shelf_with(1, 2)
    newer = snapshot(2)
    await shelf.publish(newer)
    assert await shelf.get(2, 0, wait=0.0) is newer
    assert (await shelf.get(1, 0, wait=0.0)).t == 1


async def test_nobody_waits_longer_than_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    shelf = await shelf_with(1)
    async with asyncio.timeout(5):
        with pytest.raises(RefusedError) as refusal:
            await shelf.get(2, 0, wait=60.0)
    assert refusal.value.reason == Reason.NOT_YET


async def test_those_who_come_when_too_many_wait_are_answered_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_WAITERS", 2)
    shelf = await shelf_with(1)
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(shelf.get(2, 0, wait=30.0)) for _ in range(2)]
        await asyncio.sleep(0)
        async with asyncio.timeout(1):
            with pytest.raises(RefusedError) as refusal:
                await shelf.get(2, 0, wait=30.0)
            assert (await shelf.get(1, 0, wait=30.0)).t == 1
        await shelf.publish(snapshot(2))
    assert refusal.value.reason == Reason.NOT_YET
    assert [task.result().t for task in waiting] == [2, 2]


# What is made of the answers of others.

E = 12
ROUNDS = 9
INITIAL = np.linspace(-1, 1, E).astype(np.float32)


class Scripted:
    """A transport that brings what a test put in its place, and a swarm of one peer, which notes
    what that did wrong."""

    def __init__(self) -> None:
        self.answer: tuple[Reply, list[memoryview]]
        self.offences: list[Offence | None] = []
        self.heard: list[Status] = []

    def allow(self, allowance: Allowance) -> None:
        pass

    async def request(self, *_: object, **__: object) -> tuple[Reply, list[memoryview]]:
        return self.answer

    def member(self, _: int) -> Update:
        record = PeerRecord(
            peer="1" * 32,
            index=1,
            control="tcp://127.0.0.1:9",
            data="tcp://127.0.0.1:9",
            incarnation=1,
            first_round=1,
            model="a" * 32,
        )
        return Update(record=record, state=State.ALIVE, status=Status())

    def trusted(self, _: int) -> list[int]:
        return [1]

    def note_status(self, _: int, status: Status) -> None:
        self.heard.append(status)

    def misbehaved(self, _: int, __: str, offence: Offence | None = None) -> None:
        self.offences.append(offence)


def exchange_with(other: Scripted, staleness: int | str) -> Exchange:
    plan = Plan.model_validate(
        {
            "n": 2,
            "rounds": ROUNDS,
            "method": "panm-grad",
            "matching": {"l": 1, "k": 1},
            "network": {"staleness": staleness, "request_timeout": 1.0},
        }
    )
    return Exchange(
        plan=plan,
        transport=cast(Transport, other),
        swarm=cast(Swarm, other),
        shelf=Shelf(2),
        initial=INITIAL,
        trainable=E,
        samples=1,
    )


async def pulled(
    other: Scripted,
    exchange: Exchange,
    *,
    sketched: int,
    sent: int,
    by: float = 0.0,
    newest: bool = False,
) -> Received | None:
    """Probe and pull round 4 of one whose answers claim to be of the rounds `sketched` and `sent`,
    and whose model is off by so much."""
    model = INITIAL + np.float32(0.5)
    taken, _ = exchange.snapshot(4, INITIAL, model, Evidence.GRADIENT)
    assert taken.sketches is not None
    both = [encode_vector(vector, "float32") for vector in taken.sketches]
    other.answer = (Sketches(round=sketched, buckets=len(taken.sketches.g)), both)
    probed = await exchange.probe(1, 4)
    content = encode_vector(model + np.float32(by), "float32")
    other.answer = (Model(round=sent, model_bytes=4 * E, samples=1), [content])
    return await exchange.pull(1, 4, probed=probed, newest=newest)


@pytest.mark.parametrize(
    ("staleness", "sketched", "sent", "by", "offence"),
    [
        (0, 4, 4, 0.0, None),
        (0, 4, 4, 0.1, Offence.FORGED),
        (2, 3, 3, 0.0, None),
        (2, 3, 3, 0.1, Offence.FORGED),
        (2, 3, 2, 0.0, Offence.MALFORMED),
        ("async", 1, 1, 0.1, Offence.FORGED),
        ("async", 7, 7, 0.1, Offence.FORGED),
        ("async", 7, 6, 0.0, Offence.MALFORMED),
        # It may have trained on since it was probed: there is nothing to compare that with.
        (2, 3, 4, 0.1, None),
        ("async", 1, 2, 0.1, None),
        # But not beyond the last round.
        (2, 4, ROUNDS + 1, 0.0, Offence.MALFORMED),
        ("async", 4, ROUNDS + 1, 0.0, Offence.MALFORMED),
        ("async", 4, ROUNDS, 0.0, None),
    ],
)
async def test_a_model_must_agree_with_the_sketch_of_its_round(
    staleness: int | str, sketched: int, sent: int, by: float, offence: Offence | None
) -> None:
    other = Scripted()
    exchange = exchange_with(other, staleness)
    exchange.begin_round()
    received = await pulled(other, exchange, sketched=sketched, sent=sent, by=by)
    assert other.offences == ([] if offence is None else [offence])
    assert (received is None) == (offence is not None)
    if received is not None:
        assert received.round == sent


@pytest.mark.parametrize("staleness", [0, 2, "async"])
async def test_sketches_and_newest_models_are_of_the_plans_rounds(staleness: int | str) -> None:
    other = Scripted()
    exchange = exchange_with(other, staleness)
    exchange.begin_round()
    newest = await pulled(other, exchange, sketched=ROUNDS + 1, sent=ROUNDS, newest=True)
    assert newest is not None
    assert newest.round == ROUNDS
    assert await pulled(other, exchange, sketched=4, sent=ROUNDS + 1, newest=True) is None
    assert other.offences == [Offence.MALFORMED] * 2


async def test_progress_beyond_the_last_round_is_a_lie() -> None:
    other = Scripted()
    exchange = exchange_with(other, 0)
    other.answer = (Reached(status=Status(published=ROUNDS, finished=ROUNDS)), [])
    assert await exchange.progress() == other.heard == [Status(published=ROUNDS, finished=ROUNDS)]
    other.answer = (Reached(status=Status(published=ROUNDS + 1)), [])
    assert await exchange.progress() == []
    assert other.offences == [Offence.MALFORMED]


@pytest.mark.parametrize(
    ("rounds", "front"),
    [([], 0), ([0, 0], 0), ([5], 5), ([3, 9], 3), ([3, 3, 9, 9], 3), ([3, 9, 9], 9), ([0, 4], 4)],
)
def test_half_of_them_send_nobody_ahead(rounds: list[int], front: int) -> None:
    assert typical(rounds) == front
    # One alone is believed only if there is nobody else.
    assert confirmed(rounds) == (0 if sorted(rounds)[:-1] == [0] else front)
