"""The bootstrap node over real sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from bootstrap import server as module
from bootstrap.server import BootstrapNode
from bootstrap.view import _render
from peer.errors import RefusedError, StateError, UserError
from peer.network.messages import (
    Announce,
    Done,
    Enrol,
    Enrolled,
    Known,
    Leave,
    Members,
    PeerRecord,
    Ping,
    Pong,
    Probe,
    Reason,
    Reply,
    Request,
    State,
    Status,
    Update,
)
from peer.network.traffic import Traffic
from peer.network.transport import Buffer, Transport
from peer.plan import Plan

PLAN = Plan(n=3, rounds=4)


class Asker:
    """A peer that asks a bootstrap node and does nothing else."""

    def __init__(self, transport: Transport, node: BootstrapNode, number: int) -> None:
        self.transport = transport
        self.node = node
        self.peer = f"{number:032x}"
        self.index = 0
        transport.introduce(sender=self.peer, plan=PLAN.digest)

    async def ask(self, request: Request) -> Reply:
        reply, _ = await self.transport.request(self.node.address, request, timeout=5)
        return reply

    async def refusal(self, request: Request) -> str:
        with pytest.raises(RefusedError) as error:
            await self.ask(request)
        return error.value.reason

    async def enrol(self) -> int:
        reply = await self.ask(Enrol())
        assert isinstance(reply, Enrolled)
        assert Plan.from_toml(reply.toml) == PLAN
        self.index = reply.index
        return reply.index

    def update(self, *, finished: int = 0, done: bool = False, model: str = "e" * 32) -> Update:
        record = PeerRecord(
            peer=self.peer,
            index=self.index,
            control=self.transport.control,
            data=self.transport.data,
            incarnation=1,
            first_round=1,
            model=model,
        )
        return Update(record=record, state=State.ALIVE, status=Status(finished=finished, done=done))

    async def announce(self, *, finished: int = 0, done: bool = False) -> list[int]:
        known = await self.ask(Announce(update=self.update(finished=finished, done=done)))
        assert isinstance(known, Known)
        return [other.record.index for other in known.updates]


@asynccontextmanager
async def asker(node: BootstrapNode, number: int) -> AsyncIterator[Asker]:
    async def refuse(request: Request) -> tuple[Reply, Sequence[Buffer]]:
        raise RefusedError(Reason.BAD_REQUEST)

    async with Transport(listen="127.0.0.1:0", handler=refuse, traffic=Traffic()) as transport:
        yield Asker(transport, node, number)


@pytest.fixture
async def node() -> AsyncIterator[BootstrapNode]:
    async with BootstrapNode(PLAN, listen="127.0.0.1:0") as made:
        yield made


async def test_those_who_announce_themselves_hear_of_each_other(node: BootstrapNode) -> None:
    async with asker(node, 1) as a, asker(node, 2) as b:
        assert (await a.enrol(), await b.enrol()) == (0, 1)
        assert await a.announce() == []
        assert await b.announce() == [0]
        assert await a.announce() == [1]
        known = await b.ask(Members())
        assert isinstance(known, Known)
        assert known.updates == (a.update(),)
        assert isinstance(await a.ask(Ping(updates=())), Pong)


async def test_who_leaves_or_is_lost_is_not_named(
    node: BootstrapNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "LOST_AFTER", 0.3)
    monkeypatch.setattr(module, "SWEEP", 0.05)
    serving = asyncio.create_task(node.serve())
    async with asker(node, 1) as a, asker(node, 2) as b, asker(node, 3) as c:
        for each in (a, b, c):
            await each.enrol()
            await each.announce()
        assert isinstance(await b.ask(Leave(update=b.update())), Done)
        assert await a.announce() == [2]
        await asyncio.sleep(0.5)
        assert await a.announce() == []
        assert await b.announce() == [0]
        assert [guest.update.state for _, guest in sorted(node.guests.items())] == [
            State.ALIVE,
            State.ALIVE,
            State.DEAD,
        ]
    serving.cancel()
    for line in ("peer 0 joined", "peer 1 left", "peer 2 lost", "peer 1 returned"):
        assert caplog.text.count(line) == 1


async def test_refusals(node: BootstrapNode) -> None:
    async with asker(node, 1) as a, asker(node, 2) as b:
        await a.enrol()
        await a.announce()
        assert await b.refusal(Announce(update=a.update())) == Reason.BAD_REQUEST
        assert await b.refusal(Leave(update=a.update())) == Reason.BAD_REQUEST
        assert await b.refusal(Announce(update=b.update())) == Reason.INDEX_CLASH
        b.index = 1
        odd = b.update(model="f" * 32)
        assert await b.refusal(Announce(update=odd)) == Reason.MODEL_MISMATCH
        beyond = b.update(finished=PLAN.rounds + 1)
        assert await b.refusal(Announce(update=beyond)) == Reason.BAD_REQUEST
        assert await b.refusal(Probe(round=1, staleness=0, wait=0)) == Reason.BAD_REQUEST
        b.transport.introduce(sender=b.peer, plan="0" * 32)
        assert await b.refusal(Announce(update=b.update())) == Reason.PLAN_MISMATCH
        b.transport.introduce(sender="", plan="")
        assert await b.refusal(Enrol()) == Reason.BAD_REQUEST
        assert list(node.guests) == [0]


async def test_killed_and_started_again_it_keeps_indices(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with (
        BootstrapNode(PLAN, listen="127.0.0.1:0", state=state) as first,
        asker(first, 1) as a,
        asker(first, 2) as b,
    ):
        assert [await a.enrol(), await b.enrol()] == [0, 1]
    async with (
        BootstrapNode(PLAN, listen="127.0.0.1:0", state=state) as second,
        asker(second, 2) as b,
        asker(second, 3) as c,
    ):
        assert [await c.enrol(), await b.enrol()] == [2, 1]
    with pytest.raises(StateError, match="another plan"):
        async with BootstrapNode(Plan(n=4), listen="127.0.0.1:0", state=state):
            pass


async def test_without_its_state_it_takes_in_who_is_there(node: BootstrapNode) -> None:
    async with asker(node, 1) as a, asker(node, 2) as b:
        a.index = 2
        assert await a.announce() == []
        assert await b.enrol() == 0


async def test_promise_that_cannot_be_saved_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    async with (
        BootstrapNode(PLAN, listen="127.0.0.1:0", state=tmp_path) as node,
        asker(node, 1) as a,
    ):
        with monkeypatch.context() as patch:
            patch.setattr("peer.sealed.write_atomically", full)
            assert await a.refusal(Enrol()) == Reason.BUSY
        assert await a.enrol() == 0


async def test_state_that_cannot_be_written_is_a_persons_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot use the state directory"):
        async with BootstrapNode(PLAN, listen="127.0.0.1:0", state=tmp_path / "file" / "state"):
            pass


async def test_a_state_directory_is_one_nodes_at_a_time(tmp_path: Path) -> None:
    async with BootstrapNode(PLAN, listen="127.0.0.1:0", state=tmp_path):
        with pytest.raises(StateError, match="in use by another"):
            async with BootstrapNode(PLAN, listen="127.0.0.1:0", state=tmp_path):
                pass
    async with BootstrapNode(PLAN, listen="127.0.0.1:0", state=tmp_path) as node:
        # One that cannot listen lets go of its directory, too.
        other = tmp_path / "other"
        for _ in range(2):
            with pytest.raises(UserError, match="cannot listen"):
                async with BootstrapNode(
                    PLAN, listen=node.address.removeprefix("tcp://"), state=other
                ):
                    pass


async def test_one_that_comes_and_goes_without_end_does_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, node: BootstrapNode
) -> None:
    monkeypatch.setattr(module, "MAX_TOLD", 5)
    caplog.set_level(logging.INFO, "bootstrap.server")
    async with asker(node, 1) as a, asker(node, 2) as b:
        await a.enrol()
        for _ in range(10):
            await a.announce()
            await a.ask(Leave(update=a.update()))
        await b.enrol()
        await b.announce()
    lines = [line for line in caplog.messages if line.startswith("peer 0")]
    assert len(lines) == 5
    assert "last line" in lines[-1]
    assert any(line.startswith("peer 1 joined") for line in caplog.messages)


async def test_ends_when_all_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SWEEP", 0.05)
    async with BootstrapNode(PLAN, listen="127.0.0.1:0", exit_when_done=True) as node:
        serving = asyncio.create_task(node.serve())
        async with asker(node, 1) as a, asker(node, 2) as b, asker(node, 3) as c:
            for each in (a, b, c):
                await each.enrol()
                await each.announce(finished=4, done=each is not c)
            await a.ask(Leave(update=a.update(finished=4, done=True)))
            await asyncio.sleep(0.2)
            assert not serving.done()
            await c.announce(finished=4, done=True)
            await asyncio.wait_for(serving, 2)


async def test_all_are_named_in_turn_where_they_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, node: BootstrapNode
) -> None:
    monkeypatch.setattr(module, "fitting", lambda updates: tuple(updates)[:1])
    async with asker(node, 1) as a, asker(node, 2) as b, asker(node, 3) as c:
        for each in (a, b, c):
            await each.enrol()
            await each.announce()
        named = {(await a.announce())[0] for _ in range(4)}
        assert named == {1, 2}


async def test_table(node: BootstrapNode) -> None:
    async with asker(node, 1) as a:
        await a.enrol()
        await a.announce(finished=2)
        console = Console(file=StringIO(), width=100)
        console.print(_render(node))
        assert isinstance(console.file, StringIO)
        text = console.file.getvalue()
        assert "1 of 3 present" in text
        assert "2/4" in text
        assert a.transport.control.removeprefix("tcp://") in text
