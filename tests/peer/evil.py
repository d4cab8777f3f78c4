"""Enemies for the tests: a member that misbehaves, a wire that does, and sockets that say anything.

An evil peer is a real one, with a real learner, membership and transport; a misdeed sees each of
its answers and says what is sent instead. Everything stays on the loopback interface.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest import mock

import numpy as np
import psutil
import zmq
import zmq.asyncio
from safetensors.numpy import load_file

from peer.errors import RefusedError
from peer.network.address import parse_address
from peer.network.messages import (
    Known,
    Members,
    Message,
    PeerRecord,
    Probe,
    Pull,
    Reason,
    Refused,
    Reply,
    Request,
    decode,
    encode,
)
from peer.network.transport import Buffer, Transport, _send
from peer.node import Peer
from peer.plan import Plan
from peer.rundir import MetricRow, TopologyRow, read_metrics, read_topology
from peer.settings import PeerSettings
from simulations.processes import Federation, Worker

Messages = Sequence[Sequence[Buffer]]
Misdeed = Callable[[Request, Reply, list[bytes]], Awaitable[Messages]]
"""Given a request, the honest reply to it and its chunks: the messages that are sent instead."""
Wire = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
"""Carries what an evil peer's data socket says to whoever connected to it."""

_MISDEED: ContextVar[Misdeed] = ContextVar("misdeed")
_WIRE: ContextVar[Wire | None] = ContextVar("wire", default=None)


async def honest(_: Request, reply: Reply, chunks: list[bytes]) -> Messages:
    """No misdeed at all."""
    return [[encode(reply), *chunks]]


class EvilTransport(Transport):
    """A transport whose answers go through a misdeed, and whose data through a wire."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._misdeed, self._wire = _MISDEED.get(), _WIRE.get()

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        if self._wire is not None:
            self._bound = parse_address(self.data)
            self._proxy = await asyncio.start_server(self._carry, "127.0.0.1", 0)
            self.data = f"tcp://127.0.0.1:{self._proxy.sockets[0].getsockname()[1]}"
        return self

    async def _carry(self, heard: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        assert self._wire is not None
        said, told = await asyncio.open_connection(*self._bound)
        with suppress(ConnectionError):
            tasks = [
                asyncio.create_task(forward(heard, told)),
                asyncio.create_task(self._wire(said, answer)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
        for writer in (answer, told):
            writer.close()

    async def _answer(
        self, router: zmq.asyncio.Socket, routing_id: bytes, request: Request, host: str
    ) -> None:
        try:
            reply: Reply
            try:
                reply, chunks = await self._handler(request)
            except RefusedError as refusal:
                reply, chunks = Refused(reason=Reason(refusal.reason)), ()
            stamp = {"id": request.id, "sender": self._sender, "plan": self._plan}
            reply = reply.model_copy(update=stamp)
            for frames in await self._misdeed(request, reply, [bytes(chunk) for chunk in chunks]):
                await _send(router, [routing_id, *frames], 5.0)
        finally:
            self._answering -= 1
            self._waiting[routing_id] -= 1


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An honest wire."""
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()


