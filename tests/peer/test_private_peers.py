"""Peers that train with differential privacy: the laboratory's numbers, a budget that is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from town import Target

from peer.errors import StateError, UserError
from peer.hosting import run
from peer.learning.budget import Budget
from peer.plan import Plan
from peer.plan_check import check_plan
from peer.rundir import SUMMARY, read_json, read_metrics
from peer.state import LEDGER, StateDirectory
from simulations.population import Population

pytest.importorskip("opacus")


def plan(**changes: Any) -> Plan:
    table: dict[str, Any] = {
        "n": 3,
        "rounds": 4,
        "method": "panm-grad",
        "matching": {"l": 2, "k": 1},
        "partition": {"train_per_peer": 60},
        "training": {"batch": 20, "epochs": 1},
        # Enough for two rounds of three steps.
        "privacy": {"noise": 1.0, "epsilon": 7.5, "repeatable": True},
        # Patient, however slow the machine.
        "network": {
            "request_timeout": 60, "probe_interval": 30, "probe_timeout": 30, "suspicion": 60,
            "linger": 10,
        },
    }  # fmt: skip
    return Plan.model_validate(table | changes)


def test_live_is_the_laboratory_and_stops_at_the_budget(tmp_path: Path) -> None:
    told = plan()
    results = run(told, state=tmp_path)
    population = Population(told, told.method)
    list(population.run())
    for result in results:
        np.testing.assert_array_equal(result.model, population.models[result.index])
        spent = [row.epsilon or 0.0 for row in read_metrics(result.state)]
        assert 0 < spent[0] < spent[1] == spent[2] == spent[3] <= 7.5
        assert read_json(result.state / SUMMARY)["epsilon_most"] == spent[3]
        with StateDirectory(result.state) as state:
            assert Budget(told.privacy, state.spent()).epsilon == spent[-1]
    one = results[0].state
    (one / LEDGER).write_bytes((one / LEDGER).read_bytes().replace(b"6", b"1"))
    with pytest.raises(StateError, match=r"privacy\.json is damaged"):
        run(told, state=tmp_path)
    (one / LEDGER).unlink()
    with pytest.raises(StateError, match="what it has spent of epsilon is not known"):
        run(told, state=tmp_path)


def test_what_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a learner of your own"):
        run(plan(), make_learner=Target, state=tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "panm-loss"}, "panm-loss chooses by losses"),
        ({"method": "pens", "matching": {"l": 2, "k": 2}}, "pens chooses by losses"),
        ({"method": "ifca"}, "ifca chooses by losses"),
        ({"defence": {"gate": True}}, "the gate chooses by losses"),
        ({"model": "sklearn-sgd"}, "sklearn-sgd cannot be trained"),
        ({"model": "lstm"}, "lstm cannot be trained"),
    ],
)
def test_plans_that_tell_more_than_epsilon_says_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    check_plan(plan(), central=True)
    with pytest.raises(UserError, match=message):
        check_plan(plan(**changes), central=True)


def test_a_peer_refuses_a_plan_that_tells_losses_whoever_sent_it(tmp_path: Path) -> None:
    told = Plan.model_validate({"n": 2, "method": "pens", "privacy": {"noise": 1.0}})
    with pytest.raises(UserError, match="chooses by losses on the training samples"):
        run(told, state=tmp_path)
