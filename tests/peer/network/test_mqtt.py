"""The connection to a broker: URLs, TLS and passwords, and a broker that is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from mosquitto import PASSWORD, Mosquitto, mosquitto, needs_mosquitto
from pydantic import SecretStr

from peer.errors import UserError
from peer.network.mqtt import MAX_PACKET, Broker, Login


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Mosquitto]:
    with mosquitto(tmp_path / "broker") as broker:
        yield broker


class Client:
    """A client that keeps the last message of each topic."""

    def __init__(self, login: Login, name: str, *, will: str | None = None) -> None:
        self.heard: dict[str, bytes] = {}
        self.broker = Broker(
            login,
            client=name,
            will=will,
            on_message=self.heard.__setitem__,
            rng=np.random.default_rng(0),
        )
        self.broker.follow("panmesh/town/#")


@asynccontextmanager
async def client(login: Login, name: str, *, will: str | None = None) -> AsyncIterator[Client]:
    made = Client(login, name, will=will)
    task = asyncio.create_task(made.broker.run())
    try:
        yield made
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool], seconds: float = 90.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - of what no event tells
            await asyncio.sleep(0.02)


def test_a_url_is_taken_apart() -> None:
    login = Login.parse("mqtts://me%40home@broker.example/town")
    assert login == Login("broker.example", 8883, "town", tls=True, user="me@home")
    assert Login.parse("mqtt://127.0.0.1") == Login("127.0.0.1", 1883, "panmesh", tls=False)
    assert Login.parse("mqtt://b:99").port == 99
    secret = Login.parse("mqtts://me@b", password=SecretStr(PASSWORD))
    assert PASSWORD not in repr(secret) + secret.place


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mqtts://me:hunter2@broker", "holds a password"),
        ("mqtts://me:hunter2@broker:99999", "port"),
        ("me:hunter2@broker:8883", "'…@broker:8883' is not the URL of a broker"),
        ("mqtts:me:hunter2@broker:8883", "is not the URL of a broker"),
        ("mqtts://me:12/hunter2@broker", "'…@broker' is not the URL of a broker"),
        ("mqtts://me:12?hunter2@broker", "is not the URL of a broker"),
        ("mqtts://me:12#hunter2@broker", "is not the URL of a broker"),
        ("mqtts://me:h@hunter2@broker", "holds a password"),
        ("me:hunter2@broker", "is not the URL of a broker"),
        ("http://broker", "is not the URL of a broker"),
        ("broker:8883", "is not the URL of a broker"),
        ("mqtts://", "is not the URL of a broker"),
        ("mqtts://broker?x=1", "is not the URL of a broker"),
        ("mqtts://broker:70000", "port"),
        ("mqtts://br%20oker", "is not an address"),
        ("mqtts://broker/a/b", "is not the name of a federation"),
        ("mqtts://broker/+", "is not the name of a federation"),
    ],
)
def test_urls_that_are_none(url: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Login.parse(url)
    assert "hunter2" not in caught.value.message + caught.value.hint


def test_no_password_in_clear_text_beyond_loopback() -> None:
    secret = SecretStr(PASSWORD)
    assert Login.parse("mqtt://me@127.0.0.1", password=secret).password == secret
    assert Login.parse("mqtt://me@localhost", password=secret).password == secret
    with pytest.raises(UserError, match="in clear text"):
        Login.parse("mqtt://me@broker", password=secret)


def test_a_ca_file_that_is_none(tmp_path: Path) -> None:
    for file in (tmp_path / "missing.pem", Path(__file__)):
        with pytest.raises(UserError, match="cannot use the CA file"):
            Login.parse("mqtts://broker", ca=file).tls_context()


@needs_mosquitto
async def test_what_is_held_survives_the_broker(server: Mosquitto) -> None:
    async with client(server.login, "a") as a, client(server.login, "b") as b:
        a.broker.hold("panmesh/town/x", b"1")
        await a.broker.wait_settled()
        await until(lambda: b.heard.get("panmesh/town/x") == b"1")
        server.kill()
        await until(lambda: not (a.broker.settled or b.broker.settled))
        a.broker.hold("panmesh/town/x", b"2")
        server.start()
        await until(lambda: b.heard.get("panmesh/town/x") == b"2")
        # A client that comes only now is told as well: it is retained.
        async with client(server.login, "c") as c:
            await until(lambda: c.heard.get("panmesh/town/x") == b"2")
            # Whoever overwrites or clears it has the owner against him.
            for payload in (b"forged", b""):
                c.broker.hold("panmesh/town/x", payload)
                await c.broker.wait_settled()
                c.broker.release("panmesh/town/x")
                await until(lambda: c.heard.get("panmesh/town/x") == b"2")


@needs_mosquitto
async def test_the_will_clears_the_topic_of_one_that_is_gone(server: Mosquitto) -> None:
    topic = "panmesh/town/peers/x"
    async with (
        client(server.login, "watcher") as watcher,
        client(server.login, "dying", will=topic) as dying,
    ):
        dying.broker.hold(topic, b"here")
        await until(lambda: watcher.heard.get(topic) == b"here")
        dying.broker.release(topic)
        # A second client of that name ends the first one's connection, without a goodbye.
        async with client(server.login, "dying"):
            await until(lambda: watcher.heard.get(topic) == b"")


@needs_mosquitto
async def test_large_messages_do_not_arrive(server: Mosquitto) -> None:
    async with client(server.login, "a") as a, client(server.login, "b") as b:
        a.broker.hold("panmesh/town/large", bytes(MAX_PACKET))
        a.broker.hold("panmesh/town/small", b"1")
        await a.broker.wait_settled()
        await until(lambda: b.heard.get("panmesh/town/small") == b"1")
        assert "panmesh/town/large" not in b.heard


@needs_mosquitto
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"password": SecretStr("wrong")}, "refuses this client"),
        ({"user": None, "password": None}, "refuses this client"),
        ({"ca": None}, "cannot be verified"),
    ],
)
async def test_who_is_refused_is_told(
    server: Mosquitto, change: dict[str, object], message: str
) -> None:
    from dataclasses import replace

    login = replace(server.login, **change)  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        with pytest.raises(UserError, match=message) as caught:
            await Client(login, "a").broker.run()
    assert PASSWORD not in caught.value.message


@needs_mosquitto
async def test_a_broker_that_lets_nobody_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.network.mqtt.PATIENCE", 1.0)
    with mosquitto(tmp_path / "broker", access="topic write panmesh/#") as server:
        async with client(server.login, "a") as a:
            a.broker.hold("panmesh/town/x", b"1")
            await until(lambda: "does not hand on" in caplog.text)
    assert "let user panmesh write and read panmesh/town/#" in caplog.text


@needs_mosquitto
async def test_it_waits_for_a_broker_that_is_not_there_yet(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Mosquitto(tmp_path / "broker")
    server.prepare()
    try:
        async with client(server.login, "a") as a:
            a.broker.hold("panmesh/town/x", b"1")
            await until(lambda: "does not answer" in caplog.text)
            server.start()
            await until(lambda: a.heard.get("panmesh/town/x") == b"1")
    finally:
        server.kill()
    assert caplog.text.count("does not answer") == 1
    assert PASSWORD not in caplog.text
