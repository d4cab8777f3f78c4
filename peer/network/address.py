"""Addresses as people write them (HOST:PORT) and as ZeroMQ wants them (tcp://HOST:PORT); IPv4."""

from __future__ import annotations

import asyncio
import re
import socket
from typing import NamedTuple

from peer.errors import UserError

BOOTSTRAP_PORT = 7700
"""Default port of a bootstrap node."""

_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}")


class HostPort(NamedTuple):
    """A host name or IPv4 address, and a TCP port."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """As ZeroMQ wants it."""
        return f"tcp://{self.host}:{self.port}"


def parse_address(
    text: str, *, default_port: int | None = None, listening: bool = False
) -> HostPort:
    """Parse "HOST:PORT", "tcp://HOST:PORT", or "HOST" where there is a default port.

    Port 0 (any free one) is for listening only, as is the host 0.0.0.0. Raises UserError.
    """
    host, colon, digits = text.strip().removeprefix("tcp://").rpartition(":")
    if not colon:
        host, digits = digits, "" if default_port is None else str(default_port)
    if not _HOST.fullmatch(host) or not re.fullmatch("[0-9]{1,5}", digits):
        raise UserError(
            f"{text!r} is not an address", "write HOST:PORT, for example 127.0.0.1:7700"
        )
    port = int(digits)
    if port > 65_535 or (port == 0 and not listening):
        raise UserError(f"{text!r}: {port} is not a port that can be dialled")
    if host == "0.0.0.0" and not listening:  # noqa: S104 - refused, not bound
        raise UserError(f"{text!r}: 0.0.0.0 is no address to dial", "name the host itself")
    return HostPort(host, port)


def dial_address(text: str) -> str:
    """Return tcp://HOST:PORT for an address to dial; the default port is a bootstrap node's.

    Raises UserError.
    """
    return parse_address(text, default_port=BOOTSTRAP_PORT).url


async def deserted(address: str, seconds: float) -> bool:
    """Return whether the host of `address` refuses connections to it: nobody listens there.

    A host that says nothing in `seconds` may be slow, or cut off.
    """
    try:
        host, port = parse_address(address)
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host, port, family=socket.AF_INET)
    except ConnectionRefusedError:
        return True
    except (UserError, OSError):
        return False
    writer.close()
    return False


def facing(address: str) -> str:
    """Return the address of this machine's interface that faces `address` (any form people write).

    Nothing is sent: connecting a datagram socket only asks the kernel for the route. Raises
    UserError when the name does not resolve or there is no route.
    """
    host, port = parse_address(address, default_port=BOOTSTRAP_PORT)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as error:
            raise UserError(
                f"cannot tell which interface faces {host}: {error.strerror or error}",
                "give --advertise HOST",
            ) from None
        local: str = probe.getsockname()[0]
    return local
