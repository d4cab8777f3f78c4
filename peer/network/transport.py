"""Requests and replies over ZeroMQ: who is asked, who answers, and what nobody may break.

Contract. A `Transport` binds one ROUTER for control and one for data, so that a ping never queues
behind models, and keeps one DEALER per address it has asked something. Every message from outside
passes `messages.decode`; what does not is counted and dropped. A bad request is logged, once a
sender; a bad reply is told to whoever asked, who knows whom to blame. A request gets at most one
reply; a reply that comes too late is dropped.

Known traps, and what is done about them:
- A cancelled `recv` of `zmq.asyncio` can lose a message: every socket has one receiver task, which
  is only ever cancelled when its socket is closed.
- A send that blocks makes all later ones of the same socket wait: all sends are non-blocking and
  tried again, each by its own task and for a bounded time.
- A connection to a host that vanished looks open for minutes: after a request during which nothing
  was heard, the next one to that address makes a new connection.
- libzmq resolves names in its only I/O thread: names are resolved before they reach it.
- CURVE without ZAP admits any key, and a context has one ZAP handler: a transport with credentials
  has a context and a `Gate` of its own.
- A refused CURVE client never tries again: the next request makes a new connection, as above.
- MAXMSGSIZE bounds a frame, not a message of endless frames, which libzmq gathers before anyone can
  look at it: what bounds that is who may connect, and the memory limit of the process. Of one that
  has arrived only as many frames as are allowed become objects.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import socket as sockets
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import zmq
import zmq.asyncio

from peer.errors import (
    NotAdmittedError,
    ProtocolError,
    RefusedError,
    UnreachableError,
    UserError,
    VersionError,
)
from peer.network.address import HostPort, is_loopback, key_of, parse_address, with_key
from peer.network.gate import METADATA, NOT_ADMITTED, Gate, complaint, observe, present
from peer.network.limits import Allowance, Limiter
from peer.network.messages import (
    CHUNK,
    MAX_HEADER,
    PROTOCOL,
    REPLIES,
    Reason,
    Refused,
    Reply,
    Request,
    decode,
    encode,
)
from peer.network.shaping import Shaper
from peer.network.traffic import Fault, Traffic

if TYPE_CHECKING:
    from peer.network.federation import Credentials

log = logging.getLogger(__name__)

Buffer = bytes | bytearray | memoryview
Handler = Callable[[Request], Awaitable[tuple[Reply, Sequence[Buffer]]]]
"""Answers a request by a reply and its chunks.

