"""What a peer does with what it received: gate, clipping and rule, in this order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from peer.aggregation import average
from peer.defence import Mixed, admitted, mix, pool, refusals
from peer.errors import UserError
from peer.learning.build import prepare
from peer.learning.estimator_learner import EstimatorLearner
from peer.learning.learner import Learner, Vector
from peer.learning.models import build_model
from peer.learning.partition import PeerData, deal
from peer.learning.schedule import epoch_orders, held_out
from peer.learning.sources import load_dataset
from peer.learning.torch_learner import TorchLearner
from peer.plan import DefencePlan, Plan
from peer.plan_check import check_plan
from peer.randomness import Purpose, generator


def vector(*values: float) -> Vector:
    return np.array(values, dtype=np.float32)


def nobody(models: list[Vector]) -> list[float]:
    raise AssertionError("nobody should be asked")


OWN, BEFORE = vector(1, 1), vector(1, 0)  # one's own update has the norm 1
RECEIVED = {3: vector(3, 1), 5: vector(1, 5), 8: vector(-1, 1)}


def mixed(judge: Callable[[list[Vector]], list[float]] = nobody, **keys: Any) -> Mixed:
    weights = keys.pop("weights", None)
    defence = DefencePlan.model_validate(keys)
    return mix(defence, OWN, BEFORE, RECEIVED, weights=weights, judge=judge)


@pytest.mark.parametrize(
    ("loss", "own", "answer"),
    [
        (1.12, 1.0, True),  # 1.1 + 0.02
        (1.1201, 1.0, False),
        (0.02, 0.0, True),
        (5.0, math.inf, True),
        (math.inf, math.inf, False),
    ],
)
def test_the_gate(loss: float, own: float, answer: bool) -> None:
    assert admitted(loss, own, DefencePlan()) is answer


def test_without_a_defence_it_is_the_mean() -> None:
    assert mixed().model.tolist() == [1.0, 2.0]
    assert mixed().used == [3, 5, 8]
    assert mixed(weights=[1, 0, 0, 1]).model.tolist() == [0.0, 1.0]
    assert refusals(mixed().refused) == {}


def test_the_gate_asks_once_and_leaves_out() -> None:
    def judge(models: list[Vector]) -> list[float]:
        assert [model.tolist() for model in models] == [[1, 1], [3, 1], [1, 5], [-1, 1]]
        return [1.0, 1.2, 1.1, math.inf]

    made = mixed(judge, gate=True, weights=[1, 7, 3, 9])
    assert made.model.tolist() == [1.0, 4.0]  # own by 1, peer 5 by 3
    assert (made.used, made.refused) == ([5], [3, 8])
    assert refusals(made.refused) == {"refused": [3, 8]}
    tight = mixed(lambda _: [1.0, 1.2, 0.9, 2.0], gate=True, gate_ratio=0.5, gate_margin=0.0)
    assert tight.model.tolist() == OWN.tolist()
    assert tight.used == []


def test_clipping_is_by_the_norm_of_ones_own_update() -> None:
    # Differences of 2, 4 and 2 are shortened to 1: (0 + 1 + 0 - 1) / 4 and (0 + 0 + 1 + 0) / 4.
    assert mixed(clip=1.0).model.tolist() == [1.0, 1.25]
    assert mixed(clip=4.0).model.tolist() == mixed().model.tolist()


@pytest.mark.parametrize(
    ("keys", "model"),
    [
        ({"rule": "median"}, [1.0, 1.0]),
        ({"rule": "trimmed-mean"}, [1.0, 1.0]),
        ({"rule": "krum"}, [1.0, 1.0]),
        ({"rule": "multi-krum"}, [1.0, 2.0]),  # four models are too few for f = 1
        ({"rule": "centred-clipping", "radius": 2.0, "steps": 1}, [1.0, 1.5]),
        ({"rule": "median", "clip": 1.0}, [1.0, 1.0]),
    ],
)
def test_rules(keys: dict[str, Any], model: list[float]) -> None:
    assert mixed(**keys).model.tolist() == model


def test_alone_there_is_nobody_to_judge() -> None:
    keys: dict[str, Any] = {"gate": True, "clip": 1.0, "rule": "trimmed-mean"}
    made = mix(DefencePlan(**keys), OWN, BEFORE, {}, weights=None, judge=nobody)
    assert made.model.tolist() == OWN.tolist()


def test_plans_that_contradict_themselves() -> None:
    weighted = {"n": 4, "matching": {"weighting": "samples"}}
    with pytest.raises(ValueError, match="counts all models equally"):
        Plan.model_validate({**weighted, "defence": {"rule": "krum"}})
    Plan.model_validate({**weighted, "defence": {"gate": True, "clip": 1.0}})
    for method in ("cfl", "ifca", "fedavg"):
        plan = Plan.model_validate({"n": 4, "method": method, "defence": {"gate": True}})
        with pytest.raises(UserError, match=f"the coordinator of {method} has no samples to judge"):
            check_plan(plan, central=True)
        few = {"clip": 1.0, "rule": "krum", "byzantine": 9}  # as many as the cluster's size allows
        check_plan(Plan.model_validate({"n": 4, "method": method, "defence": few}), central=True)


@pytest.mark.parametrize(
    ("rule", "f", "needed"),
    [("krum", 1, 4), ("multi-krum", 2, 6), ("krum", 0, 2), ("trimmed-mean", 2, 4)],
)
def test_a_rule_needs_enough_neighbours_for_what_it_is_to_bear(
    rule: str, f: int, needed: int
) -> None:
    def check(k: int, **changes: Any) -> None:
        defence = {"rule": rule, "byzantine": f}
        table = {"n": 9, "matching": {"l": 9, "k": k}, "defence": defence}
        check_plan(Plan.model_validate(table | changes))

    check(needed)
    check(needed - 1, method="local")
    with pytest.raises(UserError, match=f"{rule} against byzantine = {f} needs .* k = {needed},"):
        check(needed - 1)


def pooled(models: list[Vector], centre: Vector | None, **keys: Any) -> list[float]:
    made = pool(DefencePlan.model_validate(keys), centre, models, keys.pop("weights", None))
    own: list[float] = made.tolist()
    return own


def test_a_coordinator_measures_by_the_median_norm_of_the_updates() -> None:
    centre = vector(1, 0)
    models = [vector(1, 4), vector(1, -1), vector(1000, 0), vector(3, 0)]
    # Updates of norms 4, 1, 999 and 2: the lower median is 2.
    assert pooled(models, centre, clip=1.0) == [1 + (2 + 2) / 4, (2 - 1) / 4]
    assert pooled(models, centre, clip=2.0) == [1 + (4 + 2) / 4, (4 - 1) / 4]
    assert pool(DefencePlan(clip=1.0), centre, models, [1, 0, 0, 3]).tolist() == [2.5, 0.5]
    assert pooled(models, centre, rule="centred-clipping", steps=1) == [2.0, 0.25]
    assert pooled(models, centre) == average(models[0], models[1:]).tolist()
    # One of two can only make the other's shorter.
    assert pooled([vector(1, 0), vector(9, 0)], centre, clip=1.0) == [1.0, 0.0]


def test_a_coordinator_that_does_not_know_the_start_begins_at_the_median() -> None:
    models = [vector(0), vector(1), vector(1000), vector(2), vector(3)]
    # From 2, norms of 2, 1, 998, 0 and 1: the median is 1.
    assert pooled(models, None, clip=1.0) == pytest.approx([(1 + 1 + 3 + 2 + 3) / 5])
    assert pooled(models, None, rule="centred-clipping", steps=1) == pytest.approx([2.0])
    assert pooled(models, None, rule="median") == [2.0]


@pytest.mark.parametrize("keys", [{"gate": True, "rule": "median"}, {"rule": "median"}])
def test_a_coordinator_is_not_asked_for_a_gate(keys: dict[str, Any]) -> None:
    assert pooled([vector(1), vector(2), vector(50)], vector(0), **keys) == [2.0]


def gated(n: int = 4, **keys: Any) -> Plan:
    return Plan.model_validate(
        {"n": n, "defence": {"gate": True}, "partition": {"train_per_peer": 300}, **keys}
    )


def test_what_is_held_out_is_never_trained_on() -> None:
    plan = gated()
    held = held_out(plan, 2, 300)
    assert len(set(held.tolist())) == 60
    kept = sorted(set(range(300)) - set(held.tolist()))
    for t in (1, 2, 9):
        orders = [order.tolist() for order in epoch_orders(plan, 2, t, 300)]
        assert [sorted(order) for order in orders] == [kept] * 2
        assert orders[0] != orders[1]
    assert np.array_equal(held_out(plan.model_copy(update={"rounds": 7}), 2, 300), held)
    for other in (held_out(plan, 3, 300), held_out(gated(seed=1), 2, 300)):
        assert not np.array_equal(other, held)


def test_few_samples_a_quarter_and_none_without_a_gate() -> None:
    assert [gated().held_out(m) for m in (3, 42, 240, 300, 500)] == [0, 10, 60, 60, 60]
    for plan in (Plan(n=4), gated(method="local")):
        assert not len(held_out(plan, 0, 300))
        orders = list(epoch_orders(plan, 0, 1, 300))
        rng = generator(plan.seed, Purpose.BATCHES, index=0, t=1)
        assert all(np.array_equal(order, rng.permutation(300)) for order in orders)


@pytest.mark.parametrize("model", ["mlp", "sklearn-sgd"])
def test_learners_judge_by_what_they_hold_out(model: str) -> None:
    plan = gated(model=model)
    learner = prepare(plan, 1)[0]
    assert learner.samples == 300
    data = deal(load_dataset("digits", seed=0), plan, 1, own=False)
    trained = learner.fit(learner.initial(), 1)
    held = held_out(plan, 1, 300)
    judge = judging(model, plan, data.train_x[held], data.train_y[held])
    first, second = learner.held_losses([learner.initial(), trained])
    assert first == judge.evaluate(learner.initial()).loss
    assert second == judge.evaluate(trained).loss < first
    with pytest.raises(ValueError, match="held out"):
        prepare(Plan(n=4, model=model), 1)[0].held_losses([trained])


def judging(model: str, plan: Plan, x: np.ndarray, y: np.ndarray) -> Learner:
    """Return a learner whose test set is what another holds out."""
    data = PeerData(x, y, x, y, 10, x.shape[1:])
    if model == "sklearn-sgd":
        return EstimatorLearner(model, data, plan, 1)
    return TorchLearner(build_model(model, data.shape, 10, plan.seed), data, plan, 1)
