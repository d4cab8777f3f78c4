from __future__ import annotations

import json
import math
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from softmax import CLASSES, FEATURES, Softmax

from peer.aggregation import average
from peer.errors import UserError
from peer.learning.learner import Vector
from peer.matching.similarity import GradientEvidence, gradient_similarity
from peer.matching.sketch import CountSketch
from peer.network.vectors import decode_vector, encode_vector
from peer.plan import Plan
from peer.randomness import Purpose, generator
from simulations.population import Population, Row

K = 2
METHODS = ["panm-grad", "panm-loss", "pens", "random", "fixed", "oracle", "local"]


def uneven(plan: Plan, index: int, kind: type[Softmax] = Softmax) -> Softmax:
    """Return a learner of which no two peers have as many samples."""
    return kind(plan, index, samples=30 + index)


class Diverged(Softmax):
    """Its models are not finite, so nobody can take them."""

    def fit(self, model: Vector, t: int) -> Vector:
        return np.full(self.manifest.size, math.nan, dtype=np.float32)


def make_plan(**changes: Any) -> Plan:
    table: dict[str, Any] = {
        "n": 10,
        "rounds": 12,
        "seed": 3,
        "matching": {"l": 4, "k": 2, "tau": 2, "sketch_buckets": 32},
        "partition": {"kind": "rotation", "clusters": K},
        "training": {"lr": 0.005},
    }
    for key, value in changes.items():
        table[key] = {**table[key], **value} if isinstance(table.get(key), dict) else value
    return Plan.model_validate(table)


def population(plan: Plan, method: str) -> Population:
    return Population(plan, method, learners=[uneven(plan, i) for i in range(plan.n)])


@pytest.mark.parametrize("method", METHODS)
def test_a_run_has_a_row_for_every_peer_and_round_and_repeats(method: str) -> None:
    plan = make_plan()
    one, two = (list(population(plan, method).run(evaluate_every=5)) for _ in range(2))
    assert json.dumps(one) == json.dumps(two)
    assert [[(row["t"], row["index"]) for row in rows] for rows in one] == [
        [(t, i) for i in range(10)] for t in range(1, 13)
    ]
    evaluated = [rows[0]["t"] for rows in one if rows[0]["accuracy"] is not None]
    assert evaluated == [5, 10, 12]
    for row in (row for rows in one for row in rows):
        assert len(row["neighbours"]) == (0 if method == "local" else 2)
        assert row["cluster"] == row["index"] % K
        assert row["index"] not in row["bag"]


@pytest.mark.parametrize("evidence", ["sketch", "exact"])
def test_a_round_by_hand(evidence: str) -> None:
    """The second round of panm-grad at one peer, from the formulas alone."""
    plan = make_plan(matching={"evidence": evidence}, network={"precision": "bfloat16"})
    peers = population(plan, "panm-grad")
    (first, w0, w1) = peers.step(), peers.initial, [model.copy() for model in peers.models]
    rows = peers.step()
    learners = [uneven(plan, i) for i in range(plan.n)]
    half = [learner.fit(model, 2) for learner, model in zip(learners, w1, strict=True)]

    def wire(vector: Vector) -> Vector:
        return decode_vector([encode_vector(vector, "bfloat16")], vector.size, "bfloat16", 1e6)

    i, trainable = 6, FEATURES * CLASSES
    memory = first[i]["neighbours"]
    pool = [j for j in range(10) if j != i and j not in memory]
    rng = generator(plan.seed, Purpose.CANDIDATES, index=i, t=2)
    fresh = [pool[place] for place in rng.choice(len(pool), 4, replace=False)]
    sketch = CountSketch(trainable, 32, plan.seed)

    def evidence_of(j: int) -> GradientEvidence:
        g, h = (half[j] - w1[j])[:trainable], (half[j] - w0)[:trainable]
        if evidence == "sketch":
            return GradientEvidence(sketch.apply(g), sketch.apply(h))
        return (
            GradientEvidence(g, h)
            if j == i
            else GradientEvidence(wire(g), (wire(half[j]) - w0)[:trainable])
        )

    similar = {
        j: gradient_similarity(evidence_of(i), evidence_of(j), 0.5) for j in [*memory, *fresh]
    }
    neighbours = sorted(sorted(similar, key=lambda j: -similar[j])[:2])
    assert rows[i]["neighbours"] == neighbours
    expected = average(half[i], [wire(half[j]) for j in neighbours])
    assert np.array_equal(peers.models[i], expected)