Raises RefusedError to refuse. The chunks of a reply are not copied: they must not change any more.
"""

MAX_WAITING = 256
"""Requests that a transport works on at once; further ones are refused as busy."""
MAX_WAITING_PER_SENDER = 16
SEND_PATIENCE = 10.0
"""Seconds that a reply waits for a receiver that does not read."""
MAX_LINKS = 512
"""Connections to others that are kept open; the least recently used is closed first."""
IDLE_LINK = 120.0
"""Seconds after which an unused connection is closed."""
MAX_LOGGED = 1024
"""Senders whose faults are logged (once each) before faults are only counted."""
MAX_SOCKETS = 16_384
"""Sockets that one ZeroMQ context may hold: several transports can share it."""

MISTAKES: Final = frozenset(
    {
        Reason.PLAN_MISMATCH,
        Reason.MODEL_MISMATCH,
        Reason.PERMUTATION_MISMATCH,
        Reason.BEHIND,
        Reason.INDEX_CLASH,
        Reason.INDEX_HELD,
        Reason.BAD_REQUEST,
    }
)
"""Refusals that tell of a sender at fault, not of a moment."""

_FRAME_MARGIN: Final = 1024


@dataclass
class _Pending:
    """A request without its reply yet."""

    expected: type[Reply]
    max_payload: int
    reply: asyncio.Future[tuple[Reply, list[memoryview]]]


@dataclass(eq=False)
class _Link:
    """The connection to one address: when anything was last heard on it, and when it was last
    used."""

    address: str
    socket: zmq.asyncio.Socket
    used: float
    monitor: zmq.asyncio.Socket | None = None
    heard: float = -math.inf
    pending: dict[int, _Pending] = field(default_factory=dict)

    def most_frames(self) -> int:
        """Return how many frames a reply can have, given what was asked for."""
        payload = max((pending.max_payload for pending in self.pending.values()), default=0)
        return 1 + _most_chunks(payload)

    def fail(self, error: Exception) -> None:
        """Give all who wait on this connection an error."""
        for pending in self.pending.values():
            if not pending.reply.done():
                pending.reply.set_exception(error)


class Transport:
    """Asks others and answers them; an async context manager that owns its sockets and tasks.

    Args:
        listen: HOST:PORT to bind; port 0 takes any free one. The data socket takes the next port,
            or any free one as well.
        advertise: HOST or HOST:PORT that others are told to dial, if it differs from what is bound.
        handler: answers requests; each call runs in its own task.
        ports: to take where `listen` leaves the choice, as far as they are free: those of before.
        traffic: where messages and faults are counted.
        context: a ZeroMQ context to share with other transports of this process; with credentials
            it is not used.
        credentials: who this peer is and whom it admits; connections are then encrypted, and
            addresses name the key of who must be there.
        insecure: whether a transport without credentials may listen beyond loopback.
        data: whether to bind a data socket; without one `data` equals `control`.
        shaper: a network that an experiment puts between this peer and the others.

    Attributes:
        control, data: the advertised addresses, tcp://HOST:PORT or tcp://KEY@HOST:PORT, once
            entered.
        ports: those that are bound, once entered.

    Entering raises UserError when an address cannot be bound.
    """

    control: str
    data: str
    ports: tuple[int, ...]
    judge: Callable[[str, str], None] | None
    """Told the proved id of a sender that sends what no honest peer does, and a line about it."""

    def __init__(
        self,
        *,
        listen: str,
        advertise: str | None = None,
        handler: Handler,
        traffic: Traffic,
        ports: Sequence[int] = (),
        context: zmq.asyncio.Context | None = None,
        data: bool = True,
        shaper: Shaper | None = None,
        credentials: Credentials | None = None,
        insecure: bool = False,
    ) -> None:
        self._listen = parse_address(listen, listening=True)
        self._advertise = (
            None if advertise is None else parse_address(advertise, default_port=0, listening=True)
        )
        self._wanted = ports
        self._handler = handler
        self.traffic = traffic
        self._shared_context = None if credentials is not None else context
        self._with_data = data
        self._shaper = shaper
        self._credentials = credentials
        self._insecure = insecure
        self._gate: Gate | None = None
        self._monitors: list[zmq.asyncio.Socket] = []
        self._sender = "" if credentials is None else credentials.key.peer
        self._plan = ""
        self._ids = itertools.cycle(range(2**32))
        self._links: OrderedDict[str, _Link] = OrderedDict()
        self._retired: set[_Link] = set()
        """Connections that are used no more, and are closed as soon as nobody waits on them."""
        self._open: set[zmq.asyncio.Socket] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._answering = 0
        self._waiting: Counter[bytes] = Counter()
        self._limiter = Limiter(Allowance())
        self.judge = None
        self._logged: set[object] = set()

    def introduce(self, *, sender: str, plan: str) -> None:
        """Set the peer id and plan digest that go with every message from now on."""
        self._sender, self._plan = sender, plan

    @property
    def proves_senders(self) -> bool:
        """Whether it is proved who a request is from, and who answers at an address."""
        return self._credentials is not None

    def allow(self, allowance: Allowance) -> None:
        """Set what one sender may ask for from now on; what was asked before is forgiven."""
        self._limiter = Limiter(allowance)

    async def __aenter__(self) -> Self:
        self._context = self._shared_context or zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._resolver = ThreadPoolExecutor(2, thread_name_prefix="resolve")
        try:
            if self._credentials is not None:
                self._gate = Gate(self._context, self._credentials, self.blame)
                self._open.add(self._gate.socket)
            routers = await self._bind()
        except BaseException:
            self._close_sockets()
            raise
        self._tasks = await asyncio.TaskGroup().__aenter__()
        for name, router in zip(("control", "data"), routers, strict=False):
            self._spawn(self._serve(router), f"serve-{name}")
        self._spawn(self._close_idle(), "close-idle-links")
        if self._gate is not None:
            self._spawn(self._gate.serve(), "gate")
            self._spawn(self._gate.refresh(), "refresh-federation")
            for monitor in self._monitors:
                self._spawn(self._gate.watch(monitor), "watch-handshakes")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for link in [*self._links.values(), *self._retired]:
            link.fail(UnreachableError("the transport is closed"))
        for task in self._running:
            task.cancel()
        try:
            # An error of the body goes on as it is, not in a group. A cancellation may be the
            # group's own, because a receiver failed: the group must see it.
            if isinstance(error, asyncio.CancelledError):
                await self._tasks.__aexit__(kind, error, traceback)
            else:
                await self._tasks.__aexit__(None, None, None)
        finally:
            self._close_sockets()

    async def request(
        self,
        address: str,
        request: Request,
        *,
        timeout: float,  # noqa: ASYNC109 - it covers the look-up, the connection and the answer
        max_payload: int = 0,
    ) -> tuple[Reply, list[memoryview]]:
        """Ask `address` (tcp://HOST:PORT) and return its reply with its chunks.

        The reply is of the kind that answers `request`, its chunks together at most `max_payload`
        bytes. Raises UnreachableError without an answer in `timeout` seconds (NotAdmittedError
        where this peer is taken for no member), RefusedError when the answer is a refusal,
        ProtocolError when it is not what the protocol allows, and UserError once this peer's own
        federation file does not admit it.
        """
        if self._credentials is not None:
            self._credentials.check()
        loop = asyncio.get_running_loop()
        started = loop.time()
        number = next(self._ids)
        stamp = {"id": number, "sender": self._sender, "plan": self._plan}
        header = encode(request.model_copy(update=stamp))
        pending = _Pending(REPLIES[type(request)], max_payload, loop.create_future())
        # A request that is cancelled when its reply fails leaves an error that nobody looks at.
        pending.reply.add_done_callback(lambda reply: reply.cancelled() or reply.exception())
        link: _Link | None = None
        try:
            async with asyncio.timeout(timeout):
                link = await self._link(address)
                link.pending[number] = pending
                link.used = started
                if (self._shaper is None or await self._shaper.leave(address, 0)) and await _send(
                    link.socket, [header], timeout, until=pending.reply.done
                ):
                    self.traffic.sent(request.kind, len(header), 0)
                reply, chunks = await pending.reply
                payload = sum(map(len, chunks))
                if self._shaper and not await self._shaper.arrive(address, payload):
                    raise TimeoutError
        except TimeoutError:
            why = ""
            if link is not None and link.heard < started:
                why = self._complaint(link)
                self._retire(link)
            failure = NotAdmittedError if why == NOT_ADMITTED else UnreachableError
            told = f": {why}" if why else ""
            raise failure(f"no answer from {address} within {timeout:.3g} s{told}") from None
        finally:
            if link is not None:
                link.pending.pop(number, None)
                if link in self._retired:
                    self._retire(link)
        if isinstance(reply, Refused):
            raise RefusedError(reply.reason, reply.detail)
        return reply, chunks

    def forget(self, address: str) -> None:
        """Close the connections to `address`; requests on them become unreachable."""
        for link in [*self._links.values(), *self._retired]:
            if link.address == address:
                link.fail(UnreachableError(f"{address} was given up"))
                self._retire(link)

    def blame(self, fault: Fault, culprit: object, detail: str) -> None:
        """Count a fault, and log it unless something of the same culprit was logged before."""
        self.traffic.fault(fault)
        if culprit not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(culprit)
            log.warning("%s: %s (further ones are counted, not logged)", fault, detail)

    # Listening.

    async def _bind(self) -> list[zmq.asyncio.Socket]:
        """Bind the ROUTERs and set the advertised addresses."""
        host = await self._resolve(self._listen.host, "listen on")
        if self._credentials is None and not (self._insecure or is_loopback(host)):
            raise UserError(
                f"without keys anybody who reaches {self._listen.host} could join and read along",
                "give --federation FILE (peer federation new makes one), or say --insecure",
            )
        port = self._listen.port
        count = 2 if self._with_data else 1
        wanted = [port + offset for offset in range(count)] if port else list(self._wanted)
        routers = []
        for number in range(count):
            router = self._router(models=number > 0)
            self._take(router, host, wanted[number : number + 1], anywhere=port == 0)
            routers.append(router)
        self.ports = bound = tuple(
            int(str(router.get_string(zmq.LAST_ENDPOINT)).rpartition(":")[2]) for router in routers
        )
        if self._advertise is None:
            shown = [HostPort(self._listen.host, port) for port in bound]
        elif self._advertise.port == 0:
            shown = [HostPort(self._advertise.host, port) for port in bound]
        else:
            first = self._advertise
            shown = [HostPort(first.host, first.port + offset) for offset in range(len(bound))]
        key = None if self._credentials is None else self._credentials.key.curve.public
        self.control, self.data = (with_key(place.url, key) for place in (shown[0], shown[-1]))
        return routers

    def _router(self, *, models: bool) -> zmq.asyncio.Socket:
        router = self._socket(zmq.ROUTER)
        router.set(zmq.MAXMSGSIZE, MAX_HEADER + _FRAME_MARGIN)
        router.set(zmq.ROUTER_MANDATORY, 1)
        # Replies that are under way when the transport closes get a moment to leave.
        router.set(zmq.LINGER, 200)
        router.set(zmq.SNDHWM, 4 if models else 64)
        if self._gate is not None:
            monitor = self._gate.guard(router)
            self._open.add(monitor)
            self._monitors.append(monitor)
        return router

    def _take(
        self, router: zmq.asyncio.Socket, host: str, wanted: Sequence[int], *, anywhere: bool
    ) -> None:
        """Bind to a wanted port, else, where that is allowed, to any. Raises UserError."""
        failure = ""
        for place in [*wanted, *(["*"] if anywhere else [])]:
            try:
                router.bind(f"tcp://{host}:{place}")
            except zmq.ZMQError as error:
                failure = f"{host}:{place}: {os.strerror(error.errno or 0).lower()}"
            else:
                return
        raise UserError(
            f"cannot listen on {failure}",
            "give --listen another HOST:PORT; port 0 takes any free one",
        )

    async def _serve(self, router: zmq.asyncio.Socket) -> None:
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(router.underlying)
        while True:
            routing_id, *parts = await _receive(router, plain, lambda: 2)
            self._accept(router, routing_id.bytes, parts)
            # A receive that finds a message waiting does not yield: a flood must not stop the loop.
            await asyncio.sleep(0)

    def _accept(
        self, router: zmq.asyncio.Socket, routing_id: bytes, parts: list[zmq.Frame]
    ) -> None:
        """Decode one request and start a task that answers it."""
        host, sender = _host(parts), ""
        if self._credentials is not None:
            user, introduction = _property(parts, "User-Id"), _property(parts, METADATA)
            try:
                sender = self._credentials.sender(user, introduction)
            except ProtocolError as error:
                self.blame(Fault.UNLISTED, host, f"{host}: {error}")
                # It knows the token, or did: it may be told.
                refused = Refused(reason=Reason.NOT_ADMITTED)
                self._spawn(self._reply(router, routing_id, 0, refused, patience=0), "not-admitted")
                return
            host = f"{sender} at {host}"
        if len(parts) != 1:
            self._accuse(Fault.FRAMES, host, sender, "not one frame")
            return
        header = parts[0].buffer
        try:
            request = decode(header)
        except VersionError as error:
            self.blame(Fault.VERSION, host, f"{host}: {error}")
            # Of use to whoever reads the sender's log: it cannot decode this either, and says why.
            refused = Refused(reason=Reason.VERSION, detail=f"protocol {PROTOCOL} is spoken here")
            self._spawn(self._reply(router, routing_id, 0, refused, patience=0), "refuse-version")
            return
        except ProtocolError as error:
            self._accuse(Fault.UNDECODABLE, host, sender, str(error))
            return
        if not isinstance(request, Request):
            self._accuse(Fault.NOT_A_REQUEST, host, sender, f"{request.kind} is not a request")
            return
        if sender and request.sender != sender:
            self._accuse(
                Fault.FORGED, host, sender, f"says that it is {request.sender or 'nobody'}"
            )
            return
        self.traffic.received(request.kind, len(header), 0)
        asker = self._asker(routing_id, request)
        if (why := self._overload(asker, host)) is not None:
            refused = Refused(reason=Reason.BUSY, detail=why)
            answer = self._reply(router, routing_id, request.id, refused, patience=0)
        else:
            self._answering += 1
            self._waiting[asker] += 1
            answer = self._answer(router, routing_id, request, host)
        self._spawn(answer, f"answer-{request.kind}-{request.sender[:8]}")

    def _accuse(self, fault: Fault, host: str, sender: str, why: str) -> None:
        """Count what no honest peer sends, and tell the judge whose it is where that is proved."""
        self.blame(fault, host, f"{host}: {why}")
        if sender and self.judge is not None:
            self.judge(sender, why)

    def _asker(self, routing_id: bytes, request: Request) -> bytes:
        """Return by what a sender is known: its id where that is proved, else its connection."""
        return routing_id if self._credentials is None else request.sender.encode()

    def _overload(self, sender: bytes, host: str) -> str | None:
        """Return why a request cannot be answered now; None when it can."""
        if self._answering >= MAX_WAITING or self._waiting[sender] >= MAX_WAITING_PER_SENDER:
            self.traffic.fault(Fault.BUSY)
            return "too many wait"
        if not self._limiter.admits(sender, asyncio.get_running_loop().time()):
            # By the host, as whoever floods may connect again and again.
            self.blame(Fault.LIMITED, ("limited", host), f"{host}: asks for too much")
            return "you ask for too much"
        return None

    async def _answer(
        self, router: zmq.asyncio.Socket, routing_id: bytes, request: Request, host: str
    ) -> None:
        asker = self._asker(routing_id, request)
        try:
            try:
                reply, chunks = await self._handler(request)
                now = asyncio.get_running_loop().time()
                self._limiter.spend(asker, sum(map(len, chunks)), now)
                await self._respond(router, routing_id, request, reply, chunks)
            except RefusedError as refusal:
                refused = _refused(refusal)
                if refused.reason in MISTAKES:
                    who = f"{request.sender or 'nobody'} at {host}"
                    why = f"{refused.reason}: {refused.detail}"
                    self.blame(Fault.REFUSED, who, f"{request.kind} of {who}: {why}")
                await self._respond(router, routing_id, request, refused)
            except Exception as error:  # whatever a handler does wrong, the peer lives on
                self.traffic.fault(Fault.HANDLER)
                if (culprit := (request.kind, type(error))) not in self._logged:
                    self._logged.add(culprit)
                    log.exception("answering a %s failed", request.kind)
                mistake = Refused(reason=Reason.BAD_REQUEST)
                await self._respond(router, routing_id, request, mistake)
        finally:
            self._answering -= 1
            self._waiting[asker] -= 1
            if not self._waiting[asker]:
                del self._waiting[asker]

    async def _respond(
        self,
        router: zmq.asyncio.Socket,
        routing_id: bytes,
        request: Request,
        reply: Reply,
        chunks: Sequence[Buffer] = (),
    ) -> None:
        """Answer a request over whatever network is between."""
        payload = sum(map(len, chunks))
        if self._shaper is None or await self._shaper.leave(request.sender, payload):
            await self._reply(router, routing_id, request.id, reply, chunks)

    async def _reply(
        self,
        router: zmq.asyncio.Socket,
        routing_id: bytes,
        number: int,
        reply: Reply,
        chunks: Sequence[Buffer] = (),
        *,
        patience: float | None = None,
    ) -> None:
        """Answer the request `number` of a sender that may be slow to read, or gone."""
        stamp = {"id": number, "sender": self._sender, "plan": self._plan}
        header = encode(reply.model_copy(update=stamp))
        if patience is None:
            # The fewer places are left, the sooner one is taken from a receiver that does not read.
            patience = SEND_PATIENCE * (1 - self._answering / MAX_WAITING)
        try:
            if await _send(router, [routing_id, header, *chunks], patience):
                self.traffic.sent(reply.kind, len(header), sum(map(len, chunks)))
        except TimeoutError:
            who = routing_id.hex()
            self.blame(Fault.SLOW_READER, routing_id, f"{who}: a {reply.kind} was not taken")

    # Asking.

    async def _link(self, address: str) -> _Link:
        """Return the connection to `address`, made now if need be."""
        if address not in self._links:
            keyless = key_of(address) is None
            if keyless is not (self._credentials is None):
                raise UnreachableError(f"{address} {'has no key' if keyless else 'has a key'}")
            try:
                target = parse_address(address)
                host = await self._resolve(target.host, "dial")
            except UserError as error:
                raise UnreachableError(error.message) from None
            # While the name was looked up another request may have made the connection.
            if address not in self._links:
                while len(self._links) >= MAX_LINKS:
                    self._retire(next(iter(self._links.values())))
                link = self._connect(address, HostPort(host, target.port).url)
                self._links[address] = link
                self._spawn(self._collect(link), f"collect-{address}")
        self._links.move_to_end(address)
        return self._links[address]

    def _connect(self, address: str, url: str) -> _Link:
        """Return a new connection. Raises UnreachableError when too many files are open."""
        with ExitStack() as undone:
            try:
                dealer = self._socket(zmq.DEALER)
                undone.callback(self._close, dealer)
                dealer.set(zmq.IMMEDIATE, 1)
                dealer.set(zmq.MAXMSGSIZE, CHUNK + _FRAME_MARGIN)
                dealer.set(zmq.LINGER, 0)
                dealer.set(zmq.SNDHWM, 64)
                key = key_of(address)
                if self._credentials is not None and key is not None:
                    present(self._credentials, dealer, key)
                monitor = observe(dealer, encrypted=self._credentials is not None)
            except zmq.ZMQError as error:
                raise UnreachableError(f"no connection: {error.strerror}") from None
            undone.pop_all()
        self._open.add(monitor)
        dealer.connect(url)
        return _Link(address, dealer, used=asyncio.get_running_loop().time(), monitor=monitor)

    async def _collect(self, link: _Link) -> None:
        if link.socket.closed:  # given up before this task had its first turn
            return
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(link.socket.underlying)
        while not link.socket.closed:
            frames = await _receive(link.socket, plain, link.most_frames)
            if not frames:
                return
            header, *chunks = frames
            if link.monitor is not None and self._credentials is None:
                # It does not encrypt either, and so for good: one socket less.
                link.socket.disable_monitor()
                self._close(link.monitor)
                link.monitor = None
            link.heard = asyncio.get_running_loop().time()
            self._deliver(link, header.buffer, [chunk.buffer for chunk in chunks])
            await asyncio.sleep(0)

    def _deliver(self, link: _Link, header: memoryview, chunks: list[memoryview]) -> None:
        """Hand one reply to the request that waits for it."""
        try:
            reply = decode(header)
            if not isinstance(reply, Reply):
                raise ProtocolError(f"{reply.kind} is not a reply")
        except ProtocolError as error:
            # It cannot be told whose reply this was meant to be: trust none of this connection's.
            self.traffic.fault(Fault.BAD_REPLY)
            link.fail(error)
            return
        payload = sum(map(len, chunks))
        self.traffic.received(reply.kind, len(header), payload)
        if isinstance(reply, Refused) and reply.reason is Reason.NOT_ADMITTED:
            # Nothing that is asked on this connection is even read there.
            self.blame(
                Fault.HANDSHAKE, (link.address, NOT_ADMITTED), f"{link.address}: {NOT_ADMITTED}"
            )
            link.fail(NotAdmittedError(f"{link.address}: {NOT_ADMITTED}"))
            self._retire(link)
            return
        pending = link.pending.get(reply.id)
        if pending is None or pending.reply.done():
            self.traffic.fault(Fault.LATE)
            return
        try:
            if not isinstance(reply, pending.expected | Refused):
                raise ProtocolError(f"{reply.kind} instead of {pending.expected.__name__}")
            limit = 0 if isinstance(reply, Refused) else pending.max_payload
            if payload > limit or len(chunks) > _most_chunks(limit):
                raise ProtocolError(f"{len(chunks)} chunks of {payload} bytes, at most {limit}")
        except ProtocolError as error:
            self.traffic.fault(Fault.BAD_REPLY)
            pending.reply.set_exception(error)
            return
        pending.reply.set_result((reply, chunks))

    def _retire(self, link: _Link) -> None:
        """Use `link` no more, and close it once nobody waits on it."""
        if self._links.get(link.address) is link:
            del self._links[link.address]
        if link.pending:
            self._retired.add(link)
        else:
            self._retired.discard(link)
            self._close(link.socket)
            if link.monitor is not None:
                self._close(link.monitor)

    def _complaint(self, link: _Link) -> str:
        """Return why nothing was heard on a connection, as far as its handshake tells."""
        why = complaint(link.monitor) if link.monitor is not None else ""
        if why:
            self.blame(Fault.HANDSHAKE, (link.address, why), f"{link.address}: {why}")
        return why

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(IDLE_LINK / 4)
            oldest = asyncio.get_running_loop().time() - IDLE_LINK
            for link in list(self._links.values()):
                if link.used < oldest and not link.pending:
                    self._retire(link)

    # Sockets and tasks.

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        created = self._context.socket(kind)
        self._open.add(created)
        created.set(zmq.RCVHWM, 4)
        created.set(zmq.HANDSHAKE_IVL, 3_000)
        created.set(zmq.RECONNECT_IVL, 100)
        created.set(zmq.RECONNECT_IVL_MAX, 5_000)
        created.set(zmq.TCP_KEEPALIVE, 1)
        created.set(zmq.TCP_KEEPALIVE_IDLE, 15)
        created.set(zmq.TCP_KEEPALIVE_INTVL, 5)
        created.set(zmq.TCP_KEEPALIVE_CNT, 3)
        # Milliseconds for which sent bytes may go unacknowledged.
        created.set(zmq.TCP_MAXRT, 30_000)
        created.set(zmq.IPV6, 0)
        return created

    def _close(self, socket: zmq.asyncio.Socket) -> None:
        """Close a socket; its receiver ends with it."""
        self._open.discard(socket)
        socket.close()

    def _close_sockets(self) -> None:
        for socket in list(self._open):
            self._close(socket)
        self._links.clear()
        self._resolver.shutdown(wait=False, cancel_futures=True)
        if self._shared_context is None:
            self._context.term()

    async def _resolve(self, host: str, purpose: str) -> str:
        """Return the IPv4 address of a host. Raises UserError when there is none."""
        try:
            return str(IPv4Address(host))
        except ValueError:
            pass
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(
                self._resolver, lambda: sockets.getaddrinfo(host, None, sockets.AF_INET)
            )
        except (OSError, UnicodeError) as error:
            raise UserError(f"cannot {purpose} {host}: {error}", "check the host's name") from None
        return str(found[0][4][0])

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._tasks.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)


async def _receive(
    socket: zmq.asyncio.Socket, plain: zmq.Socket[bytes], most_frames: Callable[[], int]
) -> list[zmq.Frame]:
    """Return the next message: its first frames, and one too many if it has more than it may; none
    when the socket was closed meanwhile.

    `plain` is the same socket without asyncio, whose receive costs a tenth.
    The rest is dropped, a piece at a time: two bytes on the wire make a frame, whose object is a
    hundred times as large and takes a microsecond of the loop.
    """
    frames = [await socket.recv(copy=False)]
    most = most_frames()
    more, taken = frames[0].more, 1
    # Whenever this task waits, others may close the socket.
    while more and not socket.closed:
        # What libzmq shows the beginning of has arrived as a whole: this never waits.
        frame = plain.recv(zmq.NOBLOCK, copy=False)
        more, taken = frame.more, taken + 1
        if len(frames) <= most:
            frames.append(frame)
        if taken % 1000 == 0:
            await asyncio.sleep(0)
    return [] if socket.closed else frames


def _most_chunks(payload: int) -> int:
    """Return how many chunks may carry `payload` bytes: one more than full ones for each of the two
    vectors of a model."""
    return payload // CHUNK + 2 if payload else 0


def _host(frames: Sequence[zmq.Frame]) -> str:
    """Return the IP address that a message came from, as far as libzmq says it."""
    return _property(frames, "Peer-Address") or "somebody"


def _property(frames: Sequence[zmq.Frame], name: str) -> str:
    """Return what the handshake of a message's connection said by a name, empty without."""
    try:
        return str(frames[0].get(name))
    except (IndexError, zmq.ZMQError):
        return ""


async def _send(
    socket: zmq.asyncio.Socket,
    frames: Sequence[Buffer],
    patience: float,
    *,
    until: Callable[[], bool] = lambda: False,
) -> bool:
    """Hand the frames to ZeroMQ; return False when the receiver or the socket is gone, or once
    `until` says that there is no need any more.

    Raises TimeoutError when the receiver's queue stays full for `patience` seconds.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    pause = 0.001
    while True:
        try:
            # pyzmq copies frames below 64 KiB all the same, where copying is cheaper.
            await socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            if loop.time() + pause > deadline:
                raise TimeoutError from None
        except zmq.ZMQError:
            return False
        else:
            return True
        await asyncio.sleep(pause)
        if until():
            return False
        pause = min(2 * pause, 0.05)


def _refused(refusal: RefusedError) -> Refused:
    """Return the message that carries a refusal, in the characters that it allows."""
    detail = refusal.detail.encode("ascii", "replace").decode()
    printable = "".join(c if c.isprintable() else "?" for c in detail)
    known = {reason.value for reason in Reason}
    reason = Reason(refusal.reason) if refusal.reason in known else Reason.BAD_REQUEST
    return Refused(reason=reason, detail=printable[:300])
