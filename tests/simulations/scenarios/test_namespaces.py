"""Network namespaces that are really made: who reaches whom, how fast, and what is left of them."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from peer.errors import UserError
from simulations.scenarios import namespaces as module
from simulations.scenarios.namespaces import TOOLS, Namespaces, sweep

possible = os.geteuid() == 0 and all(map(shutil.which, TOOLS))
needs_root = pytest.mark.skipif(not possible, reason="needs root, ip, tc and nft")

SERVER = """
import socket
with socket.create_server(("0.0.0.0", 7000)) as server:
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        with connection:
            while connection.recv(65536):
                pass
"""
CLIENT = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], 7000), float(sys.argv[3])) as connection:
    connection.settimeout(None)
    connection.sendall(bytes(int(sys.argv[2])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
print(time.monotonic() - began)
"""


@contextmanager
def serving(made: Namespaces, *places: int | None) -> Iterator[None]:
    """Have a server run in each namespace."""
    servers = [
        subprocess.Popen(
            made.command(i, [sys.executable, "-c", SERVER]), stdout=subprocess.PIPE, text=True
        )
        for i in places
    ]
    try:
        for server in servers:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
        yield
    finally:
        for server in servers:
            server.kill()
            server.communicate()


def seconds(made: Namespaces, i: int, address: str, size: int, patience: float) -> float | None:
    """Return how long peer i needs to send so many bytes, None when it does not get through."""
    command = [sys.executable, "-c", CLIENT, address, str(size), str(patience)]
    done = subprocess.run(made.command(i, command), capture_output=True, text=True, check=False)
    return float(done.stdout) if done.returncode == 0 else None


def left() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [
        line for line in listed.stdout.splitlines() if line.startswith(f"panmesh-{os.getpid()}")
    ]


@needs_root
def test_sides_do_not_reach_each_other_and_rates_are_kept() -> None:
    with Namespaces(3) as made, serving(made, None, 1, 2):
        assert seconds(made, 0, made.addresses[1], 1, 30) is not None
        made.part([0, 0, 1])
        assert seconds(made, 0, made.addresses[1], 1, 30) is not None
        assert seconds(made, 0, made.host, 1, 30) is not None
        assert seconds(made, 0, made.addresses[2], 1, 0.3) is None
        assert seconds(made, 2, made.host, 1, 0.3) is None
        made.part([0, 0, 0])
        assert seconds(made, 2, made.host, 1, 30) is not None
        made.limit(0, 1_000_000, 500_000)
        # Half a megabyte, of which a burst goes at once.
        sending = seconds(made, 0, made.addresses[1], 500_000, 30)
        assert sending is not None
        assert sending > 0.4
        made.limit(1, math.inf, 250_000)
        slower = seconds(made, 0, made.addresses[1], 500_000, 30)
        assert slower is not None
        assert slower > 1.6
    assert left() == []


@needs_root
def test_what_a_killed_run_left_is_removed_by_the_next() -> None:
    program = (
        "from simulations.scenarios.namespaces import Namespaces; import subprocess, time\n"
        "with Namespaces(2) as made:\n"
        " command = made.command(0, ['sleep', '600'])\n"
        " print(subprocess.Popen(command, stdout=subprocess.DEVNULL).pid, flush=True)\n"
        " time.sleep(600)"
    )
    killed = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    orphan = psutil.Process(int(killed.stdout.readline()))
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    owner = f"panmesh-{killed.pid}-"
    listed = ["ip", "netns", "list"]
    assert owner in subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    sweep()
    orphan.wait(30)
    assert owner not in subprocess.run(listed, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("user", "tool", "n", "message"),
    [
        (1000, "/sbin/ip", 4, "takes root"),
        (0, None, 4, "needs the command ip"),
        (0, "/sbin/ip", 251, "has room for 250 peers"),
    ],
)
def test_where_namespaces_cannot_be_made_one_is_told(
    monkeypatch: pytest.MonkeyPatch, user: int, tool: str | None, n: int, message: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(module.shutil, "which", lambda _: tool)
    with pytest.raises(UserError, match=message):
        Namespaces(n)
