"""The transport over real loopback sockets: what it promises to friends and survives of foes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
import zmq.asyncio

from peer.errors import ProtocolError, RefusedError, UnreachableError, UserError
from peer.network import transport as module
from peer.network.limits import Allowance
from peer.network.messages import (
    CHUNK,
    Await,
    Members,
    Model,
    Ping,
    Pong,
    Pull,
    Reached,
    Reason,
    Reply,
    Request,
    Status,
    encode,
)
from peer.network.traffic import Traffic
from peer.network.transport import Buffer, Handler, Transport
from peer.network.vectors import decode_vector, encode_vector, split
from simulations.processes import free_port

PING = Ping(updates=())
MODEL = np.arange(1_000_000, dtype=np.float32) / 1e6


async def answer(request: Request) -> tuple[Reply, Sequence[Buffer]]:
    """Answer pings at once, awaits after their `wait`, pulls by MODEL, members by a mistake."""
    match request:
        case Ping():
            return Pong(updates=()), ()
        case Await():
            await asyncio.sleep(request.wait)
            return Reached(status=Status(finished=request.round)), ()
        case Pull():
            encoded = encode_vector(MODEL, "float32")
            reply = Model(round=request.round, model_bytes=len(encoded), samples=1)
            return reply, list(split(encoded))
        case Members():
            raise ZeroDivisionError
    raise RefusedError(Reason.BAD_REQUEST, "no\n such «thing»")


def pull(t: int = 1) -> Pull:
    return Pull(round=t, staleness=0, wait=0)


@asynccontextmanager
async def opened(
    handler: Handler = answer, listen: str = "127.0.0.1:0"
) -> AsyncIterator[Transport]:
    async with Transport(listen=listen, handler=handler, traffic=Traffic()) as transport:
        yield transport


@asynccontextmanager
async def pair(handler: Handler = answer) -> AsyncIterator[tuple[Transport, Transport]]:
    async with opened(handler) as server, opened() as client:
        client.introduce(sender="a" * 32, plan="b" * 32)
        yield server, client


@asynccontextmanager
async def raw_dealer(address: str, receive_at_most: int = 0) -> AsyncIterator[zmq.asyncio.Socket]:
    """A socket that may send anything."""
    with zmq.asyncio.Context() as context:
        dealer = context.socket(zmq.DEALER)
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.RCVHWM, receive_at_most)
        dealer.connect(address)
        try:
            yield dealer
        finally:
            dealer.close()


async def eventually(reached: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until `reached` comes true; fail when it does not."""
    async with asyncio.timeout(seconds):
        while not reached():  # noqa: ASYNC110 - what it waits for knows no events
            await asyncio.sleep(0.01)


def faults(transport: Transport) -> dict[str, int]:
    found: dict[str, int] = transport.traffic.snapshot()["faults"]
    return found


async def test_reply_is_matched_and_stamped() -> None:
    async def handler(request: Request) -> tuple[Reply, Sequence[Buffer]]:
        assert (request.sender, request.plan) == ("a" * 32, "b" * 32)
        return Pong(updates=()), ()

    async with pair(handler) as (server, client):
        server.introduce(sender="c" * 32, plan="d" * 32)
        reply, chunks = await client.request(server.control, PING, timeout=5)
        assert isinstance(reply, Pong)
        assert (reply.sender, reply.plan, chunks) == ("c" * 32, "d" * 32, [])


class Slow:
    """A network that takes its time, tells what it carried, and may lose it."""

    def __init__(self, seconds: float, *, loses: str = "") -> None:
        self.carried: list[tuple[str, str, int]] = []
        self._seconds = seconds
        self._loses = loses

    def introduce(self, index_of: Callable[[str], int | None]) -> None:
        pass

    async def leave(self, to: str, payload: int) -> bool:
        return await self._carry("to", to, payload)

    async def arrive(self, sender: str, payload: int) -> bool:
        return await self._carry("from", sender, payload)

    async def _carry(self, way: str, other: str, payload: int) -> bool:
        self.carried.append((way, other, payload))
        await asyncio.sleep(self._seconds)
        return way != self._loses


