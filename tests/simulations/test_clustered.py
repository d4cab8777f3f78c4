"""CFL over a population, on learners whose every number is known, and on real ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bootstrap.coordination.tree_store import TREE, TreeStore
from peer.learning.learner import Entry, Manifest, Scores, Vector
from peer.plan import Plan
from peer.rundir import read_metrics
from simulations.central import EngineCrew, LearnerCrew
from simulations.clustered import ClusteredPopulation
from simulations.engine.workers import Engine
from simulations.population import Models, make_learners
from simulations.report import write_report
from simulations.runs import Equipment, PopulationMaker, run_population

SIZE = 64


class Targets:
    """A crew whose peers go half of the way to targets of their own, near their cluster's."""

    manifest = Manifest((Entry("weight", (SIZE,)),))

    def __init__(self, plan: Plan, refusing: Sequence[int] = ()) -> None:
        rng = np.random.default_rng(0)
        centres = rng.normal(size=(plan.partition.clusters, SIZE))
        own = [centres[plan.cluster_of(i)] + 0.2 * rng.normal(size=SIZE) for i in range(plan.n)]
        self.targets = np.array(own, dtype=np.float32)
        self.initial = np.full(SIZE, 4, dtype=np.float32)
        self.samples = [i + 1 for i in range(plan.n)]
        self.refusing = refusing

    def fit(self, models: Models, peers: Sequence[int], t: int) -> Models:
        trained = list(models)
        for i in peers:
            refused = np.full(SIZE, np.nan, dtype=np.float32)
            trained[i] = refused if i in self.refusing else (models[i] + self.targets[i]) / 2
        return trained

    def losses(self, models: Sequence[Vector], peers: Sequence[int], t: int) -> list[list[float]]:
        raise NotImplementedError

    def evaluate(self, models: Models) -> list[Scores]:
        losses = np.square(np.stack(models) - self.targets).sum(axis=1).tolist()
        return [Scores(1 / (1 + loss), loss) for loss in losses]


def plan(**changes: Any) -> Plan:
    table = {"n": 12, "rounds": 30, "partition": {"kind": "rotation", "clusters": 4}}
    return Plan.model_validate(table | changes)


def places(population: ClusteredPopulation) -> set[tuple[int, ...]]:
    tree = population.server.tree
    return {tuple(tree.members(v)) for v in tree.leaves}


TRUE = {(0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11)}


def test_peers_end_in_their_clusters_with_their_models() -> None:
    population = ClusteredPopulation(plan(), Targets(plan()))
    *_, rows = population.run(evaluate_every=30)
    assert places(population) == TRUE
    assert (population.t, len(rows)) == (30, 12)
    for row in rows:
        assert (row["precision"], row["recall"], row["cluster"]) == (1, 1, row["index"] % 4)
        assert row["accuracy"] is not None
        assert row["payload_sent"] == row["payload_received"] == 4 * SIZE
    own = population.crew.evaluate(population.models)
    assert [row["loss"] for row in rows] == [scores.loss for scores in own]


def test_attempts_are_told_once_a_cluster_and_round() -> None:
    population = ClusteredPopulation(plan(), Targets(plan()))
    splits = 0
    for rows in population.run():
        told = [row["notes"]["attempt"] for row in rows if "attempt" in row["notes"]]
        json.dumps([row["notes"] for row in rows], allow_nan=False)
        assert sorted(i for attempt in told for i in attempt["members"]) == list(range(12))
        assert all(attempt["t"] == rows[0]["t"] for attempt in told)
        splits += sum(attempt["children"] is not None for attempt in told)
    assert splits == 3


