"""A scenario run into a run directory: on the virtual network, or on real processes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from peer.errors import UserError
from peer.files import write_atomically
from peer.matching.registry import CENTRAL
from peer.plan_check import check_plan
from peer.rundir import (
    SUMMARY,
    MetricRow,
    RunWriter,
    final_rows,
    read_metrics,
    write_json,
)
from simulations.runs import PROCESSES, Equipment, clear_run
from simulations.scenarios.scenario import Scenario

if TYPE_CHECKING:
    from simulations.scenarios.federation import Federation
    from simulations.scenarios.learning import Learning

SCENARIO = "scenario.toml"
"""The file of a run directory that holds the scenario, its plan in it."""

LIMITLESS = 1e9
"""Samples a second that no machine trains."""


class Ground(StrEnum):
    """What the real peers of a scenario are."""

    PROCESSES = "real processes"
    NAMESPACES = "network namespaces"
    CONTAINERS = "containers"


Progress = Callable[[MetricRow], None]
"""Told every round that a peer finishes."""


def run_scenario(
    scenario: Scenario,
    out: Path,
    *,
    equipment: Equipment | None = None,
    workers: int | None = None,
    evaluate_every: int = 1,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run `scenario` on the virtual network; return the summary of the run in `out`.

    An earlier run in `out` is replaced. `equipment` and `workers` say what the learning is computed
    with, as for the laboratory, on the CPU. Rows have virtual seconds since the beginning as their
    time. Beside the usual figures the summary has `virtual_s`, the end of the last round;
    `bytes_lost`, payload that was sent and did not arrive; where peers lie, the accuracies of those
    that do not. Raises UserError before anything runs when it cannot be run.
    """
    from simulations.scenarios.learning import EngineLearning

    plan = scenario.plan
    equipment = equipment or Equipment()
    equipment.check(plan)
    if equipment.reference or equipment.device != "cpu":
        raise UserError("the virtual network computes with the engine, on the cpu")
    clear_run(out)
    began = time.monotonic()
    last: dict[int, MetricRow] = {}
    with (
        EngineLearning(scenario, equipment, workers=workers) as learning,
        RunWriter(out, plan) as writer,
    ):
        write_atomically(out / SCENARIO, scenario.to_toml())
        federation = make_federation(scenario, learning, evaluate_every=evaluate_every)
        for metric, topology in federation.run():
            writer.append(metric, topology)
            last[metric.index] = metric
            if progress is not None:
                progress(metric)
        sent = sum(peer.sent for peer in federation.peers)
        received = sum(peer.received for peer in federation.peers)
        extra = {
            "scenario": scenario.name,
            "bytes_sent": sent,
            "bytes_received": received,
            "bytes_moved": received + sent if plan.method in CENTRAL else received,
            "bytes_lost": federation.lost,
            "products": equipment.precision,
            "virtual_s": round(max((row.time for row in last.values()), default=0.0), 3),
            **_honest([*last.values()]),
        }
        return writer.write_summary(wall_s=time.monotonic() - began, extra=extra)


def make_federation(
    scenario: Scenario, learning: Learning, *, evaluate_every: int = 1
) -> Federation[Any]:
    """Return the virtual federation of a scenario: with a coordinator where its method has one."""
    if scenario.plan.method in CENTRAL:
        from simulations.scenarios.coordinated import CoordinatedFederation

        return CoordinatedFederation(scenario, learning, evaluate_every=evaluate_every)
    from simulations.scenarios.virtual import VirtualFederation

    return VirtualFederation(scenario, learning, evaluate_every=evaluate_every)


def run_real(
    scenario: Scenario,
    out: Path,
    *,
    ground: Ground = Ground.PROCESSES,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run `scenario` on real processes of this machine; return the summary of the run in `out`.

    An earlier run in `out` is replaced. Logs and the state of every process stay in
    `out`/processes, those of a failed run too. Rows have seconds since the beginning as their time.
    Beside the usual figures the summary has `real_s`, the end of the last round, and what
    `RealFederation.told` adds. Raises FederationError when a process fails, UserError before any
    starts when none could run the plan.
    """
    from simulations.scenarios.containers import Containers
    from simulations.scenarios.namespaces import Namespaces
    from simulations.scenarios.real import RealFederation

    plan = scenario.plan
    check_plan(plan)
    made: Namespaces | Containers | None = None
    if ground is Ground.NAMESPACES:
        made = Namespaces(plan.n)
    elif ground is Ground.CONTAINERS:
        made = Containers(plan.n)
    clear_run(out)
    with made or nullcontext():
        federation = RealFederation(scenario, out / PROCESSES, made)
        with federation:
            federation.play(lambda _, row: progress(row) if progress is not None else None)
    summary = federation.collect(out)
    rows = read_metrics(out)
    extra = {"real_s": round(max(row.time for row in rows), 3), **_honest(final_rows(rows))}
    write_json(out / SUMMARY, summary | extra)
    write_atomically(out / SCENARIO, scenario.to_toml())
    return summary | extra


class Speeds(NamedTuple):
    """How many samples a second each peer trains while all do: the median, and the slowest."""

    median: float
    slowest: float


def calibrate(scenario: Scenario, *, rounds: int = 6) -> Speeds:
    """Return how fast peers of `scenario` train on this machine, all at a time, each a process.

    They run for so many rounds (2 at least), as fast as they can, over links without a limit.
    Raises as `run_real` does.
    """
    from simulations.scenarios.real import RealFederation

    free = scenario.changed(
        {"plan.rounds": rounds, "links": {}, "peers": {"speed": LIMITLESS}, "script": []}
    )
    check_plan(free.plan)
    with tempfile.TemporaryDirectory(prefix="panmesh-") as directory:
        federation = RealFederation(free, Path(directory) / PROCESSES)
        with federation:
            federation.play()
    return Speeds(median(federation.speeds), min(federation.speeds))


def _honest(rows: Sequence[MetricRow]) -> dict[str, Any]:
    """Return the accuracies of those that do not lie, where others do."""
    honest = [row.accuracy or 0.0 for row in rows if "attack" not in row.notes]
    if len(honest) == len(rows):
        return {}
    return {
        "accuracy_honest_mean": fmean(honest) if honest else None,
        "accuracy_honest_worst": min(honest, default=None),
    }
