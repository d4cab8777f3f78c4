"""The launcher, with stand-ins for `peer` and `bootstrap` that misbehave on request."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from peer.errors import FederationError, UserError
from peer.plan import Plan
from peer.rundir import MetricRow, read_plan
from simulations.processes import Federation, free_port

PLAN = Plan(n=3, rounds=2)

PEER = """
import json, pathlib, shutil, signal, sys, time
flag = dict(zip(sys.argv[1::2], sys.argv[2::2]))
state, behaviour = pathlib.Path(flag["--state"]), flag.get("--data", "")
print("joining", flag["--bootstrap"], flush=True)
if behaviour == "fail":
    sys.exit("no such data")
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
state.mkdir(exist_ok=True)
shutil.copy(state.parent / "plan.toml", state / "plan.toml")
index = int(state.name.removeprefix("peer-"))
for t in (1, 2):
    for name in ("topology.jsonl", "metrics.jsonl"):
        with (state / name).open("a") as file:
            file.write(json.dumps({"t": t, "index": index, "accuracy": 0.5}) + "\\n")
    while behaviour in ("stubborn", "slow") and not (state / "go").exists():
        time.sleep(0.02)
"""
BOOTSTRAP = "import time; time.sleep(600)"


@pytest.fixture(autouse=True)
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put packages named peer and bootstrap where `python -m` looks first; no process may stay."""
    for package, program in (("peer", PEER), ("bootstrap", BOOTSTRAP)):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__main__.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    yield
    left = [child for child in psutil.Process().children() if child.is_running()]
    for child in left:
        child.kill()
    assert left == []


def test_a_federation_runs_and_is_collected(tmp_path: Path) -> None:
    rows: list[tuple[int, MetricRow]] = []
    with Federation(PLAN, tmp_path / "run") as federation:
        federation.wait(30, on_row=lambda number, row: rows.append((number, row)))
        wall = federation.wall_s
        time.sleep(0.01)
        assert federation.wall_s == wall
    assert sorted((number, row.t) for number, row in rows) == [
        (number, t) for number in range(3) for t in (1, 2)
    ]
    summary = federation.collect(tmp_path / "merged")
    assert (summary["peers"], summary["finished"], summary["accuracy_mean"]) == (3, 3, 0.5)
    assert summary["wall_s"] == round(wall, 3)
    assert len(summary["memory_pss_mb"]) == 3
    assert read_plan(tmp_path / "merged") == PLAN


def test_a_failing_peer_ends_all_and_shows_its_log(tmp_path: Path) -> None:
    flags = {0: ["--data", "slow"], 1: ["--data", "fail"], 2: ["--data", "slow"]}
    federation = Federation(PLAN, tmp_path / "run", one_peer_flags=flags)
    with pytest.raises(FederationError, match=r"(?s)peer-1 ended with 1.*no such data"), federation:
        federation.wait(30)
    assert not any(worker.running for worker in (federation.bootstrap, *federation.peers))


def test_a_peer_that_does_not_end_is_named_and_killed(tmp_path: Path) -> None:
    flags = {2: ["--data", "stubborn"]}
    federation = Federation(PLAN, tmp_path / "run", one_peer_flags=flags)
    with pytest.raises(FederationError, match=r"still running: peer-2"), federation:
        federation.wait_for(lambda: not federation.peers[1].running, 30)
        federation.wait(0.5)
    assert federation.peers[2].process is not None
    assert federation.peers[2].process.returncode == -signal.SIGKILL


def test_killed_processes_are_no_failure_and_start_again(tmp_path: Path) -> None:
    rows: list[MetricRow] = []
    run = tmp_path / "run"
    with Federation(PLAN, run, data="slow") as federation:
        federation.wait_for(lambda: len(rows) == 3, 30, lambda _, row: rows.append(row))
        federation.kill(1)
        federation.kill_bootstrap()
        assert not federation.peers[1].running
        federation.poll()
        federation.restart(1)
        federation.restart_bootstrap()
        with pytest.raises(FederationError, match="running already"):
            federation.restart(1)
        for number in range(3):
            (run / f"peer-{number}" / "go").touch()
        federation.wait(30)
        assert federation.peers[1].log.read_text().count("joining") == 2


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    federation = Federation(PLAN, tmp_path / "run", data="slow")
    with pytest.raises(KeyboardInterrupt), federation:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    assert not any(worker.running for worker in (federation.bootstrap, *federation.peers))


def test_a_directory_is_not_used_twice(tmp_path: Path) -> None:
    with Federation(PLAN, tmp_path / "run") as federation:
        federation.wait(30)
    with pytest.raises(UserError, match="earlier federation"):
        Federation(PLAN, tmp_path / "run")


def test_a_free_port_and_the_next_can_be_bound() -> None:
    port = free_port()
    with socket.socket() as first, socket.socket() as second, suppress(OverflowError):
        first.bind(("127.0.0.1", port))
        second.bind(("127.0.0.1", port + 1))
