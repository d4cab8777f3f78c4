"""`simulate sweep`: every combination of a scenario's keys, several runs at a time.

Each run is a process of its own with one thread, and a run directory named after what it is: a
sweep that was ended goes on where it was, and one that is extended runs what is new.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from peer.display import human_bytes, percent, ratio
from peer.errors import FederationError, UserError
from peer.files import write_atomically
from peer.rundir import METRICS, SUMMARY, read_json
from simulations.runs import Equipment
from simulations.scenarios.runs import SCENARIO, run_scenario
from simulations.scenarios.scenario import Scenario, load
from simulations.study import check_count, toml_value

CELLS = "cells"
POLL_SECONDS = 0.2
COLUMNS = (
    "accuracy_mean", "accuracy_worst", "precision", "recall", "bytes_received", "virtual_s",
    "wall_s",
)  # fmt: skip
"""Figures of a summary that the table has."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: the values of the varied keys, as written, and the scenario they make."""

    labels: Mapping[str, str]
    scenario: Scenario
    folder: Path

    @property
    def finished(self) -> bool:
        """Whether it was run to its end, the very same scenario."""
        there = (self.folder / SUMMARY).is_file() and (self.folder / SCENARIO).is_file()
        return there and load(self.folder / SCENARIO).digest == self.scenario.digest

    @property
    def rows(self) -> int:
        """How many rows it will have."""
        return self.scenario.plan.rounds * self.scenario.plan.n

    def written(self) -> int:
        """Return how many rows it has so far."""
        try:
            return (self.folder / METRICS).read_bytes().count(b"\n")
        except OSError:
            return 0


def parse_grid(texts: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the keys with their values, as written, of texts KEY=V1,V2. Raises UserError."""
    grid = []
    for text in texts:
        key, equals, values = text.partition("=")
        parts = [part.strip() for part in values.split(",") if part.strip()]
        if not equals or not key.strip() or not parts:
            raise UserError(f"cannot read {text!r}", "write --grid KEY=V1,V2")
        grid.append((key.strip(), parts))
    if len({key for key, _ in grid}) < len(grid):
        raise UserError("a key is varied twice", "write its values as --grid KEY=V1,V2")
    return grid


def make_cells(
    scenario: Scenario, grid: Sequence[tuple[str, Sequence[str]]], out: Path
) -> list[Cell]:
    """Return every combination. Raises UserError when one of them makes no scenario."""
    check_count(math.prod(len(values) for _, values in grid))
    cells = []
    for chosen in itertools.product(*(values for _, values in grid)):
        labels = dict(zip((key for key, _ in grid), chosen, strict=True))
        own = scenario.changed({key: toml_value(text) for key, text in labels.items()})
        cells.append(Cell(labels, own, out / CELLS / f"{own.plan.method}-{own.digest}"))
    return cells


def run_sweep(
    scenario: Scenario,
    grid: Sequence[tuple[str, Sequence[str]]],
    out: Path,
    *,
    processes: int | None = None,
    console: Console | None = None,
) -> list[tuple[Cell, dict[str, Any]]]:
    """Run what is not finished, as many at once as there are cores, and return all summaries.

    On a terminal it shows its progress and the time left. Raises UserError when a combination is no
    scenario, FederationError when a run fails; finished runs stay.
    """
    console = console or Console()
    cells = make_cells(scenario, grid, out)
    for cell in cells:
        Equipment().check(cell.scenario.plan)
    pending = [*{cell.folder: cell for cell in cells if not cell.finished}.values()]
    at_once = processes or max(1, len(os.sched_getaffinity(0)))
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False),
    )  # fmt: skip
    quiet = not console.is_terminal
    # Runs differ in speed: the time left is by the mean of the last hour, not of the last seconds.
    with Progress(*columns, console=console, disable=quiet, speed_estimate_period=3600) as progress:
        task = progress.add_task("", total=sum(cell.rows for cell in pending))

        def show(done: int, finished: int) -> None:
            told = f"{finished} of {len(pending)} runs"
            progress.update(task, completed=done, description=told)

        try:
            _run_all(pending, at_once, show)
        except KeyboardInterrupt:
            if not quiet:
                console.print(f"stopped; finished runs stay in {out}: the same command goes on")
            raise
    return [(cell, read_json(cell.folder / SUMMARY)) for cell in cells]


def _run_all(cells: Sequence[Cell], at_once: int, show: Callable[[int, int], None]) -> None:
    """Run cells in processes of their own; whatever ends this ends them."""
    running: dict[Path, tuple[Cell, subprocess.Popen[bytes]]] = {}
    waiting, finished, done = [*cells], 0, 0
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < at_once:
                cell = waiting.pop(0)
                running[cell.folder] = cell, _start(cell, environment, stack)
            time.sleep(POLL_SECONDS)
            for folder, (cell, process) in [*running.items()]:
                if process.poll() is None:
                    continue
                del running[folder]
                if process.returncode:
                    raise FederationError(f"a run failed\n{_log(cell).read_text()[-3000:]}")
                _log(cell).unlink()
                finished, done = finished + 1, done + cell.rows
            show(done + sum(cell.written() for cell, _ in running.values()), finished)


def _start(cell: Cell, environment: Mapping[str, str], stack: ExitStack) -> subprocess.Popen[bytes]:
    wanted = cell.folder.with_suffix(".toml")
    wanted.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(wanted, cell.scenario.to_toml())
    with _log(cell).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "simulations.scenarios.sweep", str(wanted), str(cell.folder)],
            env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip

    def end() -> None:
        process.kill()  # nothing when it has ended; its directory has no summary, so it is rerun
        process.wait()

    stack.callback(end)
    return process


def _log(cell: Cell) -> Path:
    return cell.folder.with_suffix(".log")


def sweep_table(results: Sequence[tuple[Cell, Mapping[str, Any]]]) -> Table:
    """Return the runs as a table for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for key in results[0][0].labels:
        table.add_column(key)
    for heading in ("accuracy", "worst", "prec.", "recall", "payload", "virtual s", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cell, summary in results:
        table.add_row(
            *cell.labels.values(),
            percent(summary["accuracy_mean"]),
            percent(summary["accuracy_worst"]),
            ratio(summary["precision"]),
            ratio(summary["recall"]),
            human_bytes(summary["bytes_received"]),
            f"{summary['virtual_s']:.1f}",
            f"{summary['wall_s']:.1f}",
        )
    return table


def write_csv(results: Sequence[tuple[Cell, Mapping[str, Any]]], path: Path) -> Path:
    """Write the runs as CSV, figures at full precision, and return `path`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*results[0][0].labels, *COLUMNS, "run"])
    for cell, summary in results:
        figures = ["" if summary[name] is None else summary[name] for name in COLUMNS]
        writer.writerow([*cell.labels.values(), *figures, cell.folder.name])
    write_atomically(path, text.getvalue())
    return path


def main() -> None:
    """Run the scenario of argv[1] into argv[2], in this process alone."""
    scenario = load(Path(sys.argv[1]))
    every = max(1, scenario.plan.rounds // 50)
    run_scenario(scenario, Path(sys.argv[2]), workers=0, evaluate_every=every)


if __name__ == "__main__":
    main()