@asynccontextmanager
async def over(network: Slow) -> AsyncIterator[tuple[Transport, Transport]]:
    common: dict[str, Any] = {"listen": "127.0.0.1:0", "handler": answer, "shaper": network}
    async with (
        Transport(**common, traffic=Traffic()) as server,
        Transport(**common, traffic=Traffic()) as client,
    ):
        client.introduce(sender="a" * 32, plan="b" * 32)
        yield server, client


async def test_messages_take_as_long_as_the_network_between_lets_them() -> None:
    network = Slow(0.1)
    async with over(network) as (server, client):
        started = time.monotonic()
        _, chunks = await client.request(server.data, pull(), timeout=30, max_payload=MODEL.nbytes)
        assert time.monotonic() - started >= 0.3
        assert sum(map(len, chunks)) == MODEL.nbytes
        address, sender, size = server.data, "a" * 32, MODEL.nbytes
        assert network.carried == [
            ("to", address, 0),
            ("to", sender, size),
            ("from", address, size),
        ]
        before = len(network.carried)
        with pytest.raises(RefusedError):
            await client.request(server.control, Members(), timeout=30)
        assert len(network.carried) == before + 3


@pytest.mark.parametrize("way", ["to", "from"])
async def test_what_the_network_loses_is_unreachable(way: str) -> None:
    async with over(Slow(0.0, loses=way)) as (server, client):
        with pytest.raises(UnreachableError):
            await client.request(server.control, PING, timeout=0.3)
        assert server.traffic.totals()["wire_received"] == 0 or way == "from"


async def test_replies_out_of_order_reach_their_requests() -> None:
    async with pair() as (server, client):
        waits = [0.3, 0.0, 0.2, 0.1]
        replies = await asyncio.gather(
            *(
                client.request(server.control, Await(round=i, wait=wait), timeout=5)
                for i, wait in enumerate(waits)
            )
        )
        finished = [reply.status.finished for reply, _ in replies if isinstance(reply, Reached)]
        assert finished == [0, 1, 2, 3]


async def test_model_travels_in_chunks_and_is_counted() -> None:
    async with pair() as (server, client):
        reply, chunks = await client.request(server.data, pull(), timeout=5, max_payload=4_000_000)
        assert [len(chunk) for chunk in chunks] == [CHUNK, CHUNK, CHUNK, 4_000_000 - 3 * CHUNK]
        vector = decode_vector(chunks, 1_000_000, "float32", 1e6)
        np.testing.assert_array_equal(vector, MODEL)
        await eventually(lambda: "model" in server.traffic.snapshot()["sent"])
        sent = server.traffic.snapshot()["sent"]["model"]
        assert sent == client.traffic.snapshot()["received"]["model"]
        assert sent["messages"] == 1
        assert sent["payload_bytes"] == 4_000_000
        header = len(encode(reply))
        assert sent["wire_bytes"] == 4_000_000 + header
        assert server.traffic.totals()["payload_sent"] == 4_000_000
        assert client.traffic.totals()["wire_received"] == 4_000_000 + header


async def test_payload_beyond_what_was_asked_for_is_refused() -> None:
    async with pair() as (server, client):
        with pytest.raises(ProtocolError, match="at most 3999999"):
            await client.request(server.data, pull(), timeout=5, max_payload=3_999_999)
        assert faults(client) == {"bad-reply": 1}


async def test_refusals_and_handler_mistakes_are_answered() -> None:
    async with pair() as (server, client):
        with pytest.raises(RefusedError) as refusal:
            await client.request(server.control, probe(), timeout=5)
        assert refusal.value.reason == Reason.BAD_REQUEST
        assert refusal.value.detail == "no? such ?thing?"
        for _ in range(3):
            with pytest.raises(RefusedError, match="bad-request"):
                await client.request(server.control, Members(), timeout=5)
        assert faults(server) == {"handler": 3, "refused": 1}
        await client.request(server.control, PING, timeout=5)


