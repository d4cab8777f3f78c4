"""Scenarios on containers: networks that part, containers that are killed, nothing that is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compose import BUILD_SECONDS

from peer.rundir import read_metrics, read_topology
from simulations.scenarios.containers import OWNER, sweep
from simulations.scenarios.runs import Ground, run_real
from simulations.scenarios.scenario import Scenario, find, load

RUN_SECONDS = 600
COMMAND = """
import signal
from simulations.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
main()
"""

pytestmark = [pytest.mark.docker, pytest.mark.timeout(BUILD_SECONDS + RUN_SECONDS)]


def listed(owner: int) -> list[str]:
    """Return the containers, running or not, and the networks that a process made."""
    ours = ["--quiet", "--filter", f"label={OWNER}={owner}"]
    found = subprocess.check_output(["docker", "ps", "--all", *ours], text=True)
    found += subprocess.check_output(["docker", "network", "ls", *ours], text=True)
    return found.split()


@pytest.fixture(autouse=True)
def nothing_is_left(image: None) -> Iterator[None]:
    yield
    assert listed(os.getpid()) == []


def test_a_network_of_six_containers_parts_and_heals(tmp_path: Path) -> None:
    """Whoever has found its like is cut off from some, and finds them again."""
    script = [
        {"round": 5, "do": "partition", "groups": [["0-2"], ["3-5"]]},
        {"round": 8, "do": "heal"},
    ]
    changes: dict[str, Any] = {"plan.n": 6, "plan.rounds": 14, "script": script}
    changes |= {"plan.matching.l": 4, "plan.matching.k": 2, "plan.matching.t1": 3}
    scenario = load(find(Path("partition-heals"))).changed(changes)
    summary = run_real(scenario, tmp_path, ground=Ground.CONTAINERS)
    rows, choices = read_metrics(tmp_path), read_topology(tmp_path)
    assert summary["finished"] == 6
    assert summary["emulated"] == ["bandwidth", "latency"]

    ended = {(row.index, row.t): row.time for row in rows}
    # The first that begins round 8 heals the network; not all have come as far.
    healed = min(ended[i, 7] for i in range(6))
    parted = [own for own in choices if own.t >= 5 and ended[own.index, own.t] <= healed]
    assert {own.t for own in parted} == {5, 6, 7}
    sides = [0, 0, 0, 1, 1, 1]
    assert all(sides[j] == sides[own.index] for own in parted for j in own.neighbours)

    like = [[j for j in range(i % 2, 6, 2) if j != i] for i in range(6)]
    last = {own.index: own for own in choices if own.t == 14}
    assert [last[i].bag for i in range(6)] == like
    assert [last[i].neighbours for i in range(6)] == like
    accuracy = {(row.index, row.t): row.accuracy or 0.0 for row in rows}
    for side in ((0, 1, 2), (3, 4, 5)):
        assert sum(accuracy[i, 14] - accuracy[i, 7] for i in side) > 0
    assert summary["accuracy_worst"] > 0.85


def small(script: list[dict[str, Any]], rounds: int) -> Scenario:
    plan = {
        "n": 4,
        "rounds": rounds,
        "method": "random",
        "model": "sklearn-sgd",
        "matching": {"l": 3, "k": 2, "tau": 2},
        "partition": {"kind": "rotation", "clusters": 2, "train_per_peer": 60},
        "network": {"suspicion": 2.0, "request_timeout": 5.0},
    }
    scenario = Scenario.model_validate({"plan": plan, "peers": {"speed": 60}, "script": script})
    scenario.check()
    return scenario


def test_containers_are_killed_and_leave_and_start_again(tmp_path: Path) -> None:
    script = [
        {"round": 3, "do": "kill", "peers": [1]},
        {"round": 4, "do": "leave", "peers": [2]},
        {"round": 6, "do": "restart", "peers": [1, 2]},
    ]
    summary = run_real(small(script, 25), tmp_path, ground=Ground.CONTAINERS)
    rounds = {i: [row.t for row in read_metrics(tmp_path) if row.index == i] for i in range(4)}
    assert summary["finished"] == 4
    assert rounds[0] == rounds[3] == [*range(1, 26)]
    # Those that were away kept what they had, and go on from there or with the others.
    assert rounds[1][:2] == [1, 2]
    assert rounds[2][:3] == [1, 2, 3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_ended_run_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """A killed one leaves all to the next."""
    file = tmp_path / "scenario.toml"
    file.write_text(small([], 10_000).to_toml(), encoding="utf-8")
    command = [sys.executable, "-c", COMMAND, "run", str(file), "--backend", "docker"]
    with (tmp_path / "log").open("wb") as log:
        run = subprocess.Popen(
            [*command, "--out", str(tmp_path / "run")], stdout=log, stderr=log, process_group=0
        )
    try:
        deadline = time.monotonic() + RUN_SECONDS / 2
        while not any((tmp_path / "run").glob("processes/peer-3/metrics.jsonl")):
            assert run.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert len(listed(run.pid)) == 6  # four peers, the bootstrap node, their network
        run.send_signal(number)
        code = run.wait(120)
        if number is signal.SIGKILL:
            sweep()
        else:
            assert code == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
        assert listed(run.pid) == []
    finally:
        run.kill()
        run.wait()