@pytest.mark.parametrize(
    ("method", "evidence", "stage_1", "stage_2", "naem"),
    [
        ("panm-grad", "sketch", 6 * 256 + 2 * 124, 2 * 124, None),
        ("panm-grad", "exact", 6 * 244, 2 * 124, None),
        ("panm-loss", "sketch", 6 * 124, 2 * 124, None),
        ("pens", "sketch", 4 * 124, 2 * 124, 2 * 124),
        ("random", "sketch", 2 * 124, 2 * 124, 2 * 124),
        ("local", "sketch", 0, 0, 0),
    ],
)
def test_payload(method: str, evidence: str, stage_1: int, stage_2: int, naem: int | None) -> None:
    """e = 62 values, 60 of them trained, 2 bytes each; sketches of 32 buckets, 4 bytes each."""
    plan = make_plan(matching={"evidence": evidence}, network={"precision": "float16"})
    for rows in population(plan, method).run(evaluate_every=99):
        for row in rows:
            t, received = row["t"], row["payload_received"]
            if 2 <= t <= plan.t1:
                assert received == stage_1
            elif t > plan.t1 and t % 2:
                assert received == stage_2
            elif t > plan.t1 and naem is not None:
                assert received == naem


def test_naem_pulls_only_the_neighbours_that_it_has_not_heard() -> None:
    plan = make_plan(matching={"evidence": "exact", "l": 2}, rounds=8)
    for rows in population(plan, "panm-grad").run(evaluate_every=99):
        if rows[0]["t"] in (6, 8):
            # Two of the bag and two from outside are heard; neighbours not among them come extra.
            extra = {(row["payload_received"] - 4 * 488) // 248 for row in rows}
            assert extra <= {0, 1, 2}
            assert all((row["payload_received"] - 4 * 488) % 248 == 0 for row in rows)


@pytest.mark.parametrize("method", ["panm-grad", "panm-loss"])
def test_clusters_are_found_and_learning_together_helps(method: str) -> None:
    plan = make_plan(rounds=24)
    learners = [uneven(plan, i) for i in range(plan.n)]  # shared: no method changes them

    def last(name: str) -> list[Row]:
        return list(Population(plan, name, learners=learners).run(evaluate_every=24))[-1]

    def accuracy(rows: list[Row]) -> float:
        return fmean(row["accuracy"] for row in rows)

    found, oracle, local, random = map(last, (method, "oracle", "local", "random"))
    assert all(row["precision"] == 1.0 for row in found)
    assert all(row["recall"] == 1.0 for row in oracle)
    assert all(row["precision"] is row["recall"] is None for row in local)
    assert accuracy(found) >= accuracy(oracle) - 0.01
    assert accuracy(found) > accuracy(local)
    assert accuracy(found) > accuracy(random) + 0.1


@pytest.mark.parametrize("method", ["panm-grad", "panm-loss", "random"])
def test_models_that_are_not_finite_reach_nobody(method: str) -> None:
    plan = make_plan(rounds=8)
    learners = [uneven(plan, i, Diverged if i == 4 else Softmax) for i in range(plan.n)]
    peers = Population(plan, method, learners=learners)
    for rows in peers.run():
        assert all(4 not in row["neighbours"] for row in rows)
    assert all(np.isfinite(peers.models[i]).all() for i in range(plan.n) if i != 4)


def test_models_may_be_weighted_by_samples() -> None:
    plan = make_plan(matching={"weighting": "samples"}, rounds=1)
    peers = population(plan, "fixed")
    neighbours = peers.step()[3]["neighbours"]
    learners = [uneven(plan, i) for i in range(plan.n)]
    half = [learner.fit(learner.initial(), 1) for learner in learners]
    weights = [float(30 + j) for j in (3, *neighbours)]
    assert np.array_equal(peers.models[3], average(half[3], [half[j] for j in neighbours], weights))


def test_mistakes() -> None:
    plan = make_plan()
    with pytest.raises(UserError, match="no method magic"):
        population(plan, "magic")
    with pytest.raises(ValueError, match="1 learners for 10 peers"):
        Population(plan, "local", learners=[Softmax(plan, 0)])
