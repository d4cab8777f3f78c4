"""A connection to an MQTT broker that comes back, and says again what it said: all of aiomqtt.

aiomqtt does not reconnect by itself, so `Broker.run` does, for ever, with growing pauses. What a
client wants the broker to hold (retained messages) is a table here, not a sequence of calls: it is
published at every connection, when it changes, and when the broker shows that it holds something
else under that topic. A broker that lost everything has it again a moment after it is back.

A packet that is larger than `MAX_PACKET` is never sent by a broker that keeps to MQTT 5, which is
therefore what is spoken; the queue of unread messages is bounded, too.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from pydantic import SecretStr

from peer.errors import UserError, first_failure
from peer.network.address import is_loopback, parse_address, without_password

if TYPE_CHECKING:
    import aiomqtt
    import numpy as np

log = logging.getLogger(__name__)

PORT, TLS_PORT = 1883, 8883
MAX_PACKET = 40 * 1024
"""Bytes of a packet: that of a plan is the largest there is."""
MAX_QUEUED = 1000
"""Messages that wait to be read; further ones are lost, as are those that a broker drops."""
KEEPALIVE = 8
"""Seconds of silence after which client and broker ping each other; after 1.5 times as many the
broker publishes the last will. Bounds a TLS handshake, too, which nothing can interrupt."""
PATIENCE = 10.0
"""Seconds that the broker has to acknowledge."""
FIRST_PAUSE, LONGEST_PAUSE, GROWTH = 0.5, 30.0, 1.6
"""Seconds between two attempts to connect, and by what they grow."""
BREATH = 0.2
"""Seconds between two rounds of publishing: whoever overwrites others' topics cannot make them
answer without end."""

_REFUSED = (134, 135, 138)
"""MQTT 5 reason codes: bad user name or password, not authorised, banned."""


@dataclass(frozen=True)
class Login:
    """How to reach a broker: a URL of a person's, taken apart, and the secrets that belong to it.

    `federation` names the topics, PREFIX/FEDERATION/...
    """

    host: str
    port: int
    federation: str
    tls: bool = True
    user: str | None = None
    password: SecretStr | None = None
    ca: Path | None = None

    @classmethod
    def parse(cls, url: str, *, password: SecretStr | None = None, ca: Path | None = None) -> Login:
        """Parse mqtts://[USER@]HOST[:PORT][/FEDERATION]; the federation is `panmesh` if not named.

        Raises UserError, which never repeats what may be a password.
        """
        example = "write mqtts://USER@HOST:8883/FEDERATION"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise UserError("the broker's URL has a port that is none", example) from None
        if parts.password is not None:
            raise UserError(
                "the broker's URL holds a password, which others can see in the list of processes",
                "leave it out; give --mqtt-password FILE or PANMESH_MQTT_PASSWORD",
            )
        federation = parts.path.strip("/") or "panmesh"
        # In a password that is written plainly, / ? and # end up there.
        misplaced = parts.query or parts.fragment or "@" in parts.path
        if parts.scheme not in ("mqtt", "mqtts") or not parts.hostname or misplaced:
            raise UserError(f"{without_password(url)!r} is not the URL of a broker", example)
        if not federation.replace("-", "").replace("_", "").isalnum() or len(federation) > 64:
            raise UserError(f"{federation!r} is not the name of a federation", example)
        tls = parts.scheme == "mqtts"
        host, port = parse_address(f"{parts.hostname}:{port or (TLS_PORT if tls else PORT)}")
        if password is not None and not tls and not is_loopback(host):
            raise UserError(
                f"the password would go to {host} in clear text", "use mqtts://, or no password"
            )
        user = None if parts.username is None else unquote(parts.username)
        return cls(host, port, federation, tls, user, password, ca)

    @property
    def place(self) -> str:
        """Where the broker is, without secrets."""
        return f"{'mqtts' if self.tls else 'mqtt'}://{self.host}:{self.port}"

    def tls_context(self) -> ssl.SSLContext | None:
        """Return how to check the broker's certificate, None without TLS. Raises UserError."""
        if not self.tls:
            return None
        try:
            return ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as error:
            raise UserError(f"cannot use the CA file {self.ca}: {error}") from None


