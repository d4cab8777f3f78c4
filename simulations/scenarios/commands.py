"""What `simulate` does with scenarios: run, show, list, sweep."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from peer.display import human_bytes
from peer.files import write_atomically
from peer.rundir import SUMMARY, MetricRow
from simulations.compare import make_console
from simulations.demo import comparison_table
from simulations.figures import save
from simulations.report import write_report
from simulations.runs import Equipment
from simulations.scenarios.runs import Ground, run_real, run_scenario
from simulations.scenarios.runs import calibrate as measure_speeds
from simulations.scenarios.scenario import Scenario, load, shipped
from simulations.scenarios.sweep import parse_grid, run_sweep, sweep_table, write_csv
from simulations.scenarios.topology import describe_graph

PARTITIONS = {Ground.NAMESPACES: "nftables'", Ground.CONTAINERS: "Docker's networks"}
"""Whose the partitions are, where they are not emulated."""
OVERRUN = 0.02
"""Share of a run by which trainings may take too long before it is worth a word."""


def run(
    path: Path,
    changes: Mapping[str, Any],
    out: Path | None,
    *,
    equipment: Equipment,
    ground: Ground | None,
    animate: bool,
) -> None:
    """Run the scenario of a file, print what came of it, and draw it.

    `ground`: what real peers are, None for the virtual network.
    """
    scenario = load(path).changed(changes)
    out = out or Path("runs") / f"{scenario.name}-{scenario.plan.method}"
    console = Console(highlight=False)
    console.print(f"{scenario.name}: {describe_graph(scenario.graph)}")
    with _progress(console) as progress:
        task = progress.add_task("", total=scenario.plan.rounds * scenario.plan.n)

        def show(row: MetricRow) -> None:
            progress.update(task, advance=1, description=_passed(row, virtual=ground is None))

        if ground is None:
            summary = run_scenario(scenario, out, equipment=equipment, progress=show)
        else:
            end_by_exception()
            summary = run_real(scenario, out, ground=ground, progress=show)
    where = "virtual network" if ground is None else ground.value
    console.print(comparison_table([(where, summary)]))
    console.print(_account(summary, ground))
    print(f"Summary:  {out / SUMMARY}")
    print(f"Report:   {write_report(out, animate=animate)[0]}")


def end_by_exception() -> None:
    """Let SIGTERM end this process as Ctrl-C does: what it started and made is then removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def calibrate(path: Path, changes: Mapping[str, Any]) -> None:
    """Say how fast the peers of a scenario train on this machine."""
    scenario = load(path).changed(changes)
    end_by_exception()
    speeds = measure_speeds(scenario)
    print(
        f"{scenario.plan.n} peers train {speeds.median:.0f} samples a second each (median), the "
        f"slowest {speeds.slowest:.0f}\nReal processes keep to peers.speed up to about "
        f"{speeds.slowest / 2:.2g}"
    )


def _passed(row: MetricRow, *, virtual: bool) -> str:
    return f"{row.time:.1f} virtual s" if virtual else f"round {row.t}"


def _account(summary: Mapping[str, Any], ground: Ground | None) -> str:
    """Say how long a run took and what it moved."""
    moved = f"sent {human_bytes(summary['bytes_sent'])}"
    left_out = f"left out {summary['missing']} times"
    if "virtual_s" in summary:
        lost = human_bytes(summary["bytes_lost"])
        return f"Virtual time: {summary['virtual_s']:.1f} s; {moved}, lost {lost}; {left_out}"
    emulated = ", ".join(summary["emulated"])
    text = f"Time: {summary['real_s']:.1f} s; {moved}; {left_out}\nEmulated: {emulated}"
    if "bandwidth" not in summary["emulated"]:
        text += "; bandwidth is tbf's"
    if ground in PARTITIONS:
        text += f"; partitions are {PARTITIONS[ground]}"
    if summary["overrun_s"] > OVERRUN * summary["real_s"]:
        text += (
            f"\nThis machine is too slow for the scenario: one peer trained for "
            f"{summary['overrun_s']:.1f} s more than its device would. simulate calibrate says "
            "which speed it can keep to"
        )
    return text


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False),
        console=console, disable=not console.is_terminal, speed_estimate_period=600,
    )  # fmt: skip


def show(path: Path, out: Path | None) -> None:
    """Draw the topology and the script of a scenario before anything runs."""
    from simulations.scenarios.pictures import scenario_figure, tell

    scenario = load(path)
    print(f"{scenario.name}: {scenario.claim}" if scenario.claim else scenario.name)
    plan = scenario.plan
    print(f"{plan.method}, {plan.data}, {plan.partition.label}, {plan.rounds} rounds")
    print(f"{scenario.topology.kind}: {describe_graph(scenario.graph)}")
    for event in sorted(scenario.script, key=lambda own: (own.round or 0, own.second or 0.0)):
        when = f"round {event.round}" if event.round is not None else f"second {event.second:g}"
        print(f"{when:<12} {tell(event)}")
    stem = out.with_suffix("") if out is not None else Path("runs") / f"{scenario.name}-scenario"
    stem.parent.mkdir(parents=True, exist_ok=True)
    for picture in save(scenario_figure(scenario), stem):
        print(picture)


def listing() -> None:
    """Say which scenarios come with panmesh."""
    for own in shipped():
        print(f"{own.name:<24} {own.claim}")


def sweep(
    path: Path,
    grid: Sequence[str],
    changes: Mapping[str, Any],
    out: Path | None,
    *,
    processes: int | None,
) -> None:
    """Run every combination of the values of some keys, print a table, and write it as CSV."""
    scenario: Scenario = load(path).changed(changes)
    out = out or Path("runs") / f"{scenario.name}-sweep"
    console = make_console()
    results = run_sweep(scenario, parse_grid(grid), out, processes=processes, console=console)
    console.print(sweep_table(results))
    write_atomically(out / "scenario.toml", scenario.to_toml())
    print(write_csv(results, out / "sweep.csv"))
    print(f"Report:   {write_report(out)[0]}")
