"""Whether CFL separates the true clusters and then stops: what a run's tree says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table
from sklearn.metrics import adjusted_rand_score

from peer.plan import Plan
from peer.rundir import final_rows, read_metrics, read_plan
from simulations.figures_cfl import attempts_of, splits_of


@dataclass(frozen=True)
class Separation:
    """How a run of CFL ended.

    Attributes:
        labels: of the setting.
        n, clusters, seed: the plan's, K the number of true clusters.
        splits: the rounds in which a cluster was split, in order.
        rounds_after: rounds without a split at the end of the run.
        rand: adjusted Rand index of the clusters found against the true ones; 1 when they agree.
    """

    labels: Mapping[str, str]
    n: int
    clusters: int
    seed: int
    splits: tuple[int, ...]
    rounds_after: int
    rand: float


def separation(labels: Mapping[str, str], run: Path) -> Separation:
    """Return how the run of CFL in a directory ended."""
    plan, rows = read_plan(run), read_metrics(run)
    splits = splits_of(attempts_of(rows))
    last = final_rows(rows)
    return Separation(
        labels=labels,
        n=plan.n,
        clusters=plan.partition.clusters,
        seed=plan.seed,
        splits=tuple(splits),
        rounds_after=max(row.t for row in last) - max(splits, default=0),
        rand=_rand(plan, [row.notes["node"] for row in last]),
    )


def _rand(plan: Plan, places: Sequence[int]) -> float:
    true = [plan.cluster_of(i) for i in range(plan.n)]
    return float(adjusted_rand_score(true, places))


def separation_rows(found: Sequence[Separation]) -> list[dict[str, str]]:
    """Return the runs as rows of texts by column."""
    return [
        {
            **one.labels,
            "seed": str(one.seed),
            "splits in rounds": ", ".join(map(str, one.splits)) or "-",
            "rounds after": str(one.rounds_after),
            "adjusted Rand": f"{one.rand:.3f}",
            "as it should": "yes" if one.rand == 1 and len(one.splits) < one.clusters else "NO",
        }
        for one in found
    ]


def separation_table(rows: Sequence[Mapping[str, str]], title: str) -> Table:
    """Return the rows as a table for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for heading in rows[0]:
        table.add_column(heading, no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    return table
