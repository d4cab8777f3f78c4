"""Federations of real processes, really killed: whatever dies, the others go on."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path
from statistics import fmean

import numpy as np
import psutil
import pytest
from live import (
    NETWORK,
    Start,
    alone,
    checkpoint,
    choices,
    finished,
    identity,
    kill_at_random,
    log,
    longest_allowed,
    longest_round,
    rows,
    small,
    wait_for,
)

from peer.rundir import MetricRow, read_metrics
from simulations.processes import Worker, free_port


def resources(worker: Worker) -> tuple[int, int]:
    """Return how many file descriptors and child processes a process has."""
    assert worker.process is not None
    process = psutil.Process(worker.process.pid)
    return process.num_fds(), len(process.children())


def accuracy(row: MetricRow) -> float:
    assert row.accuracy is not None
    return row.accuracy


def test_a_killed_peer_goes_on_where_it_was(federation: Start) -> None:
    plan = small(n=3)
    run = federation(plan)
    victim, *others = run.peers
    run.wait_for(lambda: finished(victim) >= 12, 60)
    before, _ = resources(others[0])
    victim.kill()
    who, last = identity(victim), checkpoint(victim)
    victim.start()
    run.wait_for(lambda: min(map(finished, others)) >= 36, 60)
    after, children = resources(others[0])
    assert after <= before + 2
    assert children == 0
    run.wait(60)

    assert identity(victim) == who
    assert [row.t for row in rows(victim)] == list(range(1, plan.rounds + 1))
    # In stage 2, with NAEM at t = 1000 only, the bag stays what it was.
    assert choices(victim)[last.t + 1].bag == last.matcher["bag"] != []
    assert longest_round(others) <= longest_allowed(plan)
    assert all(finished(other) == plan.rounds for other in others)


def test_killed_at_any_moment_it_resumes(federation: Start) -> None:
    plan = small(n=3, rounds=60)
    run = federation(plan)
    victim = run.peers[1]
    run.wait_for((victim.directory / "identity.json").exists, 30)
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


@pytest.mark.slow
def test_the_bootstrap_node_is_needed_to_meet_only(federation: Start) -> None:
    """It dies; two peers that die too meet again all the same; it returns; a late one joins."""
    # Rounds enough for the late one to be there before the others are done.
    plan = small(n=4, min_peers=3, rounds=240)
    run = federation(plan, peers=4, start=3)
    early, late = run.peers[:3], run.peers[3]
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
    assert identity(late)[1] == 3
    first, last = rows(late)[0], rows(late)[-1]
    assert first.t > 15
    assert "caught_up_with" in first.notes
    assert last.t == plan.rounds
    # Its first model is one of the others' after a round, no beginner's.
    for row, least in ((first, 0.2), (last, 0.1)):
        theirs = [accuracy(other) for w in early for other in rows(w) if other.t == row.t]
        assert accuracy(row) > fmean(theirs) - least
    assert longest_round(early) <= longest_allowed(plan)
    for worker, (_, other) in zip(early[:2], reversed(indices[:2]), strict=True):
        life = log(worker).rpartition("going on after round")[2]
        assert f"peer {other} joined" in life or f"peer {other} moved" in life


@pytest.mark.slow
def test_all_killed_at_once_go_on_together(federation: Start) -> None:
    """As after a power cut; not even the bootstrap node comes back to tell where the others are."""
    plan = small(n=3, rounds=30)
    run = federation(plan)
    run.wait_for(lambda: min(map(finished, run.peers)) >= 10, 60)
    for worker in (run.bootstrap, *run.peers):
        worker.kill()
    last = [checkpoint(worker).t for worker in run.peers]
    for worker in run.peers:
        worker.start()
    run.wait(60)
    for worker in run.peers:
        assert [row.t for row in rows(worker)] == list(range(1, 31))
        # They waited for each other. Rounds that some had finished already are lost to the others.
        assert all(choices(worker)[later].neighbours for later in range(max(last) + 1, 31))


@pytest.mark.slow
def test_a_peer_that_stood_still_catches_up(federation: Start) -> None:
    """As a laptop that was closed: taken for dead, it wakes up far behind."""
    plan = small(n=3, rounds=60)
    run = federation(plan)
    sleeper, *others = run.peers
    run.wait_for(lambda: finished(sleeper) >= 5, 60)
    sleeper.send(signal.SIGSTOP)
    run.wait_for(lambda: min(map(finished, others)) >= finished(sleeper) + 15, 60)
    sleeper.send(signal.SIGCONT)
    run.wait(90)
    assert any("caught_up_with" in row.notes for row in rows(sleeper))
    assert all(finished(worker) == plan.rounds for worker in run.peers)
    assert longest_round(others) <= longest_allowed(plan)


@pytest.mark.slow
def test_a_peer_that_comes_back_when_all_have_left_finishes_alone(federation: Start) -> None:
    plan = small(n=2, rounds=20, network=NETWORK | {"request_timeout": 1.0})
    run = federation(plan)
    victim, *others = run.peers
    run.wait_for(lambda: finished(victim) >= 10, 60)
    victim.kill()
    run.wait_for(lambda: not any(other.running for other in others), 60)
    run.kill_bootstrap()
    victim.start()
    run.wait(30)
    assert [row.t for row in rows(victim)] == list(range(1, 21))


@pytest.mark.slow
def test_a_lockstep_federation_repeats_exactly(federation: Start) -> None:
    plan = small(n=3, rounds=10, matching={"l": 1, "k": 1, "t1": 5, "tau": 2})

    def chosen(name: str) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
        run = federation(plan, name)
        run.wait(60)
        return {
            (row.index, row.t): (row.neighbours, row.bag)
            for worker in run.peers
            for row in choices(worker).values()
        }

    first, second = chosen("first"), chosen("second")
    assert first == second
    assert len(first) == plan.n * plan.rounds


def test_replicas_log_json_and_settings_come_from_everywhere(
    federation: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "peer.toml"
    config.write_text('log = "json"\nreplicas = 1\n')
    monkeypatch.setenv("PANMESH_CONFIG", str(config))
    monkeypatch.setenv("PANMESH_REPLICAS", "3")  # above the file
    monkeypatch.setenv("PANMESH_LISTEN", "no address")  # below the flag
    plan = small(n=3, rounds=3, matching={"t1": 2})
    # Of several bootstrap nodes one is enough.
    flags = ["--listen", "127.0.0.1:0", "--bootstrap", f"127.0.0.1:{free_port()}"]
    run = federation(plan, peers=1, peer_flags=flags)
    run.wait(60)
    states = sorted(run.peers[0].directory.iterdir())
    assert [path.name for path in states] == ["replica-0", "replica-1", "replica-2"]
    lines = [json.loads(line) for line in log(run.peers[0]).splitlines()]
    done = {(line["replica"], line["t"]) for line in lines if "accuracy" in line}
    assert done == {(replica, t) for replica in range(3) for t in (1, 2, 3)}
    assert {row.index for path in states for row in read_metrics(path)} == {0, 1, 2}


def own_data(folder: Path, index: int) -> str:
    """Write data that only this peer has, and return their spec."""
    rng = np.random.default_rng(index)
    y = rng.integers(0, 3, 90)
    x = rng.normal(size=(90, 4)) + 3 * np.eye(3, 4)[y]
    if index:
        np.savez(folder / f"{index}.npz", x=x, y=y)
        return f"npz:{folder}/{index}.npz"
    lines = [",".join(map(str, [*features, label])) for features, label in zip(x, y, strict=True)]
    (folder / "0.csv").write_text("\n".join(["a,b,c,d,kind", *lines]) + "\n")
    return f"csv:{folder}/0.csv#label=kind"


FACTORY = """
from torch import nn

