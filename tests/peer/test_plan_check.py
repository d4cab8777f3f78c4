"""Plans that no peer could run are refused before anything starts."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from peer.errors import UserError
from peer.learning.models import MODELS as TORCH_MODELS
from peer.learning.names import DATA_SETS, ESTIMATORS, MODELS
from peer.learning.sources import SOURCES, load_dataset
from peer.matching import registry
from peer.plan import Plan
from peer.plan_check import check_plan

NATURAL = {"kind": "natural", "clusters": 3}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": "panm-gard"}, "there is no method panm-gard"),
        ({"method": "cfl"}, "cfl is central"),
        ({"model": "mpl"}, "no built-in model 'mpl'"),
        ({"data": "digit"}, "no data set 'digit'"),
        ({"data": "npz"}, "no data set 'npz'"),
        ({"partition": NATURAL}, "natural needs data that name their groups, digits"),
        ({"method": "pens", "matching": {"l": 2, "k": 3}}, "k = 3 of l = 2"),
    ],
)
def test_what_no_peer_could_run(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_plan(Plan.model_validate({"n": 6, **keys}))


@pytest.mark.parametrize(
    "keys",
    [
        {"model": "custom", "data": "own", "partition": NATURAL},
        {"method": "pens", "matching": {"l": 99, "k": 99}},
        {"method": "panm-grad", "matching": {"l": 2, "k": 3}},
    ],
)
def test_what_peers_can_run(keys: dict[str, Any]) -> None:
    check_plan(Plan.model_validate({"n": 6, **keys}))


def test_a_laboratory_can_run_more() -> None:
    for method in registry.CENTRAL:
        check_plan(Plan(n=4, method=method), central=True)
    check_plan(Plan(n=4, data="blobs"), data="blobs:make")


@pytest.mark.parametrize("method", registry.CENTRAL)
def test_a_coordinator_keeps_nobodys_statistics_apart(method: str) -> None:
    plan = Plan.model_validate({"n": 4, "method": method, "training": {"statistics": "local"}})
    with pytest.raises(UserError, match=f"training.statistics: {method} has one model"):
        check_plan(plan, central=True)
    check_plan(plan.model_copy(update={"method": "random"}))


def test_shares_that_overlap_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    for n in (10, 13, 13):
        with caplog.at_level(logging.WARNING):
            check_plan(Plan.model_validate({"n": n, "partition": {"train_per_peer": 129}}))
    (line,) = caplog.messages
    assert line.startswith("13 peers with train_per_peer = 129 take 1677 samples of the 1297")


def test_the_names_are_those_of_what_there_is() -> None:
    assert set(MODELS) == {*TORCH_MODELS, *ESTIMATORS}
    assert DATA_SETS.keys() < SOURCES.keys()
    assert len(load_dataset("digits", seed=0).train_y) == DATA_SETS["digits"]
    registry.method_names()
    home = registry.method.__module__.rpartition(".")[0]
    found = {name: made.__module__ for name, made in registry._methods.items()}
    ours = {name: module for name, module in found.items() if module.startswith(home)}
    assert ours == {name: f"{home}.{module}" for name, module in registry._BUILT_IN.items()}
