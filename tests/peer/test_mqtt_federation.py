"""Federations that meet at a broker: without a bootstrap node, while the broker dies and comes
back, and among records of strangers."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq.asyncio
from mosquitto import PASSWORD, Mosquitto, mosquitto, needs_mosquitto
from softmax import Softmax

from peer.errors import ProtocolError, UserError
from peer.learning.learner import Vector
from peer.network.discovery import (
    MAX_RECORD,
    Measured,
    Presence,
    Register,
    open_metrics,
    seal,
    sign_plan,
)
from peer.network.federation import found
from peer.network.identity import IdentityKey, Purpose
from peer.network.messages import PeerRecord, State, Status, Update
from peer.network.mqtt import MAX_PACKET, Broker
from peer.node import LearnerFactory, Peer
from peer.plan import Plan
from peer.rounds import Result
from peer.rundir import MetricRow, read_json, read_metrics
from peer.settings import PeerSettings
from peer.watch import publish, watch
from simulations.processes import Worker

pytestmark = needs_mosquitto

PLAN = Plan.model_validate(
    {
        "name": "town",
        "n": 4,
        "rounds": 6,
        "method": "panm-grad",
        "model": "custom",
        "data": "own",
        "matching": {"l": 3, "k": 2},
        "partition": {"kind": "rotation", "clusters": 2},
        "network": {"request_timeout": 5.0, "linger": 5.0},
    }
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Mosquitto]:
    with mosquitto(tmp_path / "broker") as broker:
        yield broker


class Village:
    """Peers of a plan that meet at a broker, and one who looks at what it holds."""

    def __init__(self, server: Mosquitto, directory: Path, plan: Plan) -> None:
        self.plan = plan
        self.peers: dict[str, asyncio.Task[Result]] = {}
        self.heard: dict[str, bytes] = {}
        self.watcher = Broker(
            server.login,
            client="watcher",
            on_message=self.heard.__setitem__,
            rng=np.random.default_rng(0),
        )
        self.watcher.follow("panmesh/town/#")
        self._server = server
        self._directory = directory
        self._context = zmq.asyncio.Context()
        self._worker = ThreadPoolExecutor(4)

    def join(
        self, name: str, *, make_learner: LearnerFactory = Softmax, plan: Plan | None, **more: Any
    ) -> None:
        """Start a peer, with the state that it left if it has run before."""
        settings = PeerSettings.gather(
            config=None,
            mqtt=f"{self._server.url}/town",
            mqtt_ca=self._server.ca,
            mqtt_password=PASSWORD,
            state=self._directory / name,
            **more,
        )
        peer = Peer(
            settings,
            plan=plan,
            make_learner=make_learner,
            worker=self._worker,
            context=self._context,
        )
        self.peers[name] = asyncio.create_task(peer.run(), name=name)

    async def part(self, name: str) -> None:
        """End a peer; it says goodbye."""
        self.peers[name].cancel()
        with suppress(asyncio.CancelledError):
            await self.peers.pop(name)

    async def indices(self) -> dict[str, int]:
        """Return the index of each peer, once all have ended."""
        async with asyncio.timeout(90):
            results = await asyncio.gather(*self.peers.values())
        assert {result.rounds for result in results} == {self.plan.rounds}
        return {name: result.index for name, result in zip(self.peers, results, strict=True)}

    def held(self, kind: str) -> dict[str, bytes]:
        """Return what the broker is known to hold of the peers, by their ids."""
        prefix = f"panmesh/town/{kind}/"
        return {
            topic.removeprefix(prefix): payload
            for topic, payload in self.heard.items()
            if topic.startswith(prefix) and payload
        }

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; the failure of a peer ends the wait."""
        async with asyncio.timeout(180):
            while not condition():
                await asyncio.sleep(0.02)
                for task in self.peers.values():
                    if task.done():
                        task.result()


