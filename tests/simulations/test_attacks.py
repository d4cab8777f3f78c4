"""Attacks: who attacks, what is sent, and that the laboratory and the reference agree on it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from peer.errors import UserError
from peer.learning.partition import deal
from peer.learning.sources import load_dataset
from peer.matching.similarity import GradientEvidence
from peer.plan import Plan
from peer.randomness import Purpose, generator
from peer.robust import norm
from peer.rundir import final_rows, read_metrics
from simulations.attacks import (
    Backdoor,
    Threat,
    View,
    attack,
    attack_names,
    backdoor_success,
    triggered,
)
from simulations.central import HostileCrew, LearnerCrew
from simulations.engine.laboratory import Laboratory, poisoned_holdings
from simulations.engine.workers import Engine
from simulations.population import Population, _Snapshots, make_learners
from simulations.runs import Equipment, PopulationMaker, run_population


def make_plan(**changes: Any) -> Plan:
    table: dict[str, Any] = {
        "n": 8,
        "rounds": 3,
        "seed": 4,
        "matching": {"l": 3, "k": 2, "tau": 2},
        "partition": {
            "kind": "rotation", "clusters": 2, "train_per_peer": 40, "test_per_peer": 60,
        },
        "training": {"batch": 20},
    }  # fmt: skip
    return Plan.model_validate(table | changes)


def vectors(*rows: tuple[float, ...]) -> list[np.ndarray[Any, Any]]:
    return [np.array(row, dtype=np.float32) for row in rows]


def test_the_same_share_of_every_cluster_attacks_drawn_by_the_seed() -> None:
    plan = Plan.model_validate({"n": 24, "partition": {"kind": "rotation", "clusters": 4}})
    threat = Threat("sign-flip", 0.2)
    attackers = threat.attackers(plan)
    assert attackers == threat.attackers(plan) == sorted(set(attackers))
    assert sorted(Counter(plan.cluster_of(i) for i in attackers).values()) == [1, 1, 1, 2]
    others = [threat.attackers(plan.model_copy(update={"seed": seed})) for seed in range(5)]
    assert len({tuple(own) for own in others}) > 2
    half = Threat("sign-flip", 0.5).attackers(plan)
    assert Counter(plan.cluster_of(i) for i in half) == dict.fromkeys(range(4), 3)
    for share in (0.01, 0.9):
        with pytest.raises(UserError, match="nobody"):
            Threat("sign-flip", share).attackers(plan)
    for share in (0.0, 1.0):
        with pytest.raises(UserError, match="not between 0 and 1"):
            Threat("sign-flip", share)
    with pytest.raises(UserError, match="no attack evil"):
        Threat("evil")


BEFORE = vectors((0, 0), (1, 1), (2, 0), (9, 9))
TRAINED = vectors((1, 2), (2, 2), (4, 4), (9, 8))
"""Peers 0, 1 and 2 are of one cluster, 3 of another; peer 0 attacks."""


def sent(name: str, **keys: Any) -> list[float]:
    threat = Threat(name, **keys)
    view = View(1, BEFORE, TRAINED, [0, 0, 0, 1], [0], range(4))
    rng = np.random.default_rng(1)
    forged: list[float] = threat.means.forge(0, view, rng).tolist()
    return forged


def test_what_is_sent_by_hand() -> None:
    assert sent("sign-flip") == [-1.0, -2.0]
    assert sent("sign-flip", scale=4.0) == [-4.0, -8.0]
    assert sent("label-flip") == sent("backdoor") == sent("sybil") == [1.0, 2.0]
    assert sent("backdoor", scale=3.0) == [3.0, 6.0]
    # From (1.5, 0.5), the mean of the honest w^{t-1}, against their mean update (1.5, 2.5).
    assert sent("ipm") == [0.0, -2.0]
    assert sent("ipm", scale=2.0) == [-1.5, -4.5]
    # The mean (3, 3) of the honest models less 1.5 times their deviations (1, 1).
    assert sent("alie") == [1.5, 1.5]
    assert sent("alie", scale=-1.0) == [4.0, 4.0]


def test_random_steps_have_the_length_of_the_honest_one_times_the_scale() -> None:
    for name, scale in (("gaussian", 10.0), ("free-rider", 0.1)):
        step = np.array(sent(name), dtype=np.float32) - BEFORE[0]
        assert norm(step) == pytest.approx(scale * 5**0.5, rel=1e-5)


def test_sybils_send_one_model_and_learners_that_are_absent_nothing() -> None:
    plan = make_plan()
    rng = np.random.default_rng(0)
    before, trained = rng.normal(size=(2, 8, 5)).astype(np.float32)
    threat = Threat("sybil", 0.5)
    forged = threat.forge(plan, 1, before, trained)
    for cluster in range(2):
        own = [i for i in forged if plan.cluster_of(i) == cluster]
        assert len(own) == 2
        assert all(np.array_equal(forged[i], trained[own[0]]) for i in own)
    present = [i for i in range(8) if i != min(forged)]
    assert set(threat.forge(plan, 1, before, trained, present=present)) == set(forged) - {
        min(forged)
    }
    noise = [Threat("gaussian", 0.5).forge(plan, t, before, trained) for t in (1, 1, 2)]
    first = min(noise[0])
    assert np.array_equal(noise[0][first], noise[1][first])
    assert not np.array_equal(noise[0][first], noise[2][first])


def test_labels_are_turned_round_and_images_marked() -> None:
    plan = make_plan()
    dataset = load_dataset("digits", seed=plan.seed)
    flips = Threat("label-flip").poisons(plan)
    i = min(flips)
    assert set(flips) == set(Threat("label-flip").attackers(plan))
    honest = deal(dataset, plan, i, own=False)
    poisoned = deal(dataset, plan, i, own=False, poison=flips[i])
    assert np.array_equal(poisoned.train_x, honest.train_x)
    assert np.array_equal(poisoned.train_y, 9 - honest.train_y)
    assert np.array_equal(poisoned.test_y, honest.test_y)

    poison = Threat("backdoor").poisons(plan)[i]
    marked = deal(dataset, plan, i, own=False, poison=poison)
    rng = generator(plan.seed, Purpose.ATTACK, index=i)
    chosen = rng.choice(40, size=20, replace=False)
    assert np.array_equal(marked.train_x[chosen], triggered(honest.train_x[chosen]))
    assert set(marked.train_y[chosen]) == {Backdoor.target}
    others = np.setdiff1d(np.arange(40), chosen)
    assert np.array_equal(marked.train_x[others], honest.train_x[others])
    assert np.array_equal(marked.train_y[others], honest.train_y[others])
    assert Threat("sign-flip").poisons(plan) == {}


def test_the_trigger() -> None:
    images = np.zeros((2, 1, 8, 8), dtype=np.uint8)
    images[0, 0, 0, 0] = 7
    marked = triggered(images)
    assert np.array_equal(np.argwhere(marked[1, 0]), [[6, 6], [6, 7], [7, 6], [7, 7]])
    assert marked.max() == 7
    assert images[1].max() == 0
    with pytest.raises(UserError, match="is for images"):
        triggered(np.zeros((3, 4), dtype=np.float32))


def test_evidence_agrees_with_the_model_that_is_sent_unless_g_is_feigned() -> None:
    plan = make_plan(matching={"l": 3, "k": 2, "tau": 2, "evidence": "exact"})
    learners = make_learners(plan)
    for feign in (False, True):
        population = Population(
            plan, "panm-grad", learners=learners, threat=Threat("sign-flip", feign=feign)
        )
        population.t = 1
        trained = [learner.fit(population.initial, 1) for learner in learners]
        snapshots = _Snapshots(population, trained)
        i = min(Threat("sign-flip").attackers(plan))
        honest = trained[i] - population.initial
        told, seen = snapshots.evidence(i), snapshots.model(i)
        assert told is not None
        assert seen is not None
        np.testing.assert_array_equal(seen, population.initial - honest)
        np.testing.assert_array_equal(told.h, seen - population.initial)
        np.testing.assert_array_equal(told.g, honest if feign else told.h)
        own = snapshots.own_evidence(i)
        assert isinstance(own, GradientEvidence)
        np.testing.assert_array_equal(own.g, honest)  # by which it finds its own neighbours


@pytest.mark.parametrize(
    ("method", "threat"),
    [("panm-grad", Threat("backdoor", 0.25)), ("panm-loss", Threat("alie", 0.25))],
)
def test_the_exact_laboratory_does_what_the_reference_does(method: str, threat: Threat) -> None:
    plan = make_plan(defence={"gate": True, "clip": 1.0})
    population = Population(plan, method, threat=threat)
    with Laboratory(plan, method, workers=0, exact=True, threat=threat) as laboratory:
        for expected, rows in zip(population.run(), laboratory.run(), strict=True):
            assert rows == expected
        np.testing.assert_array_equal(laboratory.models, np.stack(population.models))


@pytest.mark.parametrize("name", ["backdoor", "ipm"])
def test_a_run_tells_of_honest_peers_and_names_the_others(tmp_path: Path, name: str) -> None:
    plan = make_plan(method="cfl" if name == "ipm" else "random")
    threat = Threat(name, 0.25)
    with PopulationMaker(Equipment(reference=True, threat=threat)) as maker:
        summary = run_population(plan, tmp_path, maker=maker)
    rows = final_rows(read_metrics(tmp_path))
    attackers = threat.attackers(plan)
    assert [row.index for row in rows if row.attacker] == attackers == summary["attackers"]
    honest = [row.accuracy for row in rows if row.accuracy is not None and not row.attacker]
    assert summary["accuracy_mean"] == pytest.approx(fmean(honest))
    assert summary["accuracy_worst"] == min(honest)
    assert summary["attack"] == threat.label
    assert 0 <= summary["chosen"] <= 1
    assert ("backdoor" in summary) == (name == "backdoor")


def test_honest_peers_train_on_what_they_had_beside_poisoners() -> None:
    """With more peers than data, attackers' rows of the engine's table are shared with nobody."""
    plan = make_plan(
        n=4, partition={"kind": "rotation", "clusters": 2, "train_per_peer": 1297},
        training={"epochs": 1},
    )  # fmt: skip
    threat = Threat("label-flip", 0.5)
    learners = make_learners(plan, threat=threat)
    with Engine(plan, workers=0, exact=True, holdings=poisoned_holdings(plan, threat)) as engine:
        engine.train(1)
        for i, learner in enumerate(learners):
            expected = learner.fit(learner.initial(), 1)
            np.testing.assert_array_equal(engine.trained[i], expected)


def test_a_coordinator_gets_what_attackers_send() -> None:
    plan = make_plan()
    crew = LearnerCrew(make_learners(plan))
    threat = Threat("sign-flip", 0.25)
    models = np.stack([crew.initial] * 8)
    honest = crew.fit(models, range(8), 1)
    hostile = HostileCrew(crew, plan, threat).fit(models, range(8), 1)
    for i in range(8):
        expected = 2 * models[i] - honest[i] if i in threat.attackers(plan) else honest[i]
        np.testing.assert_allclose(hostile[i], expected, atol=1e-6)


def test_who_takes_the_trigger_for_the_target() -> None:
    plan = make_plan()
    learner = make_learners(plan)[0]
    biased = learner.initial() * 0
    names = learner.manifest.unflatten(biased)
    bias = list(names.values())[-1]
    bias[Backdoor.target] = 1.0
    assert backdoor_success(plan, [biased] * 8, [1, 3]) == 1.0
    bias[:] = np.eye(10)[5]
    assert backdoor_success(plan, [biased] * 8, [1, 3]) == 0.0


def test_results_of_other_threats_are_told_apart() -> None:
    plan = make_plan(method="random")
    labels = [
        Equipment(threat=threat).label(plan)
        for threat in (
            None,
            Threat("ipm"),
            Threat("ipm", 0.3),
            Threat("ipm", scale=2.0),
            Threat("ipm", feign=True),
        )
    ]
    assert labels == ["", "ipm-0.2", "ipm-0.3", "ipmx2-0.2", "ipm-feigned-0.2"]
    assert Equipment(threat=Threat("ipm")).label(make_plan(method="local")) == ""
    assert json.dumps(attack_names())
    with pytest.raises(ValueError, match="already"):
        attack("ipm")(Backdoor)
