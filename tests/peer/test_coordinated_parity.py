"""Live peers with a coordinator reach what the laboratory computes, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from town import SECRET, Target, check_attempt, laboratory, live, small

from bootstrap.coordination.tree_store import TREE, TreeStore
from peer.learning.build import prepare
from peer.learning.learner import Learner
from peer.node import LearnerFactory
from peer.plan import UNDEFENDED, Plan
from peer.rundir import read_metrics, read_topology
from simulations.clustered import ClusteredPopulation
from simulations.report import write_report
from simulations.scenarios.coordinated import CoordinatedFederation
from simulations.scenarios.learning import LearnersLearning
from simulations.scenarios.scenario import Scenario

Rows = list[dict[str, Any]]


async def check(
    plan: Plan, tmp: Path, make: LearnerFactory = Target, *, secret: str | None = None
) -> Rows:
    """Compare every row, weight and split of a live run with the laboratory's; return its rows."""
    settings = {} if secret is None else {"secret": secret}
    results = await live(plan, tmp, make, **settings)
    population = laboratory(plan, make, secret=secret)
    simulated = [row for rows in population.run() for row in rows]
    assert [result.index for result in results] == list(range(plan.n))
    for result in results:
        own = [row for row in simulated if row["index"] == result.index]
        topology, metrics = read_topology(result.state), read_metrics(result.state)
        assert [row.t for row in metrics] == list(range(1, plan.rounds + 1))
        assert [row.neighbours for row in topology] == [row["neighbours"] for row in own]
        assert [row.bag for row in topology] == [row["bag"] for row in own]
        for name in ("accuracy", "loss", "precision", "recall"):
            assert [getattr(row, name) for row in metrics] == [row[name] for row in own]
        notes = [{k: v for k, v in row["notes"].items() if k != "attempt"} for row in own]
        assert [row.notes for row in metrics] == notes
        assert result.bag == set(own[-1]["bag"])
        np.testing.assert_array_equal(result.model, population.models[result.index])
    told = read_metrics(tmp / "boot")
    for live_row, row in zip(told, simulated, strict=True):
        assert (live_row.t, live_row.index) == (row["t"], row["index"])
        assert (live_row.accuracy, live_row.precision) == (row["accuracy"], row["precision"])
        check_attempt(live_row.notes, row["notes"])
    if isinstance(population, ClusteredPopulation):
        compare_trees(plan, tmp, population)
    return simulated


def compare_trees(plan: Plan, tmp: Path, population: ClusteredPopulation) -> None:
    expected = population.server.tree
    size = expected.nodes[0].update.size
    loaded = TreeStore(tmp / "boot" / TREE, plan.digest).load(size, expected.trainable)
    assert loaded is not None
    tree, t = loaded
    assert t == plan.rounds
    assert tree.places == expected.places
    for ours, theirs in zip(tree.nodes, expected.nodes, strict=True):
        np.testing.assert_array_equal(ours.update, theirs.update)
        assert (ours.t, ours.children, ours.largest) == (theirs.t, theirs.children, theirs.largest)


def splits(rows: Rows) -> list[int]:
    attempts = [row["notes"]["attempt"] for row in rows if "attempt" in row["notes"]]
    return [attempt["t"] for attempt in attempts if attempt["children"] is not None]


@pytest.mark.parametrize("secret", [None, SECRET])
async def test_cfl(tmp_path: Path, secret: str | None) -> None:
    plan = small("cfl", cfl={"patience": 2, "permute": secret is not None})
    rows = await check(plan, tmp_path, secret=secret)
    assert len(splits(rows)) == 1


async def test_cfl_with_sampled_participation_and_weights(tmp_path: Path) -> None:
    plan = small("cfl", rounds=9, central={"fraction": 0.75}, matching={"weighting": "samples"})
    rows = await check(plan, tmp_path)
    assert len(splits(rows)) == 1
    payloads = {row["payload_sent"] for row in rows}
    assert len(payloads) > 2  # somebody was away at the split, and was routed
    assert tmp_path / "boot" / "plots" / "clustering.png" in write_report(tmp_path / "boot")


