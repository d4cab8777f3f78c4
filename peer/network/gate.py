"""Who may connect: the answers to libzmq's question (ZAP, ZeroMQ RFC 27), and what becomes known of
handshakes that fail.

libzmq asks once for every connection, before it passes on anything of what the other side says,
and refuses the connection unless it is told otherwise. pyzmq's `AsyncioAuthenticator` is not used:
an exception while it decides ends it unseen, and every later connection is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NoReturn

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from peer.network.traffic import Fault

if TYPE_CHECKING:
    from peer.network.federation import Credentials

log = logging.getLogger(__name__)

Blame = Callable[[Fault, object, str], None]

DOMAIN: Final = b"panmesh"
METADATA: Final = "X-Panmesh"
"""Property of a connection's handshake in which a peer introduces itself."""
REFRESH: Final = 1.0
"""Seconds between two looks whether the federation file has changed."""

NOT_ADMITTED: Final = "it does not admit this peer"

_ENDPOINT: Final = "inproc://zeromq.zap.01"
_BROKEN_OFF: Final = "it broke off the handshake: it stood still, or has another key or none"
_MISTAKES: Final = {
    0x11000001: "it takes another for this one",
    0x11000002: "it does not encrypt, or this one does not",
}
"""libzmq's ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC and _MECHANISM_MISMATCH, for people."""


class Gate:
    """Admits connections to the listening sockets of one ZeroMQ context, which has one gate at
    most.

    Args:
        context: whose. credentials: who decides. blame: told of every refusal: fault, culprit and
            a line about it.
    """

    def __init__(
        self, context: zmq.asyncio.Context, credentials: Credentials, blame: Blame
    ) -> None:
        self._credentials = credentials
        self._blame = blame
        self.socket = context.socket(zmq.REP)
        """To be closed by the owner."""
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(_ENDPOINT)

    def guard(self, listening: zmq.asyncio.Socket) -> zmq.asyncio.Socket:
        """Make a socket, before it is bound, ask this gate; return what to `watch` it by."""
        listening.set(zmq.CURVE_SERVER, 1)
        listening.set(zmq.CURVE_SECRETKEY, self._credentials.key.curve.secret)
        listening.set(zmq.ZAP_DOMAIN, DOMAIN)
        listening.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        # Which of the two it is depends on who notices first. A refusal is counted by `serve`.
        failures = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        monitor: zmq.asyncio.Socket = listening.get_monitor_socket(failures)
        return monitor

    async def serve(self) -> NoReturn:
        """Decide, one connection after the other."""
        while True:
            question = await self.socket.recv_multipart()
            version, number = question[:2]
            try:
                user = self._decide(question)
            except Exception:  # whatever is wrong with one connection, the next one is admitted
                log.exception("deciding about a connection failed")
                user = None
            status = (b"400", b"not admitted", b"") if user is None else (b"200", b"", user)
            await self.socket.send_multipart([version, number, *status, b""])

    def _decide(self, question: list[bytes]) -> bytes | None:
        """Return the User-Id of a new connection; None refuses it."""
        _, _, domain, address, _, mechanism, *keys = question
        user = None
        if (domain, mechanism) == (DOMAIN, b"CURVE"):
            user = self._credentials.admit(keys[0])
        if user is None:
            host = address.decode("ascii", "replace")
            self._blame(Fault.UNLISTED, ("gate", host), f"{host} is not admitted")
            return None
        return user.encode()

    async def watch(self, monitor: zmq.asyncio.Socket) -> NoReturn:
        """Count the handshakes with a listening socket that fail before anything is asked."""
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())
            why = "it was broken off"
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                why = _mistake(event["value"])
            line = f"a handshake of somebody's failed: {why}"
            self._blame(Fault.HANDSHAKE, ("handshake", why), line)

    async def refresh(self) -> NoReturn:
        """Keep up with the federation file."""
        while True:
            await asyncio.sleep(REFRESH)
            self._credentials.refresh()


def present(credentials: Credentials, connecting: zmq.asyncio.Socket, server: bytes) -> None:
    """Make a socket, before it is connected, show who this peer is to the holder of a CURVE key,
    and to nobody else."""
    keys = credentials.connecting
    connecting.set(zmq.CURVE_SERVERKEY, server)
    connecting.set(zmq.CURVE_PUBLICKEY, keys.public)
    connecting.set(zmq.CURVE_SECRETKEY, keys.secret)
    introduction = credentials.introduction(server)
    connecting.set(zmq.METADATA, f"{METADATA}:{introduction}".encode())


def observe(connecting: zmq.asyncio.Socket, *, encrypted: bool) -> zmq.asyncio.Socket:
    """Return a socket that `complaint` reads."""
    failures = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    if encrypted:  # else only who dies or stands still breaks off a handshake
        failures |= zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    monitor: zmq.asyncio.Socket = connecting.get_monitor_socket(failures)
    return monitor


def complaint(monitor: zmq.asyncio.Socket) -> str:
    """Return why the last handshake of an observed socket failed; empty when none has since the
    last call."""
    plain: zmq.Socket[bytes] = zmq.Socket.shadow(monitor.underlying)
    last = ""
    while plain.poll(0):
        event = parse_monitor_message(plain.recv_multipart())
        match event["event"]:
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                last = NOT_ADMITTED
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                last = _mistake(event["value"])
            case _:  # of a handshake that failed for a known reason, too
                last = last or _BROKEN_OFF
    return last


def _mistake(code: int) -> str:
    """Return what a protocol error of libzmq means for people."""
    return _MISTAKES.get(code, f"error {code:#x}")
