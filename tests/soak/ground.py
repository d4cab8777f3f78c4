"""The ground of a soak: a federation of real processes, and what they say of themselves.

Everything that is measured is read from the files of the peers: their logs (who was declared dead,
and when), their health files (whom they know, what they hold), their rows (exchanges).
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

from peer.errors import UserError
from peer.plan import Plan
from peer.rundir import MetricRow, read_metrics
from simulations.processes import Worker, free_port

ONE_PEER = Path(__file__).with_name("one_peer.py")
START = 300.0
"""Seconds that a federation may take to start on a busy machine, before anything is measured."""


@dataclass(frozen=True)
class Side:
    """A place where processes run: what their commands begin with, and their address there."""

    prefix: tuple[str, ...] = ()
    host: str = "127.0.0.1"


class Ground:
    """A bootstrap node and n peers, on one side or spread over several; a context manager.

    Peer `i` has the index i, and is on side i mod the number of sides; the bootstrap node is on the
    first. Every process is ended with the block.
    """

    def __init__(self, directory: Path, n: int, sides: Sequence[Side] = (Side(),)) -> None:
        directory.mkdir(parents=True)
        self.n = n
        self._directory = directory
        self._sides = sides
        self._bootstrap_address = f"{sides[0].host}:{free_port()}"
        plan = Plan.model_validate(
            {"name": "soak", "n": n, "rounds": 1_000_000, "model": "custom", "data": "own"}
            | {"matching": {"l": 6, "k": 3}, "partition": {"kind": "rotation", "clusters": 2}}
        )
        (directory / "plan.toml").write_text(plan.to_toml(), encoding="utf-8")
        self.bootstrap = self._worker(
            "bootstrap",
            sides[0],
            ["-m", "bootstrap", "--plan", str(directory / "plan.toml")],
            ["--listen", self._bootstrap_address, "--state", str(directory / "bootstrap")],
            # The far side of a partition is another network namespace.
            ["--insecure"],
        )
        self.peers = [self._peer(number) for number in range(n)]

    def _worker(self, name: str, side: Side, *arguments: Sequence[str]) -> Worker:
        command = [*side.prefix, sys.executable, *(a for part in arguments for a in part)]
        return Worker(name=name, command=command, directory=self._directory / name)

    def _peer(self, number: int) -> Worker:
        name, side = f"peer-{number}", self._sides[number % len(self._sides)]
        flags = {
            "--bootstrap": self._bootstrap_address,
            "--state": str(self._directory / name),
            "--index": str(number),
            # A port that no earlier life had: those of before are for others to mistake.
            "--listen": f"{side.host}:{free_ports()}",
        }
        return self._worker(
            name, side, [str(ONE_PEER)], [part for flag in flags.items() for part in flag]
        )

    def __enter__(self) -> Self:
        self.bootstrap.start()
        for worker in self.peers:
            worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in (*self.peers, self.bootstrap):
            worker.kill()

    def restart_elsewhere(self, number: int) -> None:
        """Start a peer that was killed again, with the state it left, at another port."""
        self.peers[number] = self._peer(number)
        self.peers[number].start()

    # What the peers say.

    def health(self, number: int) -> dict[str, Any]:
        """Return what a peer last said of itself; empty before it has."""
        try:
            text = (self.peers[number].directory / "health.json").read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        found: dict[str, Any] = json.loads(text)
        return found

    def finished(self, number: int) -> int:
        """Return the last round that a peer says it has finished."""
        status = self.health(number).get("status", {})
        return int(status.get("finished", 0))

    def united(self, numbers: Collection[int], since: float = 0.0) -> bool:
        """Return whether these peers know each other and nobody else, as said after `since`."""
        return all(
            (said := self.health(number)).get("time", 0.0) > since
            and set(said["known"]) == {*numbers} - {number}
            for number in numbers
        )

    def deaths(self, number: int, since: float) -> list[tuple[int, float]]:
        """Return whom a peer declared dead, and how many seconds after `since`."""
        found = []
        for line in self.peers[number].log.read_text(encoding="utf-8").splitlines():
            if '"message": "peer ' not in line or not line.rstrip().endswith("}"):
                continue
            said = json.loads(line)
            when = datetime.fromisoformat(said["time"]).timestamp()
            match said["message"].split():
                case ["peer", index, "dead"] if when >= since:
                    found.append((int(index), when - since))
        return found

    def rows(self, number: int, since: float, until: float) -> list[MetricRow]:
        """Return the rounds that a peer finished in a span of time."""
        try:
            rows = read_metrics(self.peers[number].directory)
        except UserError:
            return []
        return [row for row in rows if since <= row.time < until]


def free_ports() -> int:
    """Return a port that is free, as is the next one, of those that the kernel gives to nobody."""
    while True:
        port = random.randrange(12_000, 32_000, 2)
        with suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 1))
            return port


def seconds_until(reached: Callable[[], bool], limit: float) -> float:
    """Wait until something is so; return the seconds it took, infinity when not within `limit`."""
    began = time.monotonic()
    while time.monotonic() < began + limit:
        if reached():
            return time.monotonic() - began
        time.sleep(0.1)
    return float("inf")


class Partition:
    """Two network namespaces that a cable joins, which can be cut.

    A cut drops every packet between the two, silently, as a broken route does.
    """

    def __init__(self, namespaces: Sequence[str]) -> None:
        self._namespaces = namespaces
        self.sides = [
            Side((*_inside(process),), f"10.77.0.{number}")
            for number, process in enumerate(namespaces, start=1)
        ]

    def cut(self) -> None:
        """Cut the two off from each other."""
        self._rule("-I")

    def heal(self) -> None:
        """Join them again."""
        self._rule("-D")

    def _rule(self, action: str) -> None:
        for process in self._namespaces:
            _run(*_inside(process), "iptables", action, "INPUT", "-i", "soak", "-j", "DROP")


@contextmanager
def partition() -> Iterator[Partition]:
    """Make the namespaces, each held by a process of its own, so that none outlives this block."""
    with ExitStack() as stack:
        processes = []
        for _ in range(2):
            holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
            stack.callback(holder.wait)
            stack.callback(holder.kill)
            processes.append(str(holder.pid))
        own = Path("/proc/self/ns/net").readlink()
        for process in processes:
            entered = Path(f"/proc/{process}/ns/net")
            assert seconds_until(partial(_differ, entered, own), 10) < 10
        one, other = processes
        cable = ["link", "add", "soak", "netns", one, "type", "veth"]
        _run("ip", *cable, "peer", "name", "soak", "netns", other)
        for number, process in enumerate(processes, start=1):
            ip = (*_inside(process), "ip")
            _run(*ip, "address", "add", f"10.77.0.{number}/24", "dev", "soak")
            for device in ("lo", "soak"):
                _run(*ip, "link", "set", device, "up")
        yield Partition(processes)


def _differ(link: Path, target: Path) -> bool:
    return link.readlink() != target


def _inside(process: str) -> tuple[str, str]:
    return "nsenter", f"--net=/proc/{process}/ns/net"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)
