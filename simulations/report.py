"""`simulate report`: the pictures of a run directory, or of the state directories of its peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from peer.errors import UserError
from peer.rundir import (
    COMPARISON,
    find_runs,
    merge,
    perplexity,
    read_json,
    read_metrics,
    read_plan,
    read_topology,
)
from simulations.figures import (
    accuracy_figure,
    heatmap_figure,
    perplexity_figure,
    save,
    topology_figure,
)
from simulations.figures_cfl import attempts_of, clustering_figure
from simulations.scenarios.pictures import time_figure
from simulations.scenarios.runs import SCENARIO
from simulations.scenarios.scenario import load

PLOTS = "plots"
REFERENCES = ("local", "random")
"""Methods whose mean is drawn beside the run's own, where its comparison has them."""


def locate(paths: Sequence[Path], out: Path | None) -> Path:
    """Return the run directory to report on; several peers' directories are merged into `out`.

    Raises UserError when a path holds no run, or several runs are given without `out`.
    """
    runs = [run for path in paths for run in find_runs(path)]
    if len(runs) == 1:
        return runs[0]
    if out is None:
        raise UserError(
            f"{len(runs)} peers' directories must be merged into a run directory",
            "name it with --out DIR",
        )
    merge(runs, out)
    return out


def write_report(run: Path) -> list[Path]:
    """Draw the pictures of a run directory into its `plots/`, and return the files written.

    Raises UserError when the directory is not a run's or no round was finished in it.
    """
    plan, rows, topology = read_plan(run), read_metrics(run), read_topology(run)
    if not rows:
        raise UserError(f"no round was finished in {run}")
    references = {
        method: [(float(t), float(mean)) for t, mean in summary["curve"]]
        for method, summary in read_json(run / COMPARISON).items()
        if method in REFERENCES and method != plan.method
    }
    figures = {
        "accuracy": accuracy_figure(plan, rows, references),
        "heatmap": heatmap_figure(plan, topology),
        "topology": topology_figure(plan, topology),
    }
    if attempts_of(rows):
        figures["clustering"] = clustering_figure(plan, rows)
    if perplexity(plan, 0.0) is not None:
        figures["perplexity"] = perplexity_figure(plan, rows)
    if (run / SCENARIO).exists():
        figures["time"] = time_figure(load(run / SCENARIO), rows)
    folder = run / PLOTS
    folder.mkdir(exist_ok=True)
    return [path for name, figure in figures.items() for path in save(figure, folder / name)]
