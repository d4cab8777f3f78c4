"""What is simulated is what is deployed: live lockstep peers and the laboratory.

Live are eight peers with real sockets in one process. The laboratory is the same plan with the
network left out: bit by bit the same where it trains by the device's own path (`exact`); where it
stacks models, by the same neighbours and bytes every round, its weights to rounding, which grows.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from torch import nn

from peer import Plan, run
from peer.rundir import read_metrics, read_topology
from simulations.engine.laboratory import Laboratory
from simulations.population import Population, Row


def eight(method: str, **matching: Any) -> Plan:
    return Plan.model_validate(
        {
            "n": 8,
            "rounds": 10,
            "seed": 5,
            "method": method,
            "matching": {"l": 4, "k": 2, "t1": 3, "tau": 2, **matching},
            "partition": {"kind": "rotation", "clusters": 2, "train_per_peer": 60},
            "training": {"batch": 20},
        }
    )


def norm_factory(_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A model with running statistics."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, classes)
    )


def check(plan: Plan, state: Path, model: str | None = None) -> None:
    """Compare live peers with the laboratory, exact and stacked."""
    results = run(plan, state=state, model=model)
    rows, models = simulated(plan, model, exact=True)
    for result in results:
        own = rows[result.index]
        check_choices(result.state, own)
        metrics = read_metrics(result.state)
        assert [row.accuracy for row in metrics] == [row["accuracy"] for row in own]
        assert [row.loss for row in metrics] == [row["loss"] for row in own]
        assert [row.notes for row in metrics] == [row["notes"] for row in own]
        np.testing.assert_array_equal(result.model, models[result.index])
    rows, models = simulated(plan, model, exact=False)
    for result in results:
        check_choices(result.state, rows[result.index])
        np.testing.assert_allclose(models[result.index], result.model, rtol=0, atol=1e-3)


def simulated(
    plan: Plan, model: str | None, *, exact: bool
) -> tuple[list[list[Row]], npt.NDArray[np.float32]]:
    """Return every peer's rows in the laboratory, and the models [n, e] that it ends with."""
    with Laboratory(plan, plan.method, model=model, exact=exact, workers=0) as laboratory:
        rounds = list(laboratory.run())
        assert laboratory.engine.stacked != exact
        return [list(own) for own in zip(*rounds, strict=True)], laboratory.models.copy()


def check_choices(state: Path, rows: list[Row]) -> None:
    """Compare a live peer's neighbours, bag and bytes of every round with those of `rows`."""
    live = read_topology(state)
    assert len(live) == len(rows)
    assert [row.neighbours for row in live] == [row["neighbours"] for row in rows]
    assert [row.bag for row in live] == [row["bag"] for row in rows]
    received = [row.payload_received for row in read_metrics(state)]
    assert received == list(accumulate(row["payload_received"] for row in rows))


@pytest.mark.parametrize("statistics", ["average", "local"])
def test_running_statistics_are_averaged_or_stay_everywhere(
    tmp_path: Path, statistics: str
) -> None:
    plan = eight("panm-loss").model_copy(update={"model": "custom", "rounds": 3})
    training = plan.training.model_copy(update={"statistics": statistics})
    plan = plan.model_copy(update={"training": training})
    model = f"{__name__}:norm_factory"
    check(plan, tmp_path, model)
    with Laboratory(plan, plan.method, model=model, workers=0) as laboratory:
        list(laboratory.run())
        kept = slice(laboratory.engine.manifest.trainable, None)
        alike = laboratory.engine.trained[:, kept] == laboratory.models[:, kept]
        assert alike.all() == (statistics == "local")


@pytest.mark.parametrize("method", ["panm-grad", "panm-loss"])
def test_live_peers_reach_what_the_laboratory_computes(tmp_path: Path, method: str) -> None:
    check(eight(method), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pens", "random", "fixed", "oracle", "local"])
def test_every_other_method_does_too(tmp_path: Path, method: str) -> None:
    check(eight(method), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("evidence", ["exact", "sketch"])
def test_so_do_exact_evidence_and_half_precision(
    tmp_path: Path, precision: str, evidence: str
) -> None:
    plan = eight("panm-grad", evidence=evidence)
    network = plan.network.model_copy(update={"precision": precision})
    check(plan.model_copy(update={"network": network}), tmp_path)


@pytest.mark.parametrize(
    "defence",
    [{"gate": True, "clip": 0.5}, {"gate": True, "rule": "centred-clipping", "steps": 2}],
    ids=["gate, clip", "gate, centred clipping"],
)
def test_a_defence_is_the_same_everywhere(tmp_path: Path, defence: dict[str, Any]) -> None:
    table = eight("panm-loss").model_dump(exclude_none=True) | {"rounds": 6}
    plan = Plan.model_validate(table | {"defence": {**defence, "gate_ratio": 1}})
    check(plan, tmp_path)
    live = [row for file in tmp_path.rglob("metrics.jsonl") for row in read_metrics(file.parent)]
    assert any(row.notes.get("refused") for row in live)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum", "multi-krum"])
def test_so_is_every_rule(tmp_path: Path, rule: str) -> None:
    plan = eight("panm-grad", k=4)
    check(
        Plan.model_validate(plan.model_dump(exclude_none=True) | {"defence": {"rule": rule}}),
        tmp_path,
    )


def test_the_engine_defends_by_its_own_sums() -> None:
    """Gate and clipping on the engine's quick path, against the reference."""
    table = eight("panm-grad").model_dump(exclude_none=True)
    plan = Plan.model_validate(table | {"defence": {"gate": True, "gate_ratio": 1, "clip": 0.5}})
    population = Population(plan, plan.method)
    with Laboratory(plan, plan.method, workers=0) as laboratory:
        for expected, rows in zip(population.run(), laboratory.run(), strict=True):
            for one, other in zip(expected, rows, strict=True):
                for key in ("neighbours", "bag", "notes", "payload_received"):
                    assert one[key] == other[key], key
        np.testing.assert_allclose(laboratory.models, np.stack(population.models), atol=1e-4)