def probe() -> Request:
    from peer.network.messages import Probe

    return Probe(round=1, staleness=0, wait=0)


async def test_reply_too_long_to_send_is_a_handler_mistake() -> None:
    class Huge(Pong):
        def model_copy(self, **_: object) -> Pong:  # type: ignore[override]
            raise ValueError("too long")

    async def handler(request: Request) -> tuple[Reply, Sequence[Buffer]]:
        return Huge(updates=()), ()

    async with pair(handler) as (server, client):
        with pytest.raises(RefusedError, match="bad-request"):
            await client.request(server.control, PING, timeout=5)
        assert faults(server) == {"handler": 1}


async def test_reply_of_another_kind_is_an_error() -> None:
    async def handler(request: Request) -> tuple[Reply, Sequence[Buffer]]:
        return Reached(status=Status()), ()

    async with pair(handler) as (server, client):
        with pytest.raises(ProtocolError, match="reached instead of Pong"):
            await client.request(server.control, PING, timeout=5)


async def test_dead_address_is_unreachable_in_time(unused_port: int) -> None:
    async with opened() as client:
        started = time.monotonic()
        with pytest.raises(UnreachableError):
            await client.request(f"tcp://127.0.0.1:{unused_port}", PING, timeout=0.3)
        assert 0.25 < time.monotonic() - started < 0.6
        with pytest.raises(UnreachableError):
            await client.request("tcp://no-such-host.invalid:1", PING, timeout=5)
        with pytest.raises(UnreachableError):
            await client.request("tcp://127.0.0.1:99999", PING, timeout=5)


async def test_request_given_up_at_once_harms_no_other(unused_port: int) -> None:
    """As after a standstill of the process: its time is over before its connection is used."""
    async with pair() as (server, client):
        with pytest.raises(UnreachableError):
            await client.request(f"tcp://127.0.0.1:{unused_port}", PING, timeout=0.0)
        reply, _ = await client.request(server.control, PING, timeout=5)
        assert isinstance(reply, Pong)


async def test_host_names_are_resolved() -> None:
    async with opened(listen="localhost:0") as server, opened() as client:
        assert server.control.startswith("tcp://localhost:")
        await client.request(server.control, PING, timeout=5)


async def test_restart_on_the_same_port_is_found_at_once() -> None:
    async with opened() as client:
        async with opened() as server:
            address = server.control
            await client.request(address, PING, timeout=5)
        with pytest.raises(UnreachableError):
            await client.request(address, PING, timeout=0.5)
        async with opened(listen=address.removeprefix("tcp://")):
            started = time.monotonic()
            await client.request(address, PING, timeout=5)
            assert time.monotonic() - started < 1


async def test_cancelled_and_late_replies_are_dropped() -> None:
    async with pair() as (server, client):
        with pytest.raises(UnreachableError):
            await client.request(server.control, Await(round=1, wait=0.3), timeout=0.1)
        task = asyncio.create_task(
            client.request(server.control, Await(round=2, wait=0.3), timeout=5)
        )
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        reply, _ = await client.request(server.control, PING, timeout=5)
        assert isinstance(reply, Pong)
        await eventually(lambda: faults(client).get("late", 0) >= 1)


async def test_timeout_does_not_disturb_others_on_the_same_connection() -> None:
    async with pair() as (server, client):
        slow = asyncio.create_task(
            client.request(server.control, Await(round=7, wait=0.5), timeout=5)
        )
        await asyncio.sleep(0.05)
        with pytest.raises(UnreachableError):
            await client.request(server.control, Await(round=1, wait=1), timeout=0.1)
        reply, _ = await slow
        assert isinstance(reply, Reached)
        assert reply.status.finished == 7


