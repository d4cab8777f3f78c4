"""Scenarios whose peers learn by softmax regression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from softmax import Softmax

from peer.learning.learner import Vector
from simulations.scenarios.coordinated import CoordinatedFederation
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


def make_learning(scenario: Scenario, kind: type[Softmax] = Softmax) -> LearnersLearning:
    """Return learners of softmax regression."""
    plan = scenario.plan
    return LearnersLearning(
        [kind(plan, i) for i in range(plan.n)], lambda i, c, _: kind(plan, i, c)
    )


def federate(scenario: Scenario, **options: Any) -> VirtualFederation:
    """Return the federation of a scenario, of peers among themselves."""
    return VirtualFederation(scenario, make_learning(scenario), **options)


class Spread(Softmax):
    """Softmax regression from a w_0 of many values: the initial models of IFCA differ."""

    def initial(self) -> Vector:
        values = np.random.default_rng(7).normal(size=self.manifest.size)
        return values.astype(np.float32)


def coordinate(scenario: Scenario, **options: Any) -> CoordinatedFederation:
    """Return the federation of a scenario, with a coordinator."""
    return CoordinatedFederation(scenario, make_learning(scenario, Spread), **options)
