"""`simulate demo`: eight real peers find who is like them, beside the methods they must beat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table

from peer.display import human_bytes, percent, ratio
from peer.plan import Plan
from simulations.report import write_report
from simulations.runs import changed, compare, run_processes

BASELINES = ("local", "random", "oracle")


def demo_plan() -> Plan:
    """Return the plan that ships as plans/demo.toml."""
    file = files("simulations") / "plans" / "demo.toml"
    return Plan.from_toml(file.read_text(encoding="utf-8"))


def run_demo(
    out: Path,
    *,
    peers: int | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    console: Console | None = None,
) -> list[Path]:
    """Run the demo into `out`, and return the files of its report, the page first.

    Raises UserError for numbers that make no plan, FederationError when a process fails.
    """
    console = console or Console(highlight=False)
    plan = changed(demo_plan(), {"n": peers, "rounds": rounds, "seed": seed})
    clusters = plan.partition.clusters
    console.print(
        f"[bold]1[/] Deal handwritten digits to {plan.n} peers in {clusters} hidden clusters: "
        "the same images, but turned upside down in one of them.\n"
        f"[bold]2[/] Start {plan.n} peer processes and a bootstrap node; in {plan.rounds} rounds "
        f"each trains, probes others and averages with those that learn alike ({plan.method}).\n"
        f"[bold]3[/] Compare with {', '.join(BASELINES)} on the same data, and draw the run.\n"
    )
    live = run_processes(plan, out)
    methods = (plan.method, *BASELINES)
    with console.status("") as status:
        comparison = compare(plan, methods, out, progress=_progress(status, plan.rounds))
        status.update("drawing")
        files = write_report(out)
    simulated = [("1 process", summary) for summary in comparison.values()]
    console.print(comparison_table([(f"{plan.n} peers", live), *simulated]))
    console.print(_agreement(live, comparison[plan.method]))
    console.print(f"Report: {files[0]}")
    return files


def comparison_table(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    """Return a table of runs, one a line: what each was run by, and its summary."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("method")
    table.add_column("run by")
    for heading in ("accuracy", "worst", "precision", "recall", "payload", "seconds"):
        table.add_column(heading, justify="right")
    for engine, summary in runs:
        table.add_row(
            summary["method"],
            engine,
            percent(summary["accuracy_mean"]),
            percent(summary["accuracy_worst"]),
            ratio(summary["precision"]),
            ratio(summary["recall"]),
            human_bytes(summary["bytes_sent"]),
            f"{summary['wall_s']:.1f}",
        )
    return table


def _progress(status: Status, rounds: int) -> Any:
    def show(method: str, t: int) -> None:
        status.update(f"{method}: round {t} of {rounds}")

    return show


def _agreement(live: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    gap = abs(live["accuracy_mean"] - reference["accuracy_mean"])
    if gap == 0:
        return f"{live['method']}: the processes reached exactly what the one process computes."
    return f"{live['method']}: processes and one process differ by {100 * gap:.2f} points."
