"""What a shelf gives out: exactly round t in lockstep, fresh enough in bounded mode, the newest."""

from __future__ import annotations

import asyncio

import pytest

from peer import exchange as module
from peer.errors import RefusedError
from peer.exchange import Shelf, Snapshot
from peer.network.messages import Reason


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