@asynccontextmanager
async def village(server: Mosquitto, directory: Path, plan: Plan = PLAN) -> AsyncIterator[Village]:
    made = Village(server, directory, plan)
    watching = asyncio.create_task(made.watcher.run())
    try:
        await made.watcher.wait_settled()
        yield made
    finally:
        tasks = [watching, *made.peers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        made._worker.shutdown()
        made._context.term()


class Held(Softmax):
    """A learner that trains only the rounds up to `last`, until it may train more."""

    last = 2
    moved = threading.Condition()

    @classmethod
    def until(cls, last: int) -> None:
        """Let all of them train up to a round."""
        with cls.moved:
            cls.last = last
            cls.moved.notify_all()

    def fit(self, model: Vector, t: int) -> Vector:
        with self.moved:
            self.moved.wait_for(lambda: t <= self.last, 120)
        return super().fit(model, t)


@pytest.mark.slow
async def test_members_take_the_plan_that_their_root_has_signed(
    server: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, keys = tmp_path / "federation.toml", tmp_path / "keys"
    federation = found(file, keys, token=True)
    root = IdentityKey.load(keys / "root.pem")
    async with village(server, tmp_path) as town:
        town.join("a", plan=None, federation=file)
        # Not signed by the root, of another federation: the peer waits on.
        town.watcher.hold("panmesh/town/plan", sign_plan(KEY, PLAN))
        await town.watcher.wait_settled()
        other = PLAN.model_copy(update={"name": "city"})
        town.watcher.hold("panmesh/town/plan", sign_plan(root, other))
        await town.watcher.wait_settled()
        town.watcher.release("panmesh/town/plan")
        await publish(server.login, PLAN, root)
        for name in "bcd":
            town.join(name, plan=None, federation=file)
        # One without the token is seen by nobody, however well it signs.
        stranger = Register(plan=PLAN.digest, index=0, held=True, incarnation=1, number=0)
        claim = seal(KEY, Purpose.CLAIM, stranger, b"")
        town.watcher.hold(f"panmesh/town/claims/{KEY.peer}", claim)
        assert sorted((await town.indices()).values()) == [0, 1, 2, 3]
        await watch(server.login, federation=federation)
        assert "4 of 4 peers finished" in capsys.readouterr().out
        faults = read_json(tmp_path / "a" / "traffic.json")["faults"]
        assert faults["content"] >= 3
        # Another plan, signed later, is not taken back by those that ran the first.
        await publish(server.login, PLAN.model_copy(update={"seed": 9}), root)
        with pytest.raises(UserError, match="federation city, the broker's URL says town"):
            await publish(server.login, other, root)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_broker_dies_in_mid_run_and_a_peer_comes_when_it_is_back(
    server: Mosquitto, tmp_path: Path
) -> None:
    plan = PLAN.model_copy(update={"min_peers": 3})

    def rounds(name: str) -> list[int]:
        return [row.t for row in read_metrics(tmp_path / name)]

    Held.until(2)
    try:
        async with village(server, tmp_path, plan) as town:
            for name in "abc":
                town.join(name, plan=plan, make_learner=Held)
            await town.until(
                lambda: (
                    len(town.held("metrics")) == 3
                    and all(
                        open_metrics(said, who, plan, b"").t == 2
                        for who, said in town.held("metrics").items()
                    )
                )
            )
            server.kill()
            await town.until(lambda: not town.watcher.settled)
            # The training goes on without it.
            Held.until(4)
            await town.until(lambda: all(rounds(name) == [1, 2, 3, 4] for name in "abc"))
            assert not town.watcher.settled
            town.heard.clear()
            server.start()
            # All that the broker forgot is there again; and so is, by it, who comes now.
            await town.until(lambda: len(town.held("peers")) == len(town.held("claims")) == 3)
            town.join("d", plan=plan, make_learner=Held)
            await town.until(lambda: len(town.held("peers")) == 4)
            Held.until(plan.rounds)
            indices = await town.indices()
            assert indices["d"] == 3
            assert sorted(indices.values()) == [0, 1, 2, 3]
            for name in "abc":
                assert all(
                    row.missing == 0 < row.exchanges for row in read_metrics(tmp_path / name)
                )
    finally:
        Held.until(plan.rounds)


class Screen:
    """A terminal of a hundred columns, and what was written to it."""

    def __init__(self) -> None:
        self._reader, self.line = pty.openpty()
        fcntl.ioctl(self.line, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        os.set_blocking(self._reader, False)
        self._written = b""

    def rows(self, index: int) -> list[tuple[int, str]]:
        """Return the rounds and the states in which a table of peers has shown one of them."""
        with suppress(BlockingIOError):
            while piece := os.read(self._reader, 65_536):
                self._written += piece
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._written.decode(errors="replace"))
        found = re.findall(rf"(?m)^ *{index} +. \d+ +(\d+) .* (\w+) *\r?$", text)
        return [(int(t), state) for t, state in found]

    def close(self) -> None:
        """Close both ends."""
        os.close(self.line)
        os.close(self._reader)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_two_processes_meet_one_is_killed_and_all_of_it_is_watched(
    server: Mosquitto, tmp_path: Path
) -> None:
    table = {"name": "town", "n": 2, "rounds": 100_000, "method": "random", "model": "sklearn-sgd"}
    network = {"request_timeout": 2.0, "probe_interval": 0.5, "suspicion": 2.0}
    parts = {"partition": {"train_per_peer": 60}, "matching": {"l": 1, "k": 1}}
    plan = Plan.model_validate(table | parts | {"network": network})
    file = tmp_path / "plan.toml"
    file.write_text(plan.to_toml())
    peer = [sys.executable, "-m", "peer"]
    flags = [*server.flags, "--plan", str(file)]
    a, b = (
        Worker(name, [*peer, *flags, "--state", str(tmp_path / name)], tmp_path / name)
        for name in "ab"
    )
    watching = Worker("watch", [*peer, "watch", *flags], tmp_path / "watch")
    screen = Screen()
    try:
        async with village(server, tmp_path, plan) as town:
            for process in (a, b):
                process.start()
            watching.start(screen.line)
            await town.until(lambda: len(town.held("peers")) == 2)
            await town.until(
                lambda: all(max(screen.rows(i), default=(0, "")) >= (2, "running") for i in (0, 1))
            )
            who = {name: read_json(tmp_path / name / "identity.json") for name in "ab"}
            assert set(town.held("peers")) == {said["peer"] for said in who.values()}
            a.kill()
            # Nobody but the broker can have cleared that: its last will.
            await town.until(lambda: set(town.held("peers")) == {who["b"]["peer"]})
            await town.until(lambda: screen.rows(who["a"]["index"])[-1][1] == "gone")
            last, _ = screen.rows(who["b"]["index"])[-1]
            await town.until(lambda: screen.rows(who["b"]["index"])[-1] > (last + 5, "running"))
            assert screen.rows(who["a"]["index"])[-1][1] == "gone"
            watching.send(signal.SIGINT)
            await town.until(lambda: not watching.running)
    finally:
        for process in (a, b, watching):
            process.kill()
        screen.close()


@pytest.mark.slow
async def test_a_peer_comes_back_to_its_index(server: Mosquitto, tmp_path: Path) -> None:
    async with village(server, tmp_path) as town:
        town.join("a", plan=PLAN)
        town.join("b", plan=PLAN)
        await town.until(lambda: len(town.held("peers")) == 2)
        before = {name: read_json(tmp_path / name / "identity.json")["index"] for name in "ab"}
        await town.part("a")
        await town.until(lambda: len(town.held("peers")) == 1)
        # Its claim stays: it may come back.
        assert len(town.held("claims")) == 2
        for name in "acd":
            town.join(name, plan=PLAN)
        indices = await town.indices()
        assert before == {name: indices[name] for name in "ab"}
        assert sorted(indices.values()) == [0, 1, 2, 3]


async def test_an_index_that_another_holds_is_refused(
    server: Mosquitto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One that renews its claim is there, whatever becomes of its clock.
    monkeypatch.setattr("peer.network.discovery.RENEW", 0.5)
    backwards = count(time.time_ns(), -(10**12))
    monkeypatch.setattr(time, "time_ns", lambda: next(backwards))
    monkeypatch.setattr(time, "time", lambda: next(backwards) / 1e9)
    async with village(server, tmp_path) as town:
        town.join("a", plan=PLAN, index=2)
        await town.until(lambda: len(town.held("peers")) == 1)
        town.join("b", plan=PLAN, index=2)
        with pytest.raises(UserError, match="index 2 is held by others"):
            async with asyncio.timeout(90):
                await town.peers.pop("b")


async def test_a_plan_of_another_federation(server: Mosquitto, tmp_path: Path) -> None:
    async with village(server, tmp_path) as town:
        town.join("a", plan=PLAN.model_copy(update={"name": "city"}))
        town.join("b", plan=None)
        with pytest.raises(UserError, match="federation city, the broker's URL says town"):
            await town.peers.pop("a")
        with pytest.raises(UserError, match="who may say what this federation runs"):
            await town.peers.pop("b")


KEY, OTHER = IdentityKey.generate(), IdentityKey.generate()


def update(peer: str, index: int = 3, state: State = State.ALIVE) -> Update:
    record = PeerRecord(
        peer=peer,
        index=index,
        control="tcp://127.0.0.1:9",
        data="tcp://127.0.0.1:10",
        incarnation=1,
        first_round=1,
        model="",
    )
    return Update(record=record, state=state, status=Status())


def presence(peer: str, **more: Any) -> Presence:
    fields: dict[str, Any] = {"update": update(peer), "time": time.time(), "ttl": 60.0}
    return Presence(plan=PLAN.digest, **fields | more)


def hostile() -> dict[str, list[bytes]]:
    """What a stranger with a key of his own may publish, by the kind of topic."""
    good = presence(KEY.peer)
    nested: Any = {}
    for _ in range(500):
        nested = {"a": nested}
    packed = msgpack.packb(nested)
    unsigned = msgpack.packb((msgpack.packb(good.model_dump(mode="json")), KEY.public, bytes(64)))
    everywhere = [
        b"no MessagePack \xc1",
        b"\x80" * 4000,
        bytes(MAX_RECORD + 1),
        bytes(MAX_PACKET - 200),
        packed,
        unsigned,
        KEY.sign(Purpose.PRESENCE, packed).pack(),
        KEY.sign(Purpose.CLAIM, packed).pack(),
        seal(OTHER, Purpose.PRESENCE, good, b""),
        seal(KEY, Purpose.PRESENCE, good, b"of another federation"),
        seal(KEY, Purpose.METRICS, good, b""),
    ]
    old = time.time() - 1000
    return {
        "peers": [
            *everywhere,
            seal(KEY, Purpose.PRESENCE, presence(KEY.peer, time=old), b""),
            seal(KEY, Purpose.PRESENCE, presence(KEY.peer, time=time.time() + 1000), b""),
            seal(KEY, Purpose.PRESENCE, presence(KEY.peer, update=update(OTHER.peer)), b""),
            seal(
                KEY,
                Purpose.PRESENCE,
                presence(KEY.peer, update=update(KEY.peer, state=State.DEAD)),
                b"",
            ),
            seal(KEY, Purpose.PRESENCE, good.model_copy(update={"plan": "0" * 32}), b""),
        ],
        "claims": [
            *everywhere,
            seal(
                OTHER,
                Purpose.CLAIM,
                Register(plan=PLAN.digest, index=0, held=True, incarnation=2**50, number=0),
                b"",
            ),
            seal(
                KEY,
                Purpose.CLAIM,
                Register(plan="0" * 32, index=0, held=True, incarnation=2**50, number=0),
                b"",
            ),
        ],
    }


async def overwrite(town: Village, topic: str) -> None:
    """Clear a topic of another, write nonsense there, and wait each time until it is mended."""
    for payload in (b"", b"forged"):
        town.watcher.hold(topic, payload)
        await town.watcher.wait_settled()
        town.watcher.release(topic)
        await town.until(lambda: len(town.heard[topic]) > 100)


async def test_peers_meet_and_agree_whatever_strangers_publish(
    server: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with village(server, tmp_path) as town:
        messages = hostile()
        count = sum(map(len, messages.values()))
        town.join("a", plan=PLAN)
        town.join("b", plan=PLAN)
        await town.until(lambda: len(town.held("peers")) == 2)
        for kind, payloads in messages.items():
            # The first of them is retained there when the others come; all are heard by two.
            for payload in reversed(payloads):
                town.watcher.hold(f"panmesh/town/{kind}/{KEY.peer}", payload)
                await town.watcher.wait_settled()
        # Whose topics are cleared or overwritten writes them again.
        for who in set(town.held("peers")) - {KEY.peer}:
            for kind in ("peers", "claims"):
                await overwrite(town, f"panmesh/town/{kind}/{who}")
        town.join("c", plan=PLAN)
        town.join("d", plan=PLAN)
        indices = await town.indices()
        assert sorted(indices.values()) == [0, 1, 2, 3]
        town.watcher.hold(f"panmesh/town/peers/{KEY.peer}", b"")
        town.watcher.hold(f"panmesh/town/claims/{KEY.peer}", b"")
        await town.until(lambda: not town.held("peers") and not town.held("claims"))
        rows = [open_metrics(said, who, PLAN, b"") for who, said in town.held("metrics").items()]
        assert sorted((row.index, row.t) for row in rows) == [(i, PLAN.rounds) for i in range(4)]
        await watch(server.login, plan=PLAN)
        assert "4 of 4 peers finished" in capsys.readouterr().out
        for name in "ab":
            faults = read_json(tmp_path / name / "traffic.json")["faults"]
            assert faults["content"] >= count, faults
        for name in "cd":
            assert read_json(tmp_path / name / "traffic.json")["faults"]["content"] >= 2


def test_metrics_of_others_are_not_believed() -> None:
    def said(row: MetricRow, plan: str = PLAN.digest) -> bytes:
        return seal(KEY, Purpose.METRICS, Measured(plan=plan, row=row), b"")

    row = MetricRow(t=2, index=1, accuracy=0.5)
    assert open_metrics(said(row), KEY.peer, PLAN, b"") == row
    for message, peer in (
        (said(row), OTHER.peer),
        (said(row, "0" * 32), KEY.peer),
        (said(MetricRow(t=2, index=4)), KEY.peer),
        (said(MetricRow(t=PLAN.rounds + 1, index=1)), KEY.peer),
        (said(MetricRow(t=1, index=1, accuracy=1e300)), KEY.peer),
        (b"", KEY.peer),
    ):
        with pytest.raises(ProtocolError):
            open_metrics(message, peer, PLAN, b"")
