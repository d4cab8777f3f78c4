"""Everything one can think of, thrown at the sockets of live peers in the middle of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from evil import Messages, Misdeed, battle, honest

from peer.network.messages import (
    Ping,
    Pong,
    Probe,
    Pull,
    Reason,
    Refused,
    Reply,
    Request,
    encode,
)

Lie = Callable[[Reply, list[bytes]], Messages]


def says(**fields: Any) -> Lie:
    """The honest reply, but for some fields, which may be of any value."""
    return lambda reply, chunks: [[msgpack.packb(reply.model_dump(mode="json") | fields), *chunks]]


def carries(change: Callable[[bytes], list[bytes]]) -> Lie:
    """The honest reply with other chunks."""
    return lambda reply, chunks: [[encode(reply), *change(b"".join(chunks))]]


def value(what: float) -> Lie:
    """The honest reply with one of its values replaced."""
    return carries(lambda payload: [np.float32(what).tobytes() + payload[4:]])


def instead(*frames: bytes) -> Lie:
    return lambda reply, chunks: [frames]


def drift(payload: bytes) -> list[bytes]:
    return [(np.frombuffer(payload, np.float32) + np.float32(0.01)).tobytes()]


USELESS: dict[str, Lie] = {
    "too short": carries(lambda payload: [payload[:-4]]),
    "too long": carries(lambda payload: [payload, bytes(4)]),
    "no payload": carries(lambda payload: []),
    "a split value": carries(lambda payload: [payload[:5], payload[5:]]),
    "many frames": carries(lambda payload: [payload, *[b""] * 20_000]),
    "NaN": value(np.nan),
    "infinity": value(np.inf),
    "a huge norm": value(3e38),
    "an older round": says(round=1),
    "a future round": says(round=10**9),
    "a negative round": says(round=-1),
    "round 2**63": says(round=2**63),
    "a text for a round": says(round="2"),
    "an unknown field": says(more=1),
    "an old protocol": says(v=0),
    "no kind": says(kind=None),
    "a request": lambda reply, chunks: [[encode(Ping(updates=()))]],
    "another kind": lambda reply, chunks: [[encode(Pong(updates=(), id=reply.id))]],
    "random bytes": instead(np.random.default_rng(0).bytes(60_000)),
    "nothing": instead(b""),
    "empty maps": instead(b"\xdd\x00\x00\xff\xf0" + b"\x80" * 0xFFF0),
    "deep nesting": instead(b"\x91" * 60_000 + b"\x01"),
    "codes for a terminal": says(**{"\x1b[2J\n": 1}),
}
HARMLESS: dict[str, Lie] = {
    "twice": lambda reply, chunks: [[encode(reply), *chunks]] * 2,
    "to ids never asked": lambda reply, chunks: [
        *([encode(reply.model_copy(update={"id": 10**9 + i})), *chunks] for i in range(5)),
        [encode(reply), *chunks],
    ],
}
MODELS: dict[str, Lie] = {
    **USELESS,
    **HARMLESS,
    "another size": says(model_bytes=2**40),
    "no samples": says(samples=0),
    "one that contradicts its sketch": carries(drift),
}
SKETCHES: dict[str, Lie] = {**USELESS, **HARMLESS, "another size": says(buckets=17)}


def by_round(lies: list[tuple[type[Request], Lie]]) -> Misdeed:
    """Tell another lie each round from round 2 on, to all who ask."""

    async def misdeed(request: Request, reply: Reply, chunks: list[bytes]) -> Messages:
        if isinstance(request, Probe | Pull) and 2 <= request.round < 2 + len(lies):
            kind, lie = lies[request.round - 2]
            if isinstance(request, kind):
                return lie(reply, chunks)
        return await honest(request, reply, chunks)

    return misdeed


async def test_no_reply_stops_a_peer_or_enters_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies: list[tuple[type[Request], str, Lie]] = [
        *((Pull, name, lie) for name, lie in MODELS.items()),
        *((Probe, name, lie) for name, lie in SKETCHES.items()),
    ]
    misdeed = by_round([(kind, lie) for kind, _, lie in lies])
    async with battle(tmp_path, monkeypatch, [misdeed], rounds=len(lies) + 2) as fight:
        await fight.end()
    for enemy, mine in fight.rows_against(0):
        for number, (kind, name, _) in enumerate(lies):
            metric, choice = mine[number + 1]
            useful = name in HARMLESS
            assert (enemy in choice.neighbours) == useful, (kind, name)
            assert metric.missing == (not useful), (kind, name)
            assert len(choice.neighbours) == 2 + useful, (kind, name)
        assert len(mine[-1][1].neighbours) == 3
    for counted in fight.faults():
        assert counted["content"] >= len(lies) - 2 * len(HARMLESS)
        assert counted["bad-reply"] > len(lies) / 3
        assert counted["late"] >= 1
    complaints = fight.warnings()
    assert len(complaints) == 3
    assert all("content: peer" in line and line.isprintable() for line in complaints)
    fight.check_models()


def stalls(answer: Misdeed) -> Misdeed:
    """Be honest in the first round, and then whenever nobody asks for a model or a sketch."""

    async def misdeed(request: Request, reply: Reply, chunks: list[bytes]) -> Messages:
        if isinstance(request, Probe | Pull) and request.round > 1:
            return await answer(request, reply, chunks)
        return await honest(request, reply, chunks)

    return misdeed


async def silent(request: Request, reply: Reply, chunks: list[bytes]) -> Messages:
    return []


async def busy(request: Request, reply: Reply, chunks: list[bytes]) -> Messages:
    return [[encode(Refused(reason=Reason.BUSY, id=reply.id))]]


async def late(request: Request, reply: Reply, chunks: list[bytes]) -> Messages:
    """Answer just before the request would time out, and say nothing."""
    await asyncio.sleep(0.9 * REQUEST_TIMEOUT)
    return [[encode(Refused(reason=Reason.NOT_YET, id=reply.id))]]


async def drip(said: asyncio.StreamReader, told: asyncio.StreamWriter) -> None:
    """Pass on 1 kB at once, enough for the handshake, and then as much a second."""
    while data := await said.read(1000):
        told.write(data)
        await told.drain()
        if len(data) == 1000:
            await asyncio.sleep(1.0)


async def cut(said: asyncio.StreamReader, told: asyncio.StreamWriter) -> None:
    """Break off in the middle of the first model."""
    told.write(await said.readexactly(20_000))
    await told.drain()


REQUEST_TIMEOUT = 0.7
ROUND_TIMEOUT = 3.0


async def test_one_that_lives_but_never_delivers_costs_one_round_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = {"request_timeout": REQUEST_TIMEOUT, "round_timeout": ROUND_TIMEOUT}
    misdeeds = [stalls(silent), stalls(busy), stalls(late), honest, honest]
    wires = [None, None, None, drip, cut]
    async with battle(
        tmp_path, monkeypatch, misdeeds, wires=wires, rounds=4, network=network
    ) as fight:
        await fight.end()
    for mine in fight.rows():
        # The wires spoil the first round already.
        assert [metric.missing for metric, _ in mine] == [2, 5, 5, 5]
        seconds = [metric.seconds.round for metric, _ in mine]
        assert max(seconds) < ROUND_TIMEOUT + REQUEST_TIMEOUT + 2
        # From then on each of them is given the time of one answer to a probe and one to a pull.
        assert max(seconds[2:]) < ROUND_TIMEOUT
        print(seconds)
    assert [counted["overdue"] for counted in fight.faults()] == [5] * 3
    complaints = fight.warnings()
    assert len(complaints) == 5 * 3
    assert all("did not deliver in 3 s" in line for line in complaints)
    fight.check_models()
