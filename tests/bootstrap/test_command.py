"""The `bootstrap` command as a real process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from peer.network.messages import Enrol, Enrolled
from peer.network.traffic import Traffic
from peer.network.transport import Buffer, Transport


@contextmanager
def started(*flags: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bootstrap", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def first_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stderr is not None
    line: dict[str, Any] = json.loads(process.stderr.readline())
    return line


def address(process: subprocess.Popen[str]) -> str:
    return str(first_line(process)["message"]).rpartition(" ")[2]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text('name = "test"\nn = 2\n')
    return path


FREE = ("--listen", "127.0.0.1:0", "--log", "json")


async def ask_index(where: str, peer: str) -> int:
    async def nobody(*_: object) -> tuple[Enrolled, list[Buffer]]:
        raise AssertionError

    async with Transport(listen="127.0.0.1:0", handler=nobody, traffic=Traffic()) as transport:
        transport.introduce(sender=peer, plan="")
        reply, _ = await transport.request(where, Enrol(), timeout=5)
    assert isinstance(reply, Enrolled)
    return reply.index


def test_starts_fast_and_small_and_ends_at_sigterm(plan: Path) -> None:
    with started("--plan", str(plan), *FREE) as process:
        line = first_line(process)
        assert line["level"] == "info"
        assert "federation test (panm-grad, 2 peers) meets at tcp://127.0.0.1:" in line["message"]
        assert psutil.Process(process.pid).memory_info().rss < 60e6
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
        assert time.monotonic() - begun < 2


def test_ctrl_c_is_quiet(plan: Path) -> None:
    with started("--plan", str(plan), *FREE) as process:
        first_line(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


async def test_kill_and_restart_keep_indices(plan: Path, tmp_path: Path) -> None:
    flags = ("--plan", str(plan), *FREE, "--state", str(tmp_path / "state"))
    with started(*flags) as process:
        where = address(process)
        assert await ask_index(where, "a" * 32) == 0
        assert await ask_index(where, "b" * 32) == 1
        process.kill()
        process.wait()
    with started(*flags) as process:
        assert await ask_index(address(process), "b" * 32) == 1


def test_environment_sets_what_flags_do_not(plan: Path) -> None:
    with started(
        PANMESH_BOOTSTRAP_PLAN=str(plan),
        PANMESH_BOOTSTRAP_LISTEN="127.0.0.1:0",
        PANMESH_BOOTSTRAP_LOG="json",
    ) as process:
        assert address(process).startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--plan", "missing.toml"], "cannot read the plan missing.toml"),
        (["--plan", "PLAN", "--listen", "nonsense"], "'nonsense' is not an address"),
        (["--plan", "PLAN", "--listen", "USED"], "cannot listen on"),
        (
            ["--plan", "PLAN", "--listen", "127.0.0.1:0", "--state", "PLAN"],
            "cannot use the state directory",
        ),
        (["--plan", "PLAN", "--reclaim-after", "-1"], "--reclaim-after"),
        (["--plan", "WRONG"], "there is no method panm-gard"),
        (["--plan", "WRONG", "--import", "nomodule"], "cannot import 'nomodule'"),
        ([], "--plan"),
    ],
)
def test_mistakes_are_told_in_one_line(plan: Path, flags: list[str], message: str) -> None:
    with started("--plan", str(plan), *FREE) as other:
        used = address(other).removeprefix("tcp://")
        wrong = plan.with_name("wrong.toml")
        wrong.write_text('n = 2\nmethod = "panm-gard"\n')
        names = {"PLAN": str(plan), "WRONG": str(wrong), "USED": used}
        given = [names.get(flag, flag) for flag in flags]
        done = subprocess.run(
            [sys.executable, "-m", "bootstrap", *given],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, bootstrap.cli as cli; cli.check_plan(cli.Plan(n=2)); "
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