def small(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], 8), nn.ReLU(), nn.Linear(8, classes))

def other(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], classes))
"""


@pytest.mark.parametrize("model", ["custom", "sklearn-sgd"])
def test_own_data_and_own_models(
    federation: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    (tmp_path / "factory.py").write_text(FACTORY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    plan = small(
        n=3,
        rounds=6,
        model=model,
        data="own",
        classes=3,
        partition={},
        matching={"t1": 3},
        training={"epochs": 5},
    )
    flags = ["--model", "factory:small"] if model == "custom" else []
    single = {index: ["--data", own_data(tmp_path, index)] for index in range(3)}
    run = federation(plan, peer_flags=flags, one_peer_flags=single)
    run.wait(60)
    for worker in run.peers:
        last = rows(worker)[-1]
        assert last.t == plan.rounds
        assert accuracy(last) > 0.8


@pytest.mark.slow
def test_two_processes_with_one_id_harm_nobody(federation: Start) -> None:
    """A copied state directory: the others stay with the one that they knew, and the second learns
    from them, too, from where it was copied."""
    network = NETWORK | {"suspicion": 60.0}  # nobody is taken for dead, however slow the machine is
    plan = small(n=3, rounds=100_000, matching={"l": 2, "k": 2, "t1": 100_000}, network=network)
    run = federation(plan)
    first, *others = run.peers
    run.wait_for(lambda: min(map(finished, run.peers)) >= 5, 100)
    first.send(signal.SIGSTOP)  # so that what is copied is whole
    second = Worker(
        name="copy",
        command=[
            part.replace(str(first.directory), f"{first.directory}-copy") for part in first.command
        ],
        directory=first.directory.with_name(f"{first.directory.name}-copy"),
    )
    shutil.copytree(first.directory, second.directory)
    first.send(signal.SIGCONT)
    copied = checkpoint(second)
    run.peers.append(second)
    second.start()

    def all_reach(workers: list[Worker], rounds: int) -> None:
        """Wait until all have finished so many rounds more than the first of them has by now."""
        goal = max(map(finished, workers)) + rounds
        run.wait_for(lambda: min(map(finished, workers)) >= goal, 100)

    run.wait_for(lambda: sum(row.t > copied.t for row in rows(second)) >= 5, 100)
    all_reach([first, *others], 10)
    assert identity(second) == identity(first)
    assert f"going on after round {copied.t}" in log(second)
    # It leaves, and says goodbye in the name of both.
    second.send(signal.SIGTERM)
    assert second.process is not None
    assert second.process.wait(60) == 0
    all_reach([first, *others], 10)
    for worker in (first, *others):
        # No round was skipped or run twice, and in none was anybody missing.
        seen = rows(worker)
        assert [row.t for row in seen] == list(range(1, len(seen) + 1))
        assert all(len(row.neighbours) == 2 for row in choices(worker).values())
