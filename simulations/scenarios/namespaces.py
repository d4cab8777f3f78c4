"""A network namespace for every peer: veth pairs on a bridge, rates by tbf, partitions by nftables.

Needs root and Linux. The bridge and its rules are in a namespace too, so that the machine's own
network and firewall are neither used nor changed, and removing the namespaces removes everything.
They are named after the process that made them: whoever runs next removes what a killed one left.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from types import TracebackType
from typing import Any, Self

import psutil

from peer.errors import UserError

TOOLS = ("ip", "tc", "nft")
_NAME = re.compile(r"panmesh-(\d+)-")
"""How names of namespaces begin: with the id of the process that made them."""
NETWORK = ipaddress.ip_network("10.203.0.0/24")
"""Nobody outside the namespaces sees it, so it may be the same for all runs."""
MOST_PEERS = 250
QUEUE_SECONDS = 0.5
"""Longest that a packet waits for its turn before it is dropped, as a home router may have it."""


class Namespaces:
    """n namespaces for peers, and one for the bridge between them, where a bootstrap node can run.

    A context manager that removes them whatever happens. `host` is the bridge's address,
    `addresses` [n] are the peers'. Raises UserError where namespaces cannot be made.
    """

    def __init__(self, n: int) -> None:
        check_possible(n)
        self._n = n
        self._owner = os.getpid()
        self.host, *self.addresses = map(str, islice(NETWORK.hosts(), n + 1))

    def command(self, i: int | None, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` in the namespace of peer i, None for that of the
        bridge."""
        return ["ip", "netns", "exec", self._namespace(i), *command]

    def limit(self, i: int, up: float, down: float) -> None:
        """Let peer i send and receive so many bytes a second, infinite for no limit."""
        self._shape(i, "eth0", up)
        self._shape(None, f"port{i}", down)

    def part(self, sides: Sequence[int]) -> None:
        """Drop what would go between peers of different sides [n], and between the bridge's own
        address and those that are not on the side of peer 0."""
        between, to_bridge = "", ""
        for side in sorted(set(sides)):
            ports = ", ".join(f"port{i}" for i in range(self._n) if sides[i] == side)
            between += f"iifname {{ {ports} }} oifname != {{ {ports} }} drop\n"
            if side != sides[0]:
                to_bridge += f"iifname {{ {ports} }} drop\n"
        rules = ""
        if to_bridge:
            for hook, lines in (("forward", between), ("input", to_bridge)):
                rules += f"chain {hook} {{ type filter hook {hook} priority 0;\n{lines}}}\n"
        # All at once: there is no moment without rules.
        text = f"table bridge sides\ndelete table bridge sides\ntable bridge sides {{\n{rules}}}\n"
        _run(self.command(None, ["nft", "-f", "-"]), given=text)

    def __enter__(self) -> Self:
        sweep()
        try:
            self._make_bridge()
            for i, address in enumerate(self.addresses):
                self._connect(i, address)
        except BaseException:
            _remove(self._owner)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _remove(self._owner)

    def _make_bridge(self) -> None:
        name = self._namespace(None)
        _run(["ip", "netns", "add", name])
        _run(["ip", "-n", name, "link", "add", "bridge", "type", "bridge"])
        self._bring_up(name, "bridge", self.host)

    def _connect(self, i: int, address: str) -> None:
        """Make the namespace of peer i, and its way to the bridge."""
        bridge, name, port = self._namespace(None), self._namespace(i), f"port{i}"
        _run(["ip", "netns", "add", name])
        ends = ["link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name]
        _run(["ip", "-n", bridge, *ends])
        _run(["ip", "-n", bridge, "link", "set", port, "master", "bridge", "up"])
        self._bring_up(name, "eth0", address)

    def _bring_up(self, name: str, device: str, address: str) -> None:
        _run(["ip", "-n", name, "address", "add", f"{address}/{NETWORK.prefixlen}", "dev", device])
        for own in ("lo", device):
            _run(["ip", "-n", name, "link", "set", own, "up"])

    def _shape(self, i: int | None, device: str, rate: float) -> None:
        """Limit what leaves a device to `rate` bytes a second."""
        discipline = ["pfifo"]
        if math.isfinite(rate):
            # Enough for one tick of the kernel's clock, and for a packet of the largest size.
            burst = max(16_000, round(rate / 250))
            queue = max(64_000, round(rate * QUEUE_SECONDS))
            discipline = ["tbf", "rate", f"{round(8 * rate)}bit"]
            discipline += ["burst", str(burst), "limit", str(queue)]
        _run(self.command(i, ["tc", "qdisc", "replace", "dev", device, "root", *discipline]))

    def _namespace(self, i: int | None) -> str:
        return f"panmesh-{self._owner}-{'bridge' if i is None else i}"


def check_possible(n: int) -> None:
    """Raise UserError unless n namespaces can be made here."""
    if os.geteuid() != 0:
        raise UserError(
            "--netns makes network namespaces, which takes root",
            "leave it out: the same links are then emulated, without root",
        )
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise UserError(
            f"--netns needs the command {missing[0]}", "packages iproute2 and nftables have it"
        )
    if n > MOST_PEERS:
        raise UserError(f"--netns has room for {MOST_PEERS} peers, not {n}")


def sweep() -> None:
    """Remove what runs that were killed have left behind."""
    for owner in {int(found[1]) for name in _names() if (found := _NAME.match(name))}:
        if not psutil.pid_exists(owner):
            _remove(owner)


def _remove(owner: int) -> None:
    """Remove the namespaces of a run, and all that is in them, processes too."""
    for name in _names():
        if name.startswith(f"panmesh-{owner}-"):
            for process in _run(["ip", "netns", "pids", name]).split():
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            _run(["ip", "netns", "delete", name])


def _names() -> list[str]:
    """Return the names of all namespaces of this machine."""
    listed: list[dict[str, Any]] = json.loads(_run(["ip", "-j", "netns", "list"]) or "[]")
    return [str(row["name"]) for row in listed]


def _run(command: Sequence[str], *, given: str = "") -> str:
    """Run a command of the system and return what it prints. Raises UserError that quotes it."""
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        complaint = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise UserError(f"cannot make namespaces: {' '.join(command)}: {complaint}")
    return done.stdout
