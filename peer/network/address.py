"""Addresses as people write them (HOST:PORT) and as ZeroMQ wants them (tcp://HOST:PORT); IPv4.

With keys an address says who must be there: tcp://KEY@HOST:PORT, where KEY is the CURVE public key
of who listens, as 64 hexadecimal digits. A connection to it is made with the holder of that key, or
not at all.
"""

from __future__ import annotations

import asyncio
import re
import socket
from ipaddress import IPv4Address
from typing import NamedTuple

from peer.errors import UserError

BOOTSTRAP_PORT = 7700
"""Default port of a bootstrap node."""

_KEYED = re.compile(r"(?:tcp://)?(?:([0-9a-f]{64})@)?(.*)")
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
    """Parse "HOST:PORT", "tcp://HOST:PORT", or "HOST" where there is a default port; a key before
    the host, which is for dialling only, is left out.

    Port 0 (any free one) is for listening only, as is the host 0.0.0.0. Raises UserError.
    """
    found = _KEYED.fullmatch(text.strip())
    bare = found[2] if found and not (listening and found[1]) else ""
    host, colon, digits = bare.rpartition(":")
    if not colon:
        host, digits = digits, "" if default_port is None else str(default_port)
    if not _HOST.fullmatch(host) or not re.fullmatch("[0-9]{1,5}", digits):
        raise UserError(
            f"{without_password(text)!r} is not an address",
            "write HOST:PORT, for example 127.0.0.1:7700",
        )
    port = int(digits)
    if port > 65_535 or (port == 0 and not listening):
        raise UserError(f"{text!r}: {port} is not a port that can be dialled")
    if host == "0.0.0.0" and not listening:  # noqa: S104 - refused, not bound
        raise UserError(f"{text!r}: 0.0.0.0 is no address to dial", "name the host itself")
    return HostPort(host, port)


def dial_address(text: str) -> str:
    """Return tcp://HOST:PORT for an address to dial, with its key if it has one; the default port
    is a bootstrap node's.

    Raises UserError.
    """
    return with_key(parse_address(text, default_port=BOOTSTRAP_PORT).url, key_of(text))


def key_of(address: str) -> bytes | None:
    """Return the 32-byte CURVE key that an address (any form people write) names, None without."""
    found = _KEYED.fullmatch(address.strip())
    return bytes.fromhex(found[1]) if found and found[1] else None


def with_key(url: str, key: bytes | None) -> str:
    """Return tcp://KEY@HOST:PORT for tcp://HOST:PORT; the same without a key."""
    return url if key is None else f"tcp://{key.hex()}@{url.removeprefix('tcp://')}"


def without_password(text: str) -> str:
    """Return an address or a URL as it may be shown: what stands before its @ is left out unless it
    is a plain user name or key, since a password may be part of it."""
    before, at, place = text.rpartition("@")
    plain = re.fullmatch(r"(?:[a-z]+://)?[^:/?#@]*", before)
    return text if not at or plain else f"…@{place}"


def is_loopback(host: str) -> bool:
    """Return whether an IPv4 address, or the name localhost, is reached from this machine only."""
    try:
        return IPv4Address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
