"""A plan run on this machine into a run directory: by real processes, or by the one-process
reference."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from peer.display import FederationView
from peer.errors import UserError
from peer.plan import Plan, describe
from peer.rundir import (
    COMPARISON,
    PLAN,
    MetricRow,
    RunWriter,
    TopologyRow,
    summarise,
    write_json,
)
from simulations.processes import Federation

if TYPE_CHECKING:
    from peer.learning.learner import Learner

PROCESSES = "processes"
START_SECONDS = 120.0
ROUND_SECONDS = 60.0
"""A federation is given up after the time for its start and so much for each round."""

Progress = Callable[[str, int], None]
"""Told the method and the round that has just ended."""


def changed(plan: Plan, **changes: Any) -> Plan:
    """Return `plan` with other top-level values, where those given are not None, validated anew.

    Raises UserError when the result is not a plan.
    """
    table = plan.model_dump(exclude_none=True)
    table |= {key: value for key, value in changes.items() if value is not None}
    try:
        return Plan.model_validate(table)
    except ValidationError as error:
        raise UserError(describe(error)) from None


def clear_run(out: Path) -> None:
    """Remove an earlier run from `out`. Raises UserError when it holds anything else."""
    if not out.exists():
        return
    plans = (out / PLAN, out / PROCESSES / PLAN)
    if not any(plan.is_file() for plan in plans) and any(out.iterdir()):
        raise UserError(f"{out} exists and is not a run directory", "name another with --out")
    shutil.rmtree(out)


def run_processes(plan: Plan, out: Path, *, peers: int | None = None) -> dict[str, Any]:
    """Run `plan` by real processes with a live table; return the summary of the run in `out`.

    Logs and the state of every process stay in `out`/processes, those of a failed run too. Raises
    FederationError when a process fails.
    """
    clear_run(out)
    timeout = START_SECONDS + ROUND_SECONDS * plan.rounds
    federation = Federation(plan, out / PROCESSES, peers=peers)
    with federation, FederationView(plan) as view:
        federation.wait(timeout, on_row=lambda _, row: view.update(row))
    return federation.collect(out)


def run_population(plan: Plan, out: Path, *, progress: Progress | None = None) -> dict[str, Any]:
    """Run `plan` by the one-process reference; return the summary of the run in `out`."""
    clear_run(out)
    began = time.monotonic()
    with RunWriter(out, plan) as writer:
        received = 0
        for rows in population_rounds(plan):
            for metric, topology in rows:
                writer.append(metric, topology)
            received = sum(metric.payload_received for metric, _ in rows)
            if progress is not None:
                progress(plan.method, rows[0][0].t)
        return writer.write_summary(wall_s=time.monotonic() - began, extra={"bytes_sent": received})


def compare(
    plan: Plan, methods: Sequence[str], out: Path, *, progress: Progress | None = None
) -> dict[str, dict[str, Any]]:
    """Run `plan` with other methods on the same data, by the reference; write comparison.json.

    Returns {method: its summary, with `curve`: [t, mean accuracy] of every round}.
    """
    from simulations.population import make_learners

    learners = make_learners(plan)
    comparison = {}
    for method in methods:
        began = time.monotonic()
        metrics: list[MetricRow] = []
        choices: list[TopologyRow] = []
        curve: list[tuple[int, float]] = []
        variant = changed(plan, method=method)
        for rows in population_rounds(variant, learners):
            metrics += [metric for metric, _ in rows]
            choices = [topology for _, topology in rows]
            t = rows[0][0].t
            curve.append((t, fmean(metric.accuracy or 0.0 for metric, _ in rows)))
            if progress is not None:
                progress(method, t)
        summary = summarise(variant, metrics, choices, wall_s=time.monotonic() - began)
        summary["bytes_sent"] = summary["bytes_received"]
        comparison[method] = {**summary, "curve": curve}
    write_json(out / COMPARISON, comparison)
    return comparison


def population_rounds(
    plan: Plan, learners: Sequence[Learner] | None = None
) -> Iterator[list[tuple[MetricRow, TopologyRow]]]:
    """Yield the rows of every round of the one-process reference, by index.

    It tells only of what is received; nothing is lost on its way, so as much is sent in all.
    """
    from simulations.population import Population

    received = [0] * plan.n
    for rows in Population(plan, plan.method, learners=learners).run():
        pairs = []
        for row in rows:
            received[row["index"]] += row["payload_received"]
            metric = MetricRow.model_validate(
                {
                    **row,
                    "bag_size": len(row["bag"]),
                    "payload_received": received[row["index"]],
                    "time": time.time(),
                }
            )
            pairs.append((metric, TopologyRow.model_validate(row)))
        yield pairs