@dataclass
class Battle:
    """A federation of honest peers in one process of their own, and of evil ones in this one."""

    run: Federation
    plan: Plan

    @property
    def victim(self) -> Worker:
        """The process of the honest peers."""
        return self.run.peers[0]

    def states(self) -> list[Path]:
        """Return the state directories of the honest peers."""
        return sorted(self.victim.directory.glob("replica-*"))

    def records(self) -> tuple[list[PeerRecord], list[PeerRecord]]:
        """Return the records of the honest peers and of the evil ones, as the bootstrap node tells
        any stranger."""
        with Stranger(self.run.address, plan=self.plan.digest) as stranger:
            known = stranger.ask(Members())
        assert isinstance(known, Known)
        assert self.victim.process is not None
        ports = {c.laddr.port for c in psutil.Process(self.victim.process.pid).net_connections()}
        records = [update.record for update in known.updates]
        mine = [record for record in records if parse_address(record.control).port in ports]
        return mine, [record for record in records if record not in mine]

    def finished(self) -> list[int]:
        """Return the last round that each honest peer has finished so far."""
        return [read_metrics(state)[-1].t for state in self.states()]

    def rows(self) -> list[list[tuple[MetricRow, TopologyRow]]]:
        """Return what each honest peer wrote, by round."""
        return [
            list(zip(read_metrics(state), read_topology(state), strict=True))
            for state in self.states()
        ]

    def rows_against(self, number: int) -> list[tuple[int, list[tuple[MetricRow, TopologyRow]]]]:
        """Return the rows of each honest peer, and with them the index of an evil one."""
        enemy = read_metrics(self.run.directory / f"evil-{number}")[0].index
        return [(enemy, rows) for rows in self.rows()]

    def faults(self) -> list[dict[str, int]]:
        """Return the faults that each honest peer counted."""
        return [json.loads((s / "traffic.json").read_text())["faults"] for s in self.states()]

    def warnings(self) -> list[tuple[int, str]]:
        """Return what in the honest peers' log is more than information: replica and message."""
        lines = map(json.loads, self.victim.log.read_text(encoding="utf-8").splitlines())
        return [(line["replica"], line["message"]) for line in lines if line["level"] != "info"]

    def check_models(self) -> None:
        """Fail unless every honest peer ended with a finite model after its last round."""
        for state, rows in zip(self.states(), self.rows(), strict=True):
            (file,) = (state / "models").iterdir()
            assert all(np.isfinite(array).all() for array in load_file(file).values())
            assert rows[-1][0].t == self.plan.rounds


@contextmanager
def battle(
    directory: Path,
    misdeeds: Sequence[Misdeed],
    *,
    wires: Sequence[Wire | None] = (),
    peers: int = 3,
    rounds: int = 6,
    **network: Any,
) -> Iterator[Battle]:
    """Run honest `peers` in a process of their own, and one evil peer here for each misdeed.

    Everybody asks everybody in every round, whose digits take no time to learn.
    """
    n = peers + len(misdeeds)
    table: dict[str, Any] = {
        "n": n,
        "rounds": rounds,
        "method": "panm-grad",
        "matching": {"l": n - 1, "k": n - 1, "t1": rounds},
        "partition": {"train_per_peer": 20, "test_per_peer": 20},
        "training": {"epochs": 1, "batch": 20},
        "network": {"request_timeout": 4.0, "linger": 20.0, **network},
    }
    plan = Plan.model_validate(table)
    flags = ["--replicas", str(peers), "--log", "json"]
    with (
        mock.patch("peer.node.Transport", EvilTransport),
        Federation(plan, directory, peers=1, peer_flags=flags) as run,
        _event_loop() as loop,
    ):
        evil: list[Future[Any]] = []
        for number, misdeed in enumerate(misdeeds):
            _MISDEED.set(misdeed)
            _WIRE.set(wires[number] if wires else None)
            settings = PeerSettings.gather(
                config=None, bootstrap=run.address, state=directory / f"evil-{number}"
            )
            evil.append(asyncio.run_coroutine_threadsafe(Peer(settings).run(), loop))
        yield Battle(run, plan)
        for peer in evil:
            if peer.done():
                peer.result()  # raises what it failed of, if it did


@contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop in a thread of its own, whose tasks are cancelled at the end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="evil", daemon=True)
    thread.start()

    async def end() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(15)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Stranger:
    """A socket that asks what it likes, as whom it likes."""

    def __init__(
        self, address: str, *, sender: str = "", plan: str = "", reads: bool = True
    ) -> None:
        self._stamp = {"sender": sender, "plan": plan}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0 if reads else 1)
        self._socket.connect(parse_address(address).url)
        self._number = 0

    def send(self, *frames: bytes) -> None:
        """Send any frames."""
        self._socket.send_multipart(frames)

    def tell(self, request: Request) -> None:
        """Send a request and care for no reply."""
        self._number += 1
        stamp = {**self._stamp, "id": self._number}
        self.send(encode(request.model_copy(update=stamp)))

    def ask(self, request: Request, *, seconds: float = 30.0) -> Message | None:
        """Send a request and return its reply; None when there is none in time."""
        self.tell(request)
        while (reply := self.receive(seconds)) is not None and reply.id != self._number:
            pass
        return reply

    def receive(self, seconds: float) -> Message | None:
        """Return what comes next; None when nothing does in time."""
        if not self._socket.poll(int(1000 * seconds)):
            return None
        header, *_ = self._socket.recv_multipart()
        return decode(header)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)