async def test_one_sender_cannot_take_all_places() -> None:
    async with pair() as (server, client), opened() as other:
        many = [
            asyncio.create_task(client.request(server.control, Await(round=i, wait=0.5), timeout=5))
            for i in range(module.MAX_WAITING_PER_SENDER + 5)
        ]
        await asyncio.sleep(0.2)
        await other.request(server.control, PING, timeout=5)
        results = await asyncio.gather(*many, return_exceptions=True)
        refused = [result for result in results if isinstance(result, RefusedError)]
        assert [refusal.reason for refusal in refused] == [Reason.BUSY] * 5
        assert faults(server) == {"busy": 5}


@pytest.mark.parametrize(
    ("request_", "allowance", "answered"),
    [
        (PING, Allowance(requests=0.0, request_burst=3.0), 3),
        # The third model is begun with bytes to spare, and makes the debt.
        (pull(), Allowance(bytes=0.0, byte_burst=2.5 * MODEL.nbytes), 3),
    ],
    ids=["requests", "bytes"],
)
async def test_who_asks_for_too_much_is_told_so(
    request_: Request,
    allowance: Allowance,
    answered: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pair() as (server, client), opened() as other:
        server.allow(allowance)
        ask = {"timeout": 5, "max_payload": MODEL.nbytes}
        for _ in range(answered):
            await client.request(server.data, request_, **ask)
        for _ in range(2):
            with pytest.raises(RefusedError, match="busy: you ask for too much"):
                await client.request(server.data, request_, **ask)
        await other.request(server.data, request_, **ask)
        assert faults(server) == {"limited": 2}
    assert [r.message.partition(" (")[0] for r in caplog.records] == [
        "limited: 127.0.0.1: asks for too much"
    ]


async def test_flood_of_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 8)
    async with pair() as (server, client):
        results = await asyncio.gather(
            *(
                client.request(server.control, Await(round=i, wait=0.2), timeout=5)
                for i in range(12)
            ),
            return_exceptions=True,
        )
        assert sum(isinstance(result, RefusedError) for result in results) == 4


