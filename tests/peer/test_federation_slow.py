"""Federations as large and as ill-treated as minutes allow."""

from __future__ import annotations

import json
import random
import statistics
import time
from datetime import datetime

import pytest
from live import (
    Start,
    checkpoint,
    choices,
    finished,
    identity,
    kill_at_random,
    log,
    longest_allowed,
    rows,
    small,
)

from peer.errors import UserError
from peer.learning.sources import load_dataset
from peer.plan import Plan
from simulations.processes import Worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FASHION = Plan.model_validate(
    {
        "name": "fashion-20",
        "n": 20,
        "rounds": 60,
        "data": "fashion-mnist",
        "matching": {"l": 6, "k": 3, "t1": 20, "tau": 5},
        "partition": {"kind": "rotation", "clusters": 4, "train_per_peer": 300},
    }
)


def test_killed_at_fifty_moments_it_resumes(federation: Start) -> None:
    plan = small(n=3, rounds=1000)
    run = federation(plan)
    victim = run.peers[1]
    run.wait_for((victim.directory / "identity.json").exists, 30)
    killed = kill_at_random(run, victim, 50, random.Random(time.time_ns()))
    assert killed == 50
    run.wait(600)
    assert all(finished(worker) == plan.rounds for worker in run.peers)
    assert not list(victim.directory.rglob("*.new"))


def noticed(worker: Worker, index: int, since: float) -> float:
    """Return after how many seconds a peer declared another dead."""
    for line in map(json.loads, log(worker).splitlines()):
        when = datetime.fromisoformat(line["time"]).timestamp()
        if when >= since and line["message"] == f"peer {index} dead":
            return when - since
    raise AssertionError(f"{worker.name} never noticed that peer {index} died")


def test_a_quarter_of_twenty_and_the_bootstrap_node_die(
    federation: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = FASHION
    try:
        load_dataset(plan.data, seed=plan.seed)
    except UserError as missing:
        pytest.skip(str(missing))
    run = federation(plan, peer_flags=["--log", "json"])
    victims, others = run.peers[:5], run.peers[5:]
    run.wait_for(lambda: min(map(finished, run.peers)) >= 22, 300)
    indices = [identity(worker) for worker in run.peers]
    since = time.time()
    for worker in (run.bootstrap, *victims):
        worker.kill()
    at = max(map(finished, others))
    bags = [set(checkpoint(worker).matcher["bag"] or ()) for worker in victims]
    lost = {index for _, index in indices[:5]}
    run.wait_for(lambda: min(map(finished, others)) >= at + 8, 300)
    notices = [noticed(worker, index, since) for worker in others for index in lost if index]
    back = time.time()
    for worker in victims:
        worker.start()
    run.wait(600)

    assert [identity(worker) for worker in run.peers] == indices
    assert all(finished(worker) == plan.rounds for worker in run.peers)
    before = max(r.seconds.round for w in run.peers for r in rows(w) if r.time < since)
    during = max(r.seconds.round for w in others for r in rows(w) if since <= r.time < back)
    after = max(r.seconds.round for w in others for r in rows(w) if r.time >= back)
    # A round takes its usual time on top of what the dead hold it up.
    assert max(during, after) <= longest_allowed(plan) + before
    precision = [rows(worker)[-1].precision or 0.0 for worker in run.peers]
    accuracy = [rows(worker)[-1].accuracy or 0.0 for worker in run.peers]
    assert statistics.fmean(precision) >= 0.95
    # Those that were away are as good in the end as those that were not.
    assert statistics.fmean(accuracy[:5]) > statistics.fmean(accuracy[5:]) - 0.03
    for worker, bag in zip(victims, bags, strict=True):
        first = next(row for row in rows(worker) if row.time > back)
        assert bag & set(choices(worker)[first.t].bag)
    with capsys.disabled():
        print(
            f"\nlongest round: {before:.1f} s before, {during:.1f} s when they died, "
            f"{after:.1f} s when they came back; allowed {longest_allowed(plan):.1f} s\n"
            f"noticed after {min(notices):.1f} to {max(notices):.1f} s, "
            f"median {statistics.median(notices):.1f} s\n"
            f"accuracy {statistics.fmean(accuracy[:5]):.3f} of the killed, "
            f"{statistics.fmean(accuracy[5:]):.3f} of the others, "
            f"precision {statistics.fmean(precision):.3f}"
        )
