"""Coordinated federations of real processes, killed at will."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live import NETWORK, Start, checkpoint, finished, log, rows, wait_for
from sklearn.metrics import adjusted_rand_score
from town import check_attempt

from bootstrap.coordination.tree_store import INDEX, TREE, TreeRecord, read_index
from peer.plan import Plan
from peer.rundir import find_runs, read_metrics
from peer.settings import replica_states
from peer.state import newest_checkpoint
from simulations.central import CentralPopulation, LearnerCrew
from simulations.clustered import ClusteredPopulation
from simulations.population import make_learners
from simulations.processes import Federation, Worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def digits(method: str, **changes: Any) -> Plan:
    table: dict[str, Any] = {
        "n": 8,
        "rounds": 6,
        "seed": 5,
        "method": method,
        "partition": {"kind": "rotation", "clusters": 2, "train_per_peer": 60},
        "training": {"batch": 20},
        "cfl": {"patience": 2, "eps1": 1.0},
        "network": NETWORK,
    }
    return Plan.model_validate(table | changes)


def check_against_the_laboratory(run: Federation) -> None:
    """Fail unless every peer's rows and model are those of the laboratory."""
    plan = run.plan
    crew = LearnerCrew(make_learners(plan))
    population: CentralPopulation | ClusteredPopulation
    if plan.method == "cfl":
        population = ClusteredPopulation(plan, crew)
    else:
        population = CentralPopulation(plan, plan.method, crew)
    simulated = [row for round_ in population.run() for row in round_]
    for worker in run.peers:
        index = checkpoint(worker).index
        own = [row for row in simulated if row["index"] == index]
        assert [row.accuracy for row in rows(worker)] == [row["accuracy"] for row in own]
        np.testing.assert_array_equal(checkpoint(worker).model, population.models[index])
    told = {(row.t, row.index): row.notes for row in read_metrics(run.bootstrap.directory)}
    for row in simulated:
        check_attempt(told[row["t"], row["index"]], row["notes"])


@pytest.mark.parametrize("method", ["cfl", "cfl-permuted", "ifca", "fedavg"])
def test_the_coordinator_is_killed_and_the_run_ends_the_same(
    federation: Start, tmp_path: Path, method: str
) -> None:
    method, _, permuted = method.partition("-")
    cfl = {"patience": 2, "eps1": 1.0, "permute": bool(permuted)}
    # Many short rounds, so that the second kill comes before the last of them.
    run = federation(digits(method, rounds=20, cfl=cfl))
    for t in (2, 4):
        run.wait_for(lambda t=t: min(map(finished, run.peers)) >= t, 120)  # type: ignore[misc]
        run.kill_bootstrap()
        time.sleep(1)
        run.restart_bootstrap()
    run.wait(240)
    assert "going on after round" in log(run.bootstrap)
    check_against_the_laboratory(run)
    summary = run.collect(tmp_path / "merged")
    assert (summary["finished"], summary["method"]) == (8, method)
    attempts = [row for row in read_metrics(tmp_path / "merged") if "attempt" in row.notes]
    assert bool(attempts) == (tmp_path / "merged" / TREE).exists() == (method == "cfl")


def tree_of(worker: Worker) -> TreeRecord:
    return read_index(worker.directory / TREE / INDEX)


def test_twenty_peers_with_kills_and_twenty_newcomers(
    federation: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = digits(
        "cfl",
        n=40,
        min_peers=20,
        rounds=24,
        partition={"kind": "rotation", "clusters": 4, "train_per_peer": 60, "test_per_peer": 100},
        cfl={"eps1": 1.0},
    )
    run = federation(plan, peers=20)
    victims = run.peers[:3]
    run.wait_for(lambda: min(map(finished, run.peers)) >= 3, 400)
    run.kill_bootstrap()
    time.sleep(2)
    run.restart_bootstrap()
    run.wait_for(lambda: min(map(finished, run.peers)) >= 6, 300)
    for worker in victims:
        worker.kill()
    at = finished(run.peers[5])
    run.wait_for(lambda: min(map(finished, run.peers[3:])) >= at + 3, 300)
    for worker in victims:
        worker.start()
    run.wait_for(lambda: min(map(finished, run.peers)) >= at + 5, 300)
    run.kill_bootstrap()
    time.sleep(2)
    run.restart_bootstrap()
    run.wait(900)
    assert all(finished(worker) == plan.rounds for worker in run.peers)
    places = tree_of(run.bootstrap).places
    assert sorted(places) == list(range(20))
    true = [plan.cluster_of(i) for i in places]
    assert adjusted_rand_score(true, list(places.values())) == 1.0
    last = {checkpoint(worker).index: checkpoint(worker) for worker in run.peers}
    for i, j in ((0, 4), (1, 5)):
        np.testing.assert_array_equal(last[i].model, last[j].model)

    flags = ["--bootstrap", run.address, "--replicas", "20"]
    crowd = run._worker("crowd", ["peer", *flags])
    run.peers.append(crowd)
    crowd.start()
    run.wait(600)
    home = {plan.cluster_of(i): place for i, place in places.items()}
    right = 0
    for state in replica_states(crowd.directory):
        newest = newest_checkpoint(state)
        assert newest is not None
        (row,) = read_metrics(state)
        assert row.t == plan.rounds
        place = row.notes["node"]
        right += place == home[plan.cluster_of(newest.index)]
        like = next(i for i in last if places[i] == place)
        np.testing.assert_array_equal(newest.model, last[like].model)
    assert len(find_runs(crowd.directory)) == 20
    with capsys.disabled():
        print(f"\n{right} of 20 newcomers were routed right")
    assert right >= 19
    wait_for(lambda: len(tree_of(run.bootstrap).places) == 40, 10)
