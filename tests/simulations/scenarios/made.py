"""Scenarios whose peers learn by softmax regression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from softmax import Softmax

from simulations.scenarios.learning import LearnersLearning
from simulations.scenarios.scenario import Scenario
from simulations.scenarios.virtual import VirtualFederation


def make_scenario(tables: Mapping[str, Any] | None = None, **plan: Any) -> Scenario:
    """Return a scenario of ten peers in two clusters; `plan` changes its plan's tables."""
    table: dict[str, Any] = {
        "n": 10,
        "rounds": 12,
        "seed": 3,
        "matching": {"l": 4, "k": 2, "tau": 2, "sketch_buckets": 32},
        "partition": {"kind": "rotation", "clusters": 2},
        "training": {"lr": 0.005},
    }
    for key, value in plan.items():
        table[key] = {**table[key], **value} if isinstance(table.get(key), dict) else value
    scenario = Scenario.model_validate({"plan": table, **(tables or {})})
    scenario.check()
    return scenario


def federate(scenario: Scenario, **options: Any) -> VirtualFederation:
    """Return the federation of a scenario, with learners of softmax regression."""
    plan = scenario.plan
    learning = LearnersLearning(
        [Softmax(plan, i) for i in range(plan.n)], lambda i, c, _: Softmax(plan, i, c)
    )
    return VirtualFederation(scenario, learning, **options)