async def test_ifca_with_a_redraw_and_sampled_participation(tmp_path: Path) -> None:
    plan = small("ifca", central={"fraction": 0.5})
    await check(plan, tmp_path)
    assert json.loads((tmp_path / "boot" / "coordinator.json").read_text())["draw"] > 0


async def test_ifca_whose_models_are_too_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = small("ifca", rounds=3, central={"clusters": 5, "redraws": 2})
    await check(plan, tmp_path)
    # The laboratory says it, too.
    assert caplog.text.count("in 3 draws of 5 initial models") == 2


@pytest.mark.parametrize("fraction", [1.0, 0.4])
async def test_fedavg(tmp_path: Path, fraction: float) -> None:
    plan = small("fedavg", central={"fraction": fraction}, matching={"weighting": "samples"})
    await check(plan, tmp_path)


@pytest.mark.parametrize(
    ("method", "defence"),
    [
        ("cfl", {"rule": "multi-krum"}),
        ("ifca", {"rule": "centred-clipping", "clip": 2.0}),
        ("fedavg", {"rule": "trimmed-mean", "byzantine": 2}),
    ],
)
async def test_defended(tmp_path: Path, method: str, defence: dict[str, Any]) -> None:
    permutes = method == "cfl"
    plan = small(method, defence=defence, cfl={"patience": 2, "permute": permutes})
    rows = await check(plan, tmp_path, secret=SECRET if permutes else None)
    assert len(splits(rows)) == permutes
    plain = laboratory(plan.model_copy(update={"defence": UNDEFENDED}))
    last = list(plain.run())[-1]
    assert [row["loss"] for row in last] != [row["loss"] for row in rows[-plan.n :]]


@pytest.mark.parametrize("method", ["cfl", "ifca", "fedavg"])
async def test_half_precision(tmp_path: Path, method: str) -> None:
    plan = small(method, rounds=4, network={"precision": "bfloat16", "probe_interval": 30.0})
    await check(plan, tmp_path)


@pytest.mark.parametrize(
    "method",
    [
        "cfl",
        pytest.param("ifca", marks=pytest.mark.slow),
        pytest.param("fedavg", marks=pytest.mark.slow),
    ],
)
async def test_bytes_are_those_of_the_virtual_network(tmp_path: Path, method: str) -> None:
    # Time enough for every request: one that is given up and made anew counts twice.
    network = {"request_timeout": 60.0, "linger": 1.0, "probe_interval": 30.0}
    plan = small(method, rounds=4, central={"fraction": 0.5}, network=network)
    learning = LearnersLearning([Target(plan, i) for i in range(plan.n)])
    federation = CoordinatedFederation(Scenario(plan=plan), learning)
    rows = {(row.t, row.index): row for row, _ in federation.run()}
    for result in await live(plan, tmp_path):
        for row in read_metrics(result.state):
            own = rows[row.t, row.index]
            assert (row.payload_sent, row.payload_received) == (
                own.payload_sent, own.payload_received,
            )  # fmt: skip


def digits(method: str) -> Plan:
    return Plan.model_validate(
        {
            "n": 8, "rounds": 5, "seed": 5, "method": method,
            "partition": {"kind": "rotation", "clusters": 2, "train_per_peer": 60},
            "training": {"batch": 20}, "cfl": {"patience": 2, "eps1": 1.0},
        }
    )  # fmt: skip


def trained(plan: Plan, index: int) -> Learner:
    return prepare(plan, index)[0]


async def test_cfl_on_digits(tmp_path: Path) -> None:
    rows = await check(digits("cfl"), tmp_path, trained)
    assert len(splits(rows)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ifca", "fedavg"])
async def test_others_on_digits(tmp_path: Path, method: str) -> None:
    await check(digits(method), tmp_path, trained)