@dataclass
class Growth:
    """By how many MB the memory of a process grew at most while it was watched."""

    mb: float = 0.0


@contextmanager
def memory_of(worker: Worker) -> Iterator[Growth]:
    """Watch the resident memory of a process: from what it has now to its peak."""
    assert worker.process is not None
    pid = worker.process.pid
    before = psutil.Process(pid).memory_info().rss
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # forgets the peak until now
    growth = Growth()
    yield growth
    status = Path(f"/proc/{pid}/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    growth.mb = (peak - before) / 1e6


@dataclass
class Longest:
    """The most seconds that a node took to answer while it was watched."""

    seconds: float = 0.0


@contextmanager
def answers_of(address: str, plan: str) -> Iterator[Longest]:
    """Ask a node a question again and again, by a connection and in a thread of its own."""
    longest, ended = Longest(), threading.Event()

    def ask() -> None:
        with Stranger(address, plan=plan) as stranger:
            while not ended.wait(0.02):
                began = time.monotonic()
                answer = stranger.ask(Members())
                took = math.inf if answer is None else time.monotonic() - began
                longest.seconds = max(longest.seconds, took)

    thread = threading.Thread(target=ask, name="ask")
    thread.start()
    try:
        yield longest
    finally:
        ended.set()
        thread.join()


class Gate:
    """A misdeed that holds a federation in the middle of a run: nobody gets what belongs to a round
    after `until`. Then another misdeed begins."""

    def __init__(self, then: Misdeed = honest) -> None:
        self.until: float = 1
        self.reached = threading.Event()
        self._then = then

    async def __call__(self, request: Request, reply: Reply, chunks: list[bytes]) -> Messages:
        """Put off, or go on to the next misdeed."""
        if isinstance(request, Probe | Pull) and request.round > self.until:
            self.reached.set()
            await asyncio.sleep(0.1)
            return [[encode(Refused(reason=Reason.NOT_YET, id=reply.id))]]
        return await self._then(request, reply, chunks)


def answer_time(address: str, plan: str) -> float:
    """Return the seconds that a node takes to answer a stranger's question."""
    began = time.monotonic()
    with Stranger(address, plan=plan) as stranger:
        assert isinstance(stranger.ask(Members()), Known)
    return time.monotonic() - began


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL".ljust(23, b"\0") + bytes(32)
"""What ZMTP 3.0 begins with: signature, version, mechanism, filler."""


def ready(identity: bytes = b"") -> bytes:
    """Return the command that ends ZMTP's handshake."""
    body = b"\x05READY"
    for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", identity)):
        body += bytes([len(name)]) + name + len(value).to_bytes(4) + value
    return b"\x06" + len(body).to_bytes(8) + body


def connected(address: str, *, handshake: bool = True) -> socket.socket:
    """Return a TCP connection, ZMTP's handshake done or not even begun."""
    host, port = parse_address(address)
    made = socket.create_connection((host, port), timeout=5)
    if handshake:
        made.sendall(GREETING + ready())
        while len(made.recv(1024, socket.MSG_PEEK)) < len(GREETING):
            time.sleep(0.001)
    return made


class Dripping:
    """A connection that takes a tenth of a second for each byte of its handshake."""

    def __init__(self, address: str) -> None:
        self._socket = connected(address, handshake=False)
        self._thread = threading.Thread(target=self._drip, daemon=True)
        self._ended = threading.Event()

    def _drip(self) -> None:
        for byte in GREETING:
            if self._ended.wait(0.1):
                break
            with suppress(OSError):
                self._socket.sendall(bytes([byte]))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close()