def _heed_cancellation() -> None:
    """Raise CancelledError if this task has been cancelled, which it may not have noticed.

    A task group whose task fails at the same moment raises that failure instead, and so does
    asyncio.wait_for, of which aiomqtt makes use, return what it waited for.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class Broker:
    """A client of one broker, connected by `run` whenever that is possible.

    Args:
        login: where the broker is.
        client: the client's name; a new connection of that name ends an older one.
        will: topic whose retained message the broker clears when this client is gone.
        on_message: called with the topic and payload of every message; must not raise.
        rng: of the jitter of pauses.

    Raises UserError when the CA file cannot be used.
    """

    def __init__(
        self,
        login: Login,
        *,
        client: str,
        will: str | None = None,
        on_message: Callable[[str, bytes], None],
        rng: np.random.Generator,
    ) -> None:
        self._login = login
        self._client_name = client
        self._filters: list[str] = []
        self._will = will
        self._on_message = on_message
        self._rng = rng
        self._tls = login.tls_context()
        self._held: dict[str, bytes] = {}
        self._due: set[str] = set()
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._said = asyncio.Event()
        self._echoed = asyncio.Event()
        self._met = False

    @property
    def settled(self) -> bool:
        """Whether the broker is there, and has acknowledged all that was asked of it."""
        return self._settled.is_set()

    async def wait_settled(self) -> None:
        """Wait until `settled`."""
        await self._settled.wait()

    def follow(self, topic: str) -> None:
        """Have `on_message` called from now on with what the broker holds and gets by a filter."""
        self._filters.append(topic)
        self._soon()

    def hold(self, topic: str, payload: bytes) -> None:
        """Have the broker hold a retained message from now on; an empty one clears the topic."""
        if self._held.get(topic) != payload:
            self._held[topic] = payload
            self._due.add(topic)
            self._soon()

    def release(self, topic: str) -> None:
        """Leave a topic to others: what the broker holds there is no more this client's."""
        self._held.pop(topic, None)
        self._due.discard(topic)

    async def run(self) -> None:
        """Stay connected; never returns.

        Raises UserError when the broker, never met before, refuses this client for good: its
        certificate cannot be verified, or user and password are wrong.
        """
        from aiomqtt import MqttError

        pause, lost = FIRST_PAUSE, False
        while True:
            began = asyncio.get_running_loop().time()
            try:
                async with self._new_client() as client:
                    if lost:
                        log.info("broker %s found again", self._login.place)
                    lost = False
                    await self._converse(client)
            except MqttError as error:
                _heed_cancellation()
                self._check_first(error)
                if not lost:
                    word = "lost" if self._met else "does not answer"
                    log.warning("broker %s %s (%s); trying on", self._login.place, word, error)
                lost = True
            finally:
                self._settled.clear()
            if asyncio.get_running_loop().time() - began > LONGEST_PAUSE:
                pause = FIRST_PAUSE
            await asyncio.sleep(pause * float(self._rng.uniform(0.5, 1.5)))
            pause = min(LONGEST_PAUSE, pause * GROWTH)

    def _new_client(self) -> aiomqtt.Client:
        import aiomqtt
        from paho.mqtt.packettypes import PacketTypes
        from paho.mqtt.properties import Properties

        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.MaximumPacketSize = MAX_PACKET
        login = self._login
        quiet = logging.getLogger(f"{__name__}.client")
        quiet.setLevel(logging.ERROR)
        return aiomqtt.Client(
            login.host,
            login.port,
            username=login.user,
            password=None if login.password is None else login.password.get_secret_value(),
            identifier=self._client_name,
            protocol=aiomqtt.ProtocolVersion.V5,
            properties=properties,
            will=aiomqtt.Will(self._will, b"", qos=1, retain=True) if self._will else None,
            tls_context=self._tls,
            keepalive=KEEPALIVE,
            timeout=PATIENCE,
            max_queued_incoming_messages=MAX_QUEUED,
            logger=quiet,
        )

    async def _converse(self, client: aiomqtt.Client) -> None:
        """Read and publish until the connection ends. Raises MqttError."""
        self._met = True
        self._due.update(self._held)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(client), name="mqtt-read")
                if not self._echoed.is_set():
                    tasks.create_task(self._expect_echo(), name="mqtt-echo")
                await self._talk(client)
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None

    async def _read(self, client: aiomqtt.Client) -> None:
        async for message in client.messages:
            topic, payload = str(message.topic), bytes(message.payload or b"")
            if topic in self._held:
                self._echoed.set()
                if self._held[topic] != payload:
                    self._due.add(topic)
                    self._soon()
            self._on_message(topic, payload)

    async def _talk(self, client: aiomqtt.Client) -> None:
        """Subscribe and publish, at once and whenever there is something new."""
        followed = 0
        while True:
            _heed_cancellation()
            self._wake.clear()
            for topic in self._filters[followed:]:
                await client.subscribe(topic, qos=1)
                followed += 1
            while self._due:
                topic = self._due.pop()
                await client.publish(topic, self._held[topic], qos=1, retain=True)
                self._said.set()
            if not self._wake.is_set():
                self._settled.set()
            await asyncio.sleep(BREATH)
            await self._wake.wait()

    async def _expect_echo(self) -> None:
        """Say so where the broker drops what this client publishes or should get, as it silently
        does where its access control list does not allow that."""
        await self._said.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                await self._echoed.wait()
        if not self._echoed.is_set():
            log.warning(
                "the broker %s does not hand on what this client publishes: does its access "
                "control list let user %s write and read panmesh/%s/#?",
                *(self._login.place, self._login.user, self._login.federation),
            )

    def _soon(self) -> None:
        self._settled.clear()
        self._wake.set()

    def _check_first(self, error: aiomqtt.MqttError) -> None:
        """Raise UserError for what a person must mend before the first connection."""
        if self._met:
            return
        code = getattr(getattr(error, "rc", None), "value", None)
        if code in _REFUSED:
            raise UserError(
                f"the broker {self._login.place} refuses this client: {error}",
                "check the user in the URL and the password (--mqtt-password FILE)",
            ) from None
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise UserError(
                f"the certificate of {self._login.place} cannot be verified: {error}",
                "give the CA's certificate by --mqtt-ca FILE, and the name that it was made for",
            ) from None
