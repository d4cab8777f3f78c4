"""Federations of real processes, really killed: whatever dies, the others go on."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from live import (
    NETWORK,
    alone,
    checkpoint,
    choices,
    finished,
    identity,
    log,
    longest_allowed,
    longest_round,
    rows,
    small,
)

from peer.plan import Plan
from simulations.processes import Federation, Worker, free_port

Start = Callable[..., Federation]


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Start]:
    """Make federations that end with the test; no process may be left."""
    with ExitStack() as stack:

        def make(
            plan: Plan, name: str = "run", *, start: int | None = None, **more: Any
        ) -> Federation:
            made = Federation(plan, tmp_path / name, **more)
            stack.callback(made.terminate, 2.0)
            made.bootstrap.start()
            for worker in made.peers[:start]:
                worker.start()
            return made

        yield make
    assert psutil.Process().children(recursive=True) == []


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def descriptors(worker: Worker) -> int:
    assert worker.process is not None
    return psutil.Process(worker.process.pid).num_fds()


def test_a_killed_peer_goes_on_where_it_was(federation: Start) -> None:
    plan = small()
    run = federation(plan)
    victim, *others = run.peers
    run.wait_for(lambda: finished(victim) >= 12, 60)
    before = descriptors(others[0])
    victim.kill()
    who, last = identity(victim), checkpoint(victim)
    victim.start()
    run.wait_for(lambda: min(map(finished, others)) >= 36, 60)
    assert descriptors(others[0]) <= before + 2
    run.wait(60)

    assert identity(victim) == who
    assert [row.t for row in rows(victim)] == list(range(1, plan.rounds + 1))
    # In stage 2, with NAEM at t = 1000 only, the bag stays what it was.
    assert choices(victim)[last.t + 1].bag == last.matcher["bag"] != []
    assert longest_round(others) <= longest_allowed(plan)
    assert all(finished(other) == plan.rounds for other in others)


def kill_at_random(run: Federation, victim: Worker, times: int, rng: random.Random) -> None:
    """Kill a peer so many times, whatever it is doing, and let it resume each time."""
    reached = 0
    for _ in range(times):
        time.sleep(rng.uniform(0.0, 4.0))
        run.poll()
        if not victim.running:  # it has finished
            break
        victim.kill()
        if list(victim.directory.glob("checkpoint-*")):
            assert checkpoint(victim).t >= reached
            reached = checkpoint(victim).t
        victim.start()


def test_killed_at_any_moment_it_resumes(federation: Start) -> None:
    plan = small(n=3, rounds=60)
    run = federation(plan)
    victim = run.peers[1]
    run.wait_for(lambda: (victim.directory / "identity.json").exists(), 30)
    kill_at_random(run, victim, 3, random.Random(time.time_ns()))
    run.wait(90)
    assert all(finished(worker) == plan.rounds for worker in run.peers)
    assert (victim.directory / "summary.json").exists()
    assert not list(victim.directory.rglob("*.new"))


def test_sigterm_ends_a_peer_that_trains_and_the_others_know_at_once(tmp_path: Path) -> None:
    plan = small(n=2, model="cnn", training={"epochs": 1000}, rounds=2, matching={})
    file = tmp_path / "plan.toml"
    file.write_text(plan.to_toml())
    where = f"127.0.0.1:{free_port()}"
    stays = alone(file, 0, tmp_path / "stays", "--listen", where)
    goes = alone(file, 1, tmp_path / "goes", "--peer", where)
    try:
        stays.start()
        goes.start()
        wait_for(lambda: stays.log.exists() and "peer 1 joined" in log(stays), 30)
        time.sleep(1)  # both are in the middle of round 1, which takes minutes
        asked = time.monotonic()
        for worker, number in ((goes, signal.SIGTERM), (stays, signal.SIGINT)):
            worker.send(number)
            assert worker.process is not None
            code = worker.process.wait(10)
            assert code == (0 if number == signal.SIGTERM else 130)
            if worker is goes:
                wait_for(lambda: "peer 1 left" in log(stays), 2)
                assert "suspected" not in log(stays)
        assert time.monotonic() - asked < 10
        assert "Traceback" not in log(goes) + log(stays)
    finally:
        stays.kill()
        goes.kill()


def test_the_bootstrap_node_is_needed_to_meet_only(federation: Start) -> None:
    """It dies; two peers that die too find each other all the same; it returns; a late one joins."""
    plan = small(n=5, min_peers=4, rounds=80)
    run = federation(plan, peers=5, start=4)
    early, late = run.peers[:4], run.peers[4]
    run.wait_for(lambda: min(map(finished, early)) >= 5, 60)
    indices = [identity(worker) for worker in early]
    run.kill_bootstrap()
    for worker in early[:2]:
        worker.kill()
    for worker in early[:2]:
        worker.start()
    run.wait_for(lambda: min(map(finished, early)) >= 15, 60)

    run.restart_bootstrap()
    late.start()
    run.wait(90)
    assert [identity(worker) for worker in early] == indices
    assert identity(late)[1] == 4
    first, last = rows(late)[0], rows(late)[-1]
    assert first.t > 15
    assert "caught_up_with" in first.notes
    assert last.t == plan.rounds
    # Its first model is one of the others' after some training, not the initial one.
    earliest = min(rows(worker)[0].accuracy or 0.0 for worker in early)
    assert first.accuracy is not None
    assert first.accuracy > earliest
    assert longest_round(early) <= longest_allowed(plan)
    for worker, (_, other) in zip(early[:2], reversed(indices[:2]), strict=True):
        life = log(worker).rpartition("going on after round")[2]
        assert f"peer {other} joined" in life or f"peer {other} moved" in life
