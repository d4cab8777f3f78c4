"""Swarms over real loopback sockets: they meet, notice who is gone, and find each other again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import zmq.asyncio

from bootstrap.server import BootstrapNode
from peer.errors import ProtocolError, RefusedError, UnreachableError, UserError
from peer.network import membership
from peer.network import swarm as module
from peer.network.messages import (
    Await,
    Known,
    Leave,
    Members,
    PeerRecord,
    Ping,
    PingRequest,
    Pong,
    Reason,
    Reply,
    Request,
    State,
    Status,
    Update,
)
from peer.network.swarm import Swarm, enrol
from peer.network.traffic import Traffic
from peer.network.transport import Buffer, Transport
from peer.plan import NetworkPlan, Plan

FAST = NetworkPlan(probe_interval=0.2, probe_timeout=0.15, suspicion=0.8)
UNHURRIED = FAST.model_copy(update={"probe_timeout": 30.0})
"""For tests that ask by themselves, and need the answers however busy the machine is."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten what would only make the tests wait."""
    monkeypatch.setattr(module, "RENDEZVOUS_TIMEOUT", 0.8)
    monkeypatch.setattr(module, "STEADY", 0.5)


def peer_id(index: int) -> str:
    return f"{index + 1:032x}"


@dataclass
class Node:
    """A peer that does nothing but be there."""

    swarm: Swarm
    transport: Transport
    running: asyncio.Task[None]

    def known(self) -> list[int]:
        return self.swarm.known(1)

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.wait([self.running])


class Wire(Transport):
    """A transport that can be cut off from some addresses."""

    cut: frozenset[str] = frozenset()

    async def request(
        self,
        address: str,
        request: Request,
        *,
        timeout: float,  # noqa: ASYNC109
        max_payload: int = 0,
    ) -> tuple[Reply, list[memoryview]]:
        if address in self.cut:
            await asyncio.sleep(timeout)
            raise UnreachableError(f"{address} is cut off")
        return await super().request(address, request, timeout=timeout, max_payload=max_payload)


@asynccontextmanager
async def node(
    index: int,
    *,
    n: int = 20,
    peer: str = "",
    model: str = "a" * 32,
    plan: str = "c" * 32,
    bootstrap: Sequence[str] = (),
    peers: Sequence[str] = (),
    remembered: Sequence[PeerRecord] = (),
    settings: NetworkPlan = FAST,
    context: zmq.asyncio.Context | None = None,
) -> AsyncIterator[Node]:
    swarm: Swarm | None = None

    async def handler(request: Request) -> tuple[Reply, Sequence[Buffer]]:
        if swarm is None:
            raise RefusedError(Reason.NOT_YET)
        return await swarm.handle(request)

    async with Wire(
        listen="127.0.0.1:0", handler=handler, traffic=Traffic(), context=context
    ) as transport:
        own = PeerRecord(
            peer=peer or peer_id(index),
            index=index,
            control=transport.control,
            data=transport.data,
            incarnation=1,
            first_round=1,
            model=model,
        )
        swarm = Swarm(
            transport=transport,
            plan_digest=plan,
            own=own,
            n=n,
            rounds=10,
            settings=settings,
            bootstrap=bootstrap,
            peers=peers,
            remembered=remembered,
            rng=np.random.default_rng(index),
        )
        made = Node(swarm, transport, asyncio.create_task(swarm.run()))
        try:
            yield made
        finally:
            await made.stop()


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    with zmq.asyncio.Context() as shared:
        shared.set(zmq.MAX_SOCKETS, 4096)
        yield shared


