"""Purity of neighbours, in theory and in runs: PANM's Table III."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.table import Table

from peer.display import CLUSTER_COLOURS
from peer.plan import Plan
from peer.rundir import TopologyRow, read_topology
from simulations.figures import MUTED, STYLE
from simulations.theory import all_true, nsmc, pens


@dataclass(frozen=True)
class Purity:
    """P(all k neighbours are of the own cluster) in rounds 1, 2, ... of one setting.

    `pens` and `nsmc` are the theory's, `seen` is {method: share of peers in its runs}.
    """

    label: str
    pens: Sequence[float]
    nsmc: Sequence[float]
    seen: Mapping[str, Sequence[float]]


def share_pure(plan: Plan, rows: Iterable[TopologyRow]) -> dict[int, float]:
    """Return for every round the share of its peers whose neighbours are all of their own cluster.

    A peer with fewer than k neighbours does not count as one: theory asks for all k.
    """
    pure: dict[int, list[bool]] = {}
    for row in rows:
        own = plan.cluster_of(row.index)
        true = [plan.cluster_of(j) == own for j in row.neighbours]
        pure.setdefault(row.t, []).append(len(true) >= plan.matching.k and all(true))
    return {t: fmean(pure[t]) for t in sorted(pure)}


def purity(label: str, plan: Plan, runs: Mapping[str, Sequence[Path]]) -> Purity:
    """Return theory and runs of a plan, whose clusters must be of one size.

    `runs` are run directories by method, one for each seed. Raises UserError where the theory has
    nothing to say.
    """
    n, l, k = plan.n, plan.matching.l, plan.matching.k  # noqa: E741
    a = n // plan.partition.clusters
    search = nsmc(n, a, l, k, plan.rounds)
    seen = {}
    for method, folders in runs.items():
        shares = [share_pure(plan, read_topology(folder)).values() for folder in folders]
        seen[method] = [fmean(values) for values in zip(*shares, strict=True)]
    constant = [all_true(pens(n, a, l, k))] * plan.rounds
    return Purity(label, constant, [all_true(p) for p in search], seen)


def purity_rows(purities: Sequence[Purity]) -> list[dict[str, str]]:
    """Return a row for each setting and round, three decimals each."""
    return [
        {
            "clusters": own.label,
            "round": str(t + 1),
            "PENS, theory": f"{own.pens[t]:.3f}",
            "NSMC, theory": f"{own.nsmc[t]:.3f}",
            **{method: f"{values[t]:.3f}" for method, values in own.seen.items()},
        }
        for own in purities
        for t in range(len(own.nsmc))
    ]


def purity_table(purities: Sequence[Purity], title: str) -> Table:
    """Return theory beside what was seen, for a terminal."""
    rows = purity_rows(purities)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        if row["round"] == "1":
            table.add_section()
        table.add_row(*row.values())
    return table


def purity_figure(purities: Sequence[Purity], title: str) -> Figure:
    """Return a panel for each setting: theory broken, runs solid, over rounds."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(purities) + 1.6, 3.8), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(purities), sharey=True, squeeze=False)[0]
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        for panel, own in zip(panels, purities, strict=True):
            rounds = range(1, len(own.nsmc) + 1)
            panel.plot(rounds, own.nsmc, color=MUTED, ls=(0, (4, 2)), label="NSMC, theory")
            panel.plot(rounds, own.pens, color=MUTED, ls=(0, (1, 1.5)), label="PENS, theory")
            for place, (method, values) in enumerate(own.seen.items()):
                panel.plot(rounds, values, color=CLUSTER_COLOURS[place], marker="o", label=method)
            panel.set_title(f"{own.label} clusters", loc="left", fontsize=10, color=MUTED)
            panel.set_xlabel("round")
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
            panel.grid(axis="y")
        panels[0].set_ylabel("P(all k neighbours true)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper")
        return figure
