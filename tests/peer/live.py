"""Real processes for the tests of a federation, and what their files tell."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from peer.errors import UserError
from peer.plan import Plan
from peer.rundir import MetricRow, TopologyRow, read_metrics, read_topology
from peer.state import IDENTITY, Checkpoint, Identity, newest_checkpoint
from simulations.processes import Federation, Worker

Start = Callable[..., Federation]
"""Starts a federation that ends with the test: of a plan, and the arguments of `Federation`."""

NETWORK = {
    "request_timeout": 4.0,
    "probe_interval": 0.5,
    "probe_timeout": 0.5,
    "suspicion": 2.0,
    "linger": 20.0,
}
"""Short timeouts: what must not take longer than they say is soon seen."""


def small(**changes: Any) -> Plan:
    """Four peers in two clusters, on digits; a round takes a twentieth of a second or more."""
    table: dict[str, Any] = {
        "n": 4,
        "rounds": 40,
        "method": "panm-grad",
        "matching": {"l": 3, "k": 2, "t1": 8, "tau": 1000},
        "partition": {"kind": "rotation", "clusters": 2, "train_per_peer": 60},
        "training": {"batch": 10, "epochs": 8},
        "network": NETWORK,
    }
    return Plan.model_validate(table | changes)


def longest_allowed(plan: Plan) -> float:
    """Return for how many seconds one that died can hold up a round: a request times out, and the
    failure detector looks at it, directly and through others, and then waits for its protest."""
    network = plan.network
    detection = (
        network.probe_interval
        + 3 * network.probe_timeout
        + network.suspicion * max(1.0, math.log10(plan.n))
    )
    return detection + network.request_timeout


def alone(plan_file: Path, index: int, state: Path, *flags: str) -> Worker:
    """Return a peer process, not started yet, that runs a plan file without a bootstrap node."""
    named = ["--plan", str(plan_file), "--index", str(index), "--state", str(state)]
    command = [sys.executable, "-m", "peer", *named, *flags]
    return Worker(name=f"peer {index}", command=command, directory=state)


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a `peer` command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "peer", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def rows(worker: Worker) -> list[MetricRow]:
    """Return the rounds that a peer has finished so far."""
    try:
        return read_metrics(worker.directory)
    except UserError:
        return []


def finished(worker: Worker) -> int:
    """Return the last round that a peer has finished so far."""
    return max((row.t for row in rows(worker)), default=0)


def choices(worker: Worker) -> dict[int, TopologyRow]:
    """Return whom a peer averaged with, by round."""
    return {row.t: row for row in read_topology(worker.directory)}


def checkpoint(worker: Worker) -> Checkpoint:
    """Return a peer's newest checkpoint."""
    found = newest_checkpoint(worker.directory)
    assert found is not None
    return found


def identity(worker: Worker) -> tuple[str, int | None]:
    """Return a peer's id and index."""
    found = Identity.load(worker.directory / IDENTITY)
    return found.peer, found.index


def log(worker: Worker) -> str:
    """Return what a process has written to its terminal."""
    return worker.log.read_text(encoding="utf-8")


def longest_round(workers: Sequence[Worker], since: int = 1) -> float:
    """Return the seconds of the longest round from round `since` on."""
    return max(row.seconds.round for w in workers for row in rows(w) if row.t >= since)


def kill_at_random(run: Federation, victim: Worker, times: int, rng: random.Random) -> int:
    """Kill a peer so many times, whatever it is doing, letting it resume each time.

    Before every fifth time it may finish a round, or it might die in its start alone. Returns how
    often it was killed: less when it has finished before.
    """
    reached = 0
    for number in range(times):
        if number % 5 == 4:
            wait_for(partial(_past, victim, reached), 60)
        time.sleep(rng.uniform(0.0, 3.0))
        run.poll()
        if not victim.running:
            return number
        victim.kill()
        if list(victim.directory.glob("checkpoint-*")):
            assert checkpoint(victim).t >= reached
            reached = checkpoint(victim).t
        victim.start()
    return times


def _past(victim: Worker, t: int) -> bool:
    return finished(victim) > t or not victim.running


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until a condition holds; fail when it does not within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)