async def eventually(reached: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not reached():  # noqa: ASYNC110 - several swarms are waited for at once
            await asyncio.sleep(0.02)


def update_of(made: Node) -> Update:
    return made.swarm.own


async def test_twenty_meet_notice_a_death_and_a_departure(context: zmq.asyncio.Context) -> None:
    plan = Plan(n=20)
    async with (
        BootstrapNode(plan, listen="127.0.0.1:0", context=context) as bootstrap,
        AsyncExitStack() as stack,
    ):
        ends = [await stack.enter_async_context(AsyncExitStack()) for _ in range(20)]
        nodes = [
            await end.enter_async_context(
                node(index, plan=plan.digest, bootstrap=[bootstrap.address], context=context)
            )
            for index, end in enumerate(ends)
        ]
        await eventually(lambda: all(len(made.known()) == 19 for made in nodes), 100)
        assert nodes[3].known() == [index for index in range(20) if index != 3]

        await ends[0].aclose()
        started = time.monotonic()
        await eventually(lambda: all(0 not in made.known() for made in nodes[1:]), 100)
        assert time.monotonic() - started > FAST.suspicion / 2

        await nodes[1].swarm.leave()
        await eventually(lambda: all(1 not in made.known() for made in nodes[2:]), 100)
        member = nodes[2].swarm.member(1)
        assert member is not None
        assert member.state is State.LEFT
        assert all(len(made.known()) == 17 for made in nodes[2:])


async def test_status_reaches_others_and_wakes_those_who_wait() -> None:
    async with node(0) as first, node(1, peers=[first.transport.control]) as second:
        await eventually(lambda: first.known() == [1] and second.known() == [0])
        second.swarm.set_status(Status(published=3, finished=2, accuracy=0.75))

        def finished() -> int:
            member = first.swarm.member(1)
            return -1 if member is None else member.status.finished

        started = time.monotonic()
        while finished() != 2:
            await first.swarm.changed(5)
        assert time.monotonic() - started < 2
        first.swarm.note_status(1, Status(published=5, finished=5))
        assert finished() == 5
        started = time.monotonic()
        await first.swarm.changed(0.2)
        assert time.monotonic() - started >= 0.19


async def test_first_round_reaches_others() -> None:
    async with node(0) as first, node(1, peers=[first.transport.control]) as second:
        await eventually(lambda: first.known() == [1])
        second.swarm.set_first_round(7)
        await eventually(lambda: first.known() == [])
        assert first.swarm.known(7) == [1]


async def test_peers_meet_through_given_and_remembered_ones() -> None:
    async with (
        node(0) as a,
        node(1, peers=[a.transport.control]) as b,
        node(2, remembered=[update_of(b).record]) as c,
    ):
        for made, others in ((a, [1, 2]), (b, [0, 2]), (c, [0, 1])):
            await eventually(lambda made=made, others=others: made.known() == others)  # type: ignore[misc]


async def test_own_address_among_the_given_is_skipped() -> None:
    async with node(0) as a:
        own = a.transport.control.replace("127.0.0.1", "localhost")
        async with node(1, peers=[a.transport.control]) as b:
            a.swarm._given.add(own)
            await eventually(lambda: a.known() == [1] and b.known() == [0])


@pytest.mark.slow
async def test_partition_heals(
    context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even one that lasts for longer than the dead are kept."""
    monkeypatch.setattr(membership, "FORGET_AFTER", 0.2)
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(node(0, context=context))]
        for index in range(1, 8):
            nodes.append(
                await stack.enter_async_context(
                    node(index, peers=[nodes[0].transport.control], context=context)
                )
            )
        await eventually(lambda: all(len(made.known()) == 7 for made in nodes))
        halves = nodes[:4], nodes[4:]
        for here, there in (halves, halves[::-1]):
            for made in here:
                assert isinstance(made.transport, Wire)
                made.transport.cut = frozenset(
                    address
                    for other in there
                    for address in (other.transport.control, other.transport.data)
                )
        await eventually(lambda: all(len(made.swarm.members()) == 3 for made in nodes), 60)
        for made in nodes:
            assert isinstance(made.transport, Wire)
            made.transport.cut = frozenset()
        await eventually(lambda: all(len(made.known()) == 7 for made in nodes), 60)


async def test_restart_at_another_port_is_found(context: zmq.asyncio.Context) -> None:
    """At once: its old address refuses connections, so there is nobody to wait for."""
    plan = Plan(n=3)
    patient = FAST.model_copy(update={"suspicion": 60.0})

    def made(index: int) -> AbstractAsyncContextManager[Node]:
        return node(index, plan=plan.digest, bootstrap=[bootstrap.address], settings=patient)

    async with (
        BootstrapNode(plan, listen="127.0.0.1:0", context=context) as bootstrap,
        made(0) as first,
        made(1) as second,
    ):
        async with made(2):
            await eventually(lambda: first.known() == [1, 2] and second.known() == [0, 2])
        async with made(2) as again:

            def found() -> bool:
                members = (first.swarm.member(2), second.swarm.member(2))
                return all(
                    member is not None
                    and member.state is State.ALIVE
                    and member.record.control == again.transport.control
                    for member in members
                )

            await eventually(found, 15)


async def test_any_of_several_bootstrap_nodes_will_do() -> None:
    """Each knows who is there, so that it gives no index twice; and then neither is needed."""
    plan = Plan(n=3)
    async with AsyncExitStack() as stack:
        async with (
            BootstrapNode(plan, listen="127.0.0.1:0") as one,
            BootstrapNode(plan, listen="127.0.0.1:0") as other,
        ):
            both: dict[str, Any] = {
                "plan": plan.digest,
                "bootstrap": [one.address, other.address],
            }
            a = await stack.enter_async_context(node(0, **both))
            b = await stack.enter_async_context(node(1, **both))
            await eventually(lambda: len(one.guests) == len(other.guests) == 2, 60)
            async with plain() as newcomer:
                enrolled = await enrol(newcomer, [other.address], index=None, peer_id=peer_id(2))
            assert enrolled is not None
            assert enrolled.index == 2
        c = await stack.enter_async_context(node(2, peers=[a.transport.control], **both))
        await eventually(lambda: c.known() == [0, 1] and b.known() == [0, 2], 60)


async def test_two_with_one_id_harm_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """As of a state directory that was copied: whoever was there first stays who it is."""
    async with (
        node(0) as other,
        node(1, peers=[other.transport.control]) as first,
        node(2, peers=[other.transport.control]) as third,
    ):
        witnesses = (other, third)
        await eventually(lambda: all(len(made.known()) == 2 for made in (*witnesses, first)))
        async with node(1, peers=[other.transport.control]) as double:
            await eventually(lambda: double.known() == [0, 2], 60)
            await eventually(
                lambda: caplog.text.count("what was said of peer 1 is not so") >= 2, 60
            )
            # Time for both to insist.
            await asyncio.sleep(2.0)
            for witness in witnesses:
                member = witness.swarm.member(1)
                assert member is not None
                assert member.record.control == first.transport.control
                assert member.record.incarnation < 100
            assert (other.known(), third.known()) == ([1, 2], [0, 1])


async def test_bootstrap_may_go_and_come_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plan = Plan(n=3)
    async with AsyncExitStack() as stack:
        async with BootstrapNode(plan, listen="127.0.0.1:0") as bootstrap:
            address = bootstrap.address
            a = await stack.enter_async_context(node(0, plan=plan.digest, bootstrap=[address]))
            b = await stack.enter_async_context(node(1, plan=plan.digest, bootstrap=[address]))
            await eventually(lambda: a.known() == [1] and b.known() == [0])
        await eventually(lambda: caplog.text.count("bootstrap node") >= 2, 20)
        assert a.known() == [1]
        async with BootstrapNode(plan, listen=address.removeprefix("tcp://")) as again:
            await eventually(lambda: len(again.guests) == 2, 20)
            await eventually(lambda: caplog.text.count("found again") == 2)
        assert caplog.text.count(" lost (") == 2


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"plan": "d" * 32}, "another plan"),
        ({"model": "b" * 32}, "another model"),
    ],
)
async def test_misfit_is_told_and_changes_nothing(changes: dict[str, str], complaint: str) -> None:
    async with node(0) as first, node(1, peers=[first.transport.control]) as second:
        await eventually(lambda: first.known() == [1])
        async with node(2, peers=[first.transport.control], **changes) as odd:  # type: ignore[arg-type]
            with pytest.raises(UserError, match=complaint):
                await asyncio.wait_for(asyncio.shield(odd.running), 5)
        assert first.known() == [1]
        assert not first.running.done()
        assert not second.running.done()


async def test_taken_index_is_told_after_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLASH_PATIENCE", 1.0)
    async with node(0) as first, node(1, peers=[first.transport.control]):
        await eventually(lambda: first.known() == [1])
        async with node(1, peer="f" * 32, peers=[first.transport.control]) as rival:
            with pytest.raises(UserError, match="another peer by this peer's index"):
                await asyncio.wait_for(asyncio.shield(rival.running), 10)


async def test_taken_index_is_told_at_once_by_its_holder() -> None:
    async with (
        node(0) as first,
        node(0, peer="f" * 32, peers=[first.transport.control]) as rival,
    ):
        with pytest.raises(UserError, match="has this peer's index itself"):
            await asyncio.wait_for(asyncio.shield(rival.running), 5)


async def test_index_of_one_that_is_gone_is_taken_over() -> None:
    async with node(0) as first, node(2, peers=[first.transport.control]):
        async with node(1, peers=[first.transport.control]):
            await eventually(lambda: first.known() == [1, 2])
        async with node(1, peer="f" * 32, peers=[first.transport.control]):

            def taken_over() -> bool:
                member = first.swarm.member(1)
                return member is not None and member.record.peer == "f" * 32

            await eventually(taken_over, 15)


async def test_odd_peer_does_not_end_one_that_has_joined() -> None:
    async with node(0) as first, node(1, peers=[first.transport.control]) as second:
        await eventually(lambda: first.known() == [1] and second.known() == [0])

        async def refuse(request: Request) -> tuple[Reply, Sequence[Buffer]]:
            raise RefusedError(Reason.PLAN_MISMATCH)

        async with Transport(listen="127.0.0.1:0", handler=refuse, traffic=Traffic()) as odd:
            first.swarm._given.add(odd.control)
            await first.swarm._exchange_views(odd.control)
            assert not first.running.done()
            assert first.transport.traffic.snapshot()["faults"]["content"] == 1


async def test_odd_one_that_no_person_named_does_not_end_a_peer_that_comes_back() -> None:
    async def refuse(request: Request) -> tuple[Reply, Sequence[Buffer]]:
        raise RefusedError(Reason.PLAN_MISMATCH)

    async with Transport(listen="127.0.0.1:0", handler=refuse, traffic=Traffic()) as odd:
        async with node(1) as once:
            record = update_of(once).record.model_copy(update={"control": odd.control})
        async with node(0, remembered=[record]) as back:
            await eventually(lambda: back.transport.traffic.snapshot()["faults"] == {"content": 1})
            assert not back.running.done()


async def test_departure_is_asked_after() -> None:
    async with (
        node(0) as a,
        node(1, peers=[a.transport.control]) as b,
        node(2, peers=[a.transport.control]) as c,
    ):
        await eventually(lambda: len(a.known()) == 2)
        # In the name of another.
        c.transport.introduce(sender=peer_id(1), plan="c" * 32)
        word = update_of(b).model_copy(update={"state": State.LEFT})
        with pytest.raises(RefusedError, match="it has not left"):
            await c.transport.request(a.transport.control, Leave(update=word), timeout=5)
        assert 1 in a.known()
        await b.swarm.leave()
        assert 1 not in a.known()


async def test_requests_that_lie_are_refused() -> None:
    async with node(0) as first, node(1, peers=[first.transport.control]) as second:
        await eventually(lambda: first.known() == [1])
        ask = second.transport.request

        async def refusal(request: Request) -> str:
            with pytest.raises(RefusedError) as error:
                await ask(first.transport.control, request, timeout=5)
            return error.value.reason

        assert await refusal(Ping(updates=())) == Reason.BAD_REQUEST
        assert await refusal(Ping(updates=(update_of(first),))) == Reason.BAD_REQUEST
        assert await refusal(Leave(update=update_of(first))) == Reason.BAD_REQUEST
        assert await refusal(Await(round=1, wait=0)) == Reason.BAD_REQUEST
        target = "tcp://127.0.0.1:9"
        assert await refusal(PingRequest(target=target)) == Reason.UNREACHABLE
        second.transport.introduce(sender=peer_id(1), plan="")
        assert await refusal(Members()) == Reason.PLAN_MISMATCH


async def test_pings_are_passed_on() -> None:
    async with (
        node(0) as a,
        node(1, peers=[a.transport.control]) as b,
        node(2, peers=[a.transport.control]) as c,
    ):
        await eventually(lambda: len(b.known()) == len(a.known()) == 2)
        request = PingRequest(target=c.transport.control)
        reply, _ = await b.transport.request(a.transport.control, request, timeout=5)
        assert isinstance(reply, Pong)
        assert reply.updates[0].record == update_of(c).record
        # With the direct way cut, helpers keep it alive.
        assert isinstance(b.transport, Wire)
        b.transport.cut = frozenset([c.transport.control])
        await asyncio.sleep(3)
        member = b.swarm.member(2)
        assert member is not None
        assert member.state is State.ALIVE


async def test_misbehaviour_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with node(0) as first, node(1, peers=[first.transport.control]):
        await eventually(lambda: first.known() == [1])
        for index in (1, 1, 1, 7):  # nobody is known by the last
            first.swarm.misbehaved(index, "a model of the wrong size")
        assert first.transport.traffic.snapshot()["faults"] == {"content": 3}
        assert caplog.text.count("wrong size") == 1


@asynccontextmanager
async def answering(
    answers: Callable[[Request, PeerRecord], Reply],
) -> AsyncIterator[PeerRecord]:
    """One that answers what a test says, and the record that it has for itself, by index 1."""

    async def handler(request: Request) -> tuple[Reply, Sequence[Buffer]]:
        return answers(request, record), ()

    async with Transport(listen="127.0.0.1:0", handler=handler, traffic=Traffic()) as transport:
        transport.introduce(sender=peer_id(1), plan="c" * 32)
        record = PeerRecord(
            peer=peer_id(1),
            index=1,
            control=transport.control,
            data=transport.data,
            incarnation=1,
            first_round=1,
            model="a" * 32,
        )
        yield record


def alive(record: PeerRecord, **status: int) -> Update:
    return Update(record=record, state=State.ALIVE, status=Status(**status))


async def test_malformed_pongs_are_offences() -> None:
    async with (
        node(0, settings=UNHURRIED) as first,
        answering(lambda *_: Pong(updates=())) as odd,
    ):
        await first.stop()  # what it asks by itself would count, too
        first.swarm.hear([alive(odd)], "somebody")
        for _ in range(3):
            assert not await first.swarm._answers(odd)
        assert first.swarm.left_out() == []
        assert not await first.swarm._answers(odd)
        assert first.swarm.left_out() == [1]


@pytest.mark.parametrize("of_itself", [False, True])
@pytest.mark.parametrize(
    ("lie", "certain"),
    [
        pytest.param({"published": 11}, True, id="beyond the plan's rounds"),
        # An honest one may have known it in between.
        pytest.param({"incarnation": 2**50}, False, id="an incarnation out of reach"),
    ],
)
async def test_who_says_what_no_honest_peer_does_offends(
    lie: dict[str, int], certain: bool, of_itself: bool
) -> None:
    third = PeerRecord(
        peer=peer_id(2),
        index=2,
        control="tcp://127.0.0.1:9",
        data="tcp://127.0.0.1:9",
        incarnation=1,
        first_round=1,
        model="a" * 32,
    )
    status = {name: value for name, value in lie.items() if name != "incarnation"}

    def false(record: PeerRecord) -> Update:
        told = {name: value for name, value in lie.items() if name == "incarnation"}
        return alive(record.model_copy(update=told), **status)

    def gossip(_: Request, own: PeerRecord) -> Reply:
        told = [false(own), alive(third)] if of_itself else [alive(own), false(third)]
        return Pong(updates=tuple(told))

    async with node(0, settings=UNHURRIED) as first, answering(gossip) as liar:
        await first.stop()
        first.swarm.hear([alive(liar), alive(third)], "somebody")
        for _ in range(4):
            assert await first.swarm._answers(liar)
        assert first.swarm.left_out() == ([1] if certain else [])
        if certain or not of_itself:
            assert first.transport.traffic.snapshot()["faults"]["content"] >= 4
        # Else who passes that on would be taken for the liar.
        assert all(own.status.published <= 10 for own in first.swarm.members())


async def test_a_helper_is_not_to_blame_for_what_it_passes_on() -> None:
    async with (
        node(0, settings=UNHURRIED) as first,
        answering(lambda *_: Known(updates=())) as helper,
    ):
        await first.stop()
        first.swarm.hear([alive(helper)], "somebody")
        for _ in range(4):
            assert await first.swarm._ask_helper(helper, helper) is None
        assert first.transport.traffic.snapshot()["faults"]["content"] == 4
        assert first.swarm.left_out() == []


async def test_address_that_cannot_be_dialled() -> None:
    with pytest.raises(UserError, match="is not an address"):
        async with node(0, bootstrap=["no address"]):
            pass


@asynccontextmanager
async def plain() -> AsyncIterator[Transport]:
    async def refuse(request: Request) -> tuple[Reply, Sequence[Buffer]]:
        raise RefusedError(Reason.NOT_YET)

    async with Transport(listen="127.0.0.1:0", handler=refuse, traffic=Traffic()) as transport:
        yield transport


async def test_enrolment() -> None:
    plan = Plan(n=2)
    async with BootstrapNode(plan, listen="127.0.0.1:0") as bootstrap, plain() as transport:
        addresses = ["127.0.0.1:9", bootstrap.address]
        first = await enrol(transport, addresses, index=None, peer_id="a" * 32)
        assert first is not None
        assert (first.index, Plan.from_toml(first.toml)) == (0, plan)
        again = await enrol(transport, addresses[1:], index=1, peer_id="a" * 32)
        second = await enrol(transport, addresses[1:], index=0, peer_id="b" * 32)
        assert again is not None
        assert second is not None
        assert (again.index, second.index) == (0, 1)
        with pytest.raises(UserError, match="refuses: bad-request: index 2 is not"):
            await enrol(transport, addresses[1:], index=2, peer_id="c" * 32)


@pytest.mark.parametrize("reclaim_after", [1.0, 60.0])
async def test_enrolment_waits_for_a_place(
    monkeypatch: pytest.MonkeyPatch, reclaim_after: float
) -> None:
    monkeypatch.setattr(module, "FULL_PATIENCE", 2.0)
    async with (
        BootstrapNode(Plan(n=2), listen="127.0.0.1:0", reclaim_after=reclaim_after) as bootstrap,
        plain() as transport,
    ):
        addresses = [bootstrap.address]
        for peer in ("a" * 32, "b" * 32):
            await enrol(transport, addresses, index=None, peer_id=peer)
        if reclaim_after == 1.0:
            third = await enrol(transport, addresses, index=None, peer_id="c" * 32)
            assert third is not None
            assert third.index == 0
        else:
            with pytest.raises(UserError, match="all 2 places are taken"):
                await enrol(transport, addresses, index=None, peer_id="c" * 32)


async def test_enrolment_without_any_bootstrap_node() -> None:
    async with plain() as transport:
        assert (
            await enrol(transport, [transport.control], index=None, peer_id="a" * 32, patience=0.5)
            is None
        )


async def test_pong_of_another_federation_is_an_error() -> None:
    async def handler(request: Request) -> tuple[Reply, Sequence[Buffer]]:
        return (Known(updates=()) if isinstance(request, Members) else Pong(updates=())), ()

    async with (
        Transport(listen="127.0.0.1:0", handler=handler, traffic=Traffic()) as odd,
        node(0) as first,
    ):
        with pytest.raises(ProtocolError, match="empty or foreign"):
            await first.swarm._ping(odd.control, (update_of(first),), 5)