def test_those_who_were_away_at_a_split_pay_for_their_way() -> None:
    sampled = plan(central={"fraction": 0.7}, rounds=60)
    population = ClusteredPopulation(sampled, Targets(sampled))
    most = 0
    for rows in population.run():
        sent = [row["payload_sent"] // (4 * SIZE) for row in rows]
        assert sum(own > 0 for own in sent) == 8
        most = max(most, *sent)
    assert most > 1
    population.route(range(12))
    assert places(population) == TRUE


def test_an_update_that_is_refused_keeps_nobody() -> None:
    population = ClusteredPopulation(plan(), Targets(plan(), refusing=[5]))
    rows = [row for rows in population.run() for row in rows]
    assert population.server.tree.places[5] == 0
    assert places(population) == {tuple(i for i in own if i != 5) for own in TRUE}
    assert all(5 not in row["notes"].get("attempt", {"members": []})["members"] for row in rows)


def test_samples_weigh() -> None:
    weighted = plan(matching={"weighting": "samples"}, rounds=1)
    population = ClusteredPopulation(weighted, crew := Targets(weighted))
    population.step()
    weights = np.arange(1, 13) / 78
    expected = (crew.initial + weights @ crew.targets) / 2
    np.testing.assert_allclose(population.models[0], expected, rtol=1e-5)


def test_a_permutation_changes_nothing_but_what_the_server_sees() -> None:
    plain = ClusteredPopulation(plan(), Targets(plan()))
    hidden = ClusteredPopulation(plan(), Targets(plan()), secret=b"sixteen bytes or more")
    for ours, theirs in zip(plain.run(), hidden.run(), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a["loss"], a["bag"]) == (b["loss"], b["bag"])
    assert np.array_equal(plain.models, hidden.models)
    seen, permuted = (p.server.tree.nodes[-1].update for p in (plain, hidden))
    assert not np.array_equal(seen, permuted)
    assert np.array_equal(np.sort(seen), np.sort(permuted))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_learners_and_the_engine_agree(precision: str) -> None:
    real = Plan.model_validate(
        {
            "n": 8, "rounds": 4, "data": "digits", "model": "mlp",
            "partition": {"kind": "rotation", "clusters": 2, "train_per_peer": 60},
            "network": {"precision": precision}, "training": {"epochs": 1},
            "cfl": {"patience": 2, "eps1": 1.0},
        }
    )  # fmt: skip
    reference = ClusteredPopulation(real, LearnerCrew(make_learners(real)))
    with Engine(real, workers=0, exact=True) as engine:
        exact = ClusteredPopulation(real, EngineCrew(engine))
        for ours, theirs in zip(reference.run(), exact.run(), strict=True):
            assert ours == theirs
        assert np.array_equal(reference.models, exact.models)
    with Engine(real, workers=1) as engine:
        fast = ClusteredPopulation(real, EngineCrew(engine))
        for _ in fast.run():
            pass
        tolerance = 1e-3 if precision == "float32" else 0.05
        np.testing.assert_allclose(fast.models, reference.models, atol=tolerance)
        assert fast.server.tree.places == reference.server.tree.places
    assert len(reference.server.tree.leaves) == 2


def test_a_run_leaves_its_tree_its_attempts_and_a_picture_of_them(tmp_path: Path) -> None:
    small = Plan.model_validate(
        {
            "n": 4, "rounds": 3, "method": "cfl", "data": "digits", "cfl": {"eps1": 1.0},
            "partition": {"kind": "rotation", "clusters": 2, "train_per_peer": 20},
        }
    )  # fmt: skip
    with PopulationMaker(Equipment(reference=True)) as maker:
        summary = run_population(small, tmp_path, maker=maker)
    assert summary["clusters_found"] == 1
    told = [row.notes["attempt"] for row in read_metrics(tmp_path) if "attempt" in row.notes]
    assert [attempt["t"] for attempt in told] == [1, 2, 3]
    size = summary["bytes_sent"] // 4 // 4 // 3
    kept = TreeStore(tmp_path / TREE, small.digest).load(size, size)
    assert kept is not None
    assert kept[0].places == dict.fromkeys(range(4), 0)
    assert kept[1] == 3
    assert tmp_path / "plots" / "clustering.png" in write_report(tmp_path)