@pytest.mark.parametrize(
    ("frames", "fault"),
    [
        ([b""], "undecodable"),
        ([b"\x00" * 100], "undecodable"),
        ([os.urandom(60_000)], "undecodable"),
        ([encode(Pong(updates=()))], "not-a-request"),
        ([msgpack.packb({"v": 2, "kind": "ping", "updates": []})], "version"),
        ([msgpack.packb({"v": 1, "kind": "ping", "updates": [], "more": 1})], "undecodable"),
        ([encode(PING)] * 17, "frames"),
        ([b""] * 1000, "frames"),
    ],
)
async def test_bad_frames_are_counted_and_dropped(
    frames: list[bytes], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair() as (server, client), raw_dealer(server.control) as dealer:
        for _ in range(3):
            await dealer.send_multipart(frames)
        await eventually(lambda: faults(server) == {fault: 3})
        await client.request(server.control, PING, timeout=5)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


async def test_oversized_frame_ends_its_connection_only() -> None:
    async with pair() as (server, client), raw_dealer(server.control) as dealer:
        await client.request(server.control, PING, timeout=5)
        await dealer.send(bytes(200_000))
        await asyncio.sleep(0.2)
        await client.request(server.control, PING, timeout=5)
        assert faults(server) == {}


async def test_reply_of_nonsense_fails_the_request() -> None:
    with zmq.asyncio.Context() as context:
        router = context.socket(zmq.ROUTER)
        port = router.bind_to_random_port("tcp://127.0.0.1")

        async def misanswer() -> None:
            while True:
                routing_id, _ = await router.recv_multipart()
                await router.send_multipart([routing_id, b"nonsense"])

        task = asyncio.create_task(misanswer())
        async with opened() as client:
            with pytest.raises(ProtocolError):
                await client.request(f"tcp://127.0.0.1:{port}", PING, timeout=5)
            assert faults(client) == {"bad-reply": 1}
        task.cancel()
        router.close(0)


async def test_slow_reader_blocks_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEND_PATIENCE", 0.5)
    async with pair() as (server, client), raw_dealer(server.data, 1) as dealer:
        for number in range(module.MAX_WAITING_PER_SENDER):
            await dealer.send(encode(pull(number)))
        for _ in range(10):
            reply, _ = await client.request(server.data, pull(), timeout=2, max_payload=4_000_000)
            assert isinstance(reply, Model)
        await eventually(lambda: faults(server).get("slow-reader", 0) > 0)


async def test_forgetting_an_address_ends_its_requests() -> None:
    async with pair() as (server, client):
        task = asyncio.create_task(
            client.request(server.control, Await(round=1, wait=30), timeout=60)
        )
        await asyncio.sleep(0.1)
        client.forget(server.control)
        with pytest.raises(UnreachableError):
            await asyncio.wait_for(task, 1)
        await client.request(server.control, PING, timeout=5)


async def test_forgetting_an_address_ends_requests_on_what_was_its_connection() -> None:
    """A ping that fails retires a connection on which others still wait."""

    async def silent(_: Request) -> tuple[Reply, Sequence[Buffer]]:
        await asyncio.sleep(30)
        raise AssertionError

    async with pair(silent) as (server, client):
        task = asyncio.create_task(
            client.request(server.control, Await(round=1, wait=30), timeout=60)
        )
        with pytest.raises(UnreachableError, match="within"):
            await client.request(server.control, PING, timeout=0.2)
        assert not task.done()
        client.forget(server.control)
        with pytest.raises(UnreachableError, match="given up"):
            await asyncio.wait_for(task, 1)


@pytest.mark.parametrize(
    ("begun", "more"),
    [
        pytest.param(False, 0, id="before its only frame is taken"),
        pytest.param(False, 5000, id="before its first frame is taken"),
        pytest.param(True, 5000, id="while the rest is dropped"),
    ],
)
async def test_a_connection_is_given_up_while_a_message_arrives(
    begun: bool, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    most_frames, recv = module._Link.most_frames, zmq.asyncio.Socket.recv
    with zmq.asyncio.Context() as context:
        router = context.socket(zmq.ROUTER)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        address = f"tcp://127.0.0.1:{port}"
        async with opened() as client, opened() as server:

            async def forgotten(socket: zmq.asyncio.Socket, **flags: Any) -> Any:
                """As if the loop had turned to another task first."""
                frame = await recv(socket, **flags)
                client.forget(address)
                return frame

            def given_up(link: module._Link) -> int:
                """Called when the first frame was taken."""
                asyncio.get_running_loop().call_soon(client.forget, address)
                return most_frames(link)

            if begun:
                monkeypatch.setattr(module._Link, "most_frames", given_up)
            else:
                monkeypatch.setattr(zmq.asyncio.Socket, "recv", forgotten)
            asking = asyncio.create_task(client.request(address, PING, timeout=30))
            routing_id, _ = await router.recv_multipart()
            await router.send_multipart([routing_id, encode(Pong(updates=())), *[b""] * more])
            with pytest.raises(UnreachableError, match="given up"):
                await asking
            monkeypatch.undo()
            # Nothing else was harmed.
            await client.request(server.control, PING, timeout=30)
        router.close(0)


@pytest.mark.parametrize("free", [0, 1, 2, 3])
async def test_a_connection_that_finds_no_sockets_is_none(
    free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as server:
        monkeypatch.setattr(module, "MAX_SOCKETS", 2 + free)  # two are there that listen
        async with opened() as client:
            if free < 3:  # one that asks, and the two ends of what observes it
                for _ in range(3):
                    with pytest.raises(UnreachableError, match="no connection: Too many open"):
                        await client.request(server.control, PING, timeout=30)
                assert len(client._open) == 2
            else:
                await client.request(server.control, PING, timeout=30)


async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_LINK", 0.2)
    async with pair() as (server, client):
        await client.request(server.control, PING, timeout=5)
        before = open_files()
        await eventually(lambda: open_files() < before)
        await client.request(server.control, PING, timeout=5)


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINKS", 2)
    async with opened() as client, opened() as a, opened() as b, opened() as c:
        for _ in range(3):
            for server in (a, b, c):
                await client.request(server.control, PING, timeout=5)


async def test_closing_is_prompt_and_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):  # the first leaves pyzmq's garbage collector thread behind
        before, tasks = open_files(), len(asyncio.all_tasks())
        async with pair() as (server, client):
            asked = asyncio.create_task(
                client.request(server.control, Await(round=1, wait=60), timeout=60)
            )
            await client.request(server.data, pull(), timeout=5, max_payload=4_000_000)
            closing = time.monotonic()
        assert time.monotonic() - closing < 1
        with pytest.raises(UnreachableError):
            await asked
        gc.collect()
        assert len(asyncio.all_tasks()) == tasks
    assert open_files() == before
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_error_of_the_body_is_not_wrapped() -> None:
    with pytest.raises(KeyError):
        async with opened():
            raise KeyError


async def test_cancelling_the_body_cancels(unused_port: int) -> None:
    async def body() -> None:
        async with opened() as client:
            await client.request(f"tcp://127.0.0.1:{unused_port}", PING, timeout=60)

    task = asyncio.create_task(body())
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_many_transports_share_a_context() -> None:
    with zmq.asyncio.Context() as context:
        async with asyncio.TaskGroup() as group:
            ready = asyncio.Barrier(5)
            addresses: list[str] = []

            async def one() -> None:
                async with Transport(
                    listen="127.0.0.1:0", handler=answer, traffic=Traffic(), context=context
                ) as transport:
                    addresses.append(transport.control)
                    await ready.wait()
                    for address in addresses:
                        await transport.request(address, PING, timeout=5)
                    await ready.wait()

            for _ in range(5):
                group.create_task(one())


async def test_port_in_use_is_a_persons_mistake() -> None:
    async with opened() as server:
        with pytest.raises(UserError, match="cannot listen on 127"):
            async with opened(listen=server.control):
                pass
    with pytest.raises(UserError, match="no-such-host"):
        async with opened(listen="no-such-host.invalid:0"):
            pass


async def test_advertised_addresses(unused_port: int) -> None:
    async def addresses(listen: str, advertise: str | None) -> tuple[str, str]:
        async with Transport(
            listen=listen, advertise=advertise, handler=answer, traffic=Traffic()
        ) as transport:
            return transport.control, transport.data

    control, data = await addresses(f"127.0.0.1:{unused_port}", None)
    assert control == f"tcp://127.0.0.1:{unused_port}"
    assert data == f"tcp://127.0.0.1:{unused_port + 1}"
    control, data = await addresses(f"127.0.0.1:{unused_port}", "example.org")
    assert (control, data) == (
        f"tcp://example.org:{unused_port}",
        f"tcp://example.org:{unused_port + 1}",
    )
    control, data = await addresses("127.0.0.1:0", "example.org:8000")
    assert (control, data) == ("tcp://example.org:8000", "tcp://example.org:8001")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def unused_port() -> int:
    """A port that, with its successor, nobody listens on."""
    return free_port()


async def test_ports_of_before_are_taken_again_if_they_are_free() -> None:
    async def nobody(_: Request) -> tuple[Reply, Sequence[Buffer]]:
        raise RefusedError(Reason.NOT_YET)

    def listening(ports: Sequence[int] = ()) -> Transport:
        return Transport(listen="127.0.0.1:0", handler=nobody, traffic=Traffic(), ports=ports)

    async with listening() as first:
        ports = first.ports
        assert [first.control, first.data] == [f"tcp://127.0.0.1:{port}" for port in ports]
        async with listening(ports) as other:
            assert not set(ports) & set(other.ports)
    async with listening(ports) as again:
        assert again.ports == ports
