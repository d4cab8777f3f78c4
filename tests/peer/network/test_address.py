"""Addresses as people write them."""

from __future__ import annotations

import asyncio

import pytest

from peer.errors import UserError
from peer.network.address import deserted, dial_address, facing, parse_address, without_password


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:7701", "tcp://127.0.0.1:7701"),
        ("tcp://example.org:1", "tcp://example.org:1"),
        (" host_1.local:65535 ", "tcp://host_1.local:65535"),
        ("example.org", "tcp://example.org:7700"),
    ],
)
def test_dialled(text: str, url: str) -> None:
    assert dial_address(text) == url


@pytest.mark.parametrize(
    "text",
    ["", ":7700", "a:", "a:x", "a:0", "a:65536", "0.0.0.0:7700", "a b:1", "::1", "a/x:1"],
)
def test_not_dialled(text: str) -> None:
    with pytest.raises(UserError):
        dial_address(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("mqtts://me@broker/town", "mqtts://me@broker/town"),
        ("a" * 64 + "@host:1", "a" * 64 + "@host:1"),
        ("host:1", "host:1"),
        ("mqtts://me:hunter2@broker/town", "…@broker/town"),
        ("me:hunter2@broker", "…@broker"),
        ("mqtts://me:hunt://er2@broker", "…@broker"),
        ("me:hunt@er2@broker", "…@broker"),
        ("mqtts://me/hunter2@broker", "…@broker"),
    ],
)
def test_what_may_hold_a_password_is_not_shown(text: str, shown: str) -> None:
    assert without_password(text) == shown
    with pytest.raises(UserError) as caught:
        parse_address(f"{text}:no-port")
    assert "er2" not in str(caught.value)


def test_listening_takes_any_port_and_interface() -> None:
    assert parse_address("0.0.0.0:0", listening=True) == ("0.0.0.0", 0)
    with pytest.raises(UserError, match="is not an address"):
        parse_address("127.0.0.1", listening=True)


def test_interface_that_faces_another() -> None:
    assert facing("127.0.0.1:7700") == "127.0.0.1"
    assert facing("localhost") == "127.0.0.1"
    with pytest.raises(UserError, match="no-such-host"):
        facing("no-such-host.invalid:1")


async def test_an_address_is_deserted_when_its_host_refuses() -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        assert not await deserted(address, 5.0)
    assert await deserted(address, 5.0)
    assert not await deserted("tcp://127.0.0.1:99999", 5.0)
    assert not await deserted("tcp://nowhere.invalid:1", 5.0)
