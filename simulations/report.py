"""`simulate report`: pictures, tables and a page of what a directory holds.

That is a run directory, the state directories of its peers, or the directory of a comparison, a
sweep or a paper's table. In it, `plots/` has the pictures, `rounds.csv`, `report.tex` and, of many
runs, `report.csv` the tables, and `report.html` everything.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peer.display import human_bytes, percent, ratio
from peer.errors import UserError
from peer.files import write_atomically
from peer.plan import Plan
from peer.rundir import (
    PLAN,
    SUMMARY,
    MetricRow,
    find_runs,
    merge,
    read_json,
    read_metrics,
    read_plan,
    read_topology,
    summarise,
)
from simulations.collection import is_collection, read_collection
from simulations.curves import Measure, over_rounds
from simulations.figures import save
from simulations.figures_bags import animate_bags
from simulations.gallery import Drawn, pictures_of_collection, pictures_of_run
from simulations.page import Page, Picture, write_page
from simulations.scenarios.runs import SCENARIO
from simulations.tables import write_csv
from simulations.typeset import latex, run_sheet, study_sheet

PLOTS = "plots"
REPORT = "report"
ROUNDS = "rounds.csv"
MEASURES: tuple[Measure, ...] = ("accuracy", "loss", "precision", "recall")


def locate(paths: Sequence[Path], out: Path | None) -> Path:
    """Return the directory to report on; several peers' directories are merged into `out`.

    Raises UserError when a path holds no run, or several runs are given without `out`.
    """
    if len(paths) == 1 and is_collection(paths[0]):
        return paths[0]
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


def write_report(path: Path, *, animate: bool = False) -> list[Path]:
    """Write the report of a directory into it, and return the files, the page first.

    With `animate` the report of a run has a GIF of its bags forming, if it has bags. Raises
    UserError when nothing in the directory is a run, or no round was finished in it.
    """
    (path / PLOTS).mkdir(exist_ok=True)
    return _report_collection(path) if is_collection(path) else _report_run(path, animate)


def _report_run(run: Path, animate: bool) -> list[Path]:
    plan, rows, topology = read_plan(run), read_metrics(run), read_topology(run)
    if not rows:
        raise UserError(f"no round was finished in {run}")
    files, pictures = _save(run, pictures_of_run(run, plan, rows, topology))
    if animate and any(row.bag for row in topology):
        gif = animate_bags(plan, rows, topology, run / PLOTS / "bags.gif")
        caption = "The bags over the rounds, as in the pictures of the rounds."
        pictures.append(Picture(gif, "The bags forming", caption))
        files.append(gif)
    sheet = run_sheet(plan, rows)
    summary = read_json(run / SUMMARY)
    last = max(row.t for row in rows)
    notes = []
    if not summary:
        notes.append(f"The run was not finished: round {last} of {plan.rounds} is its last so far.")
        summary = summarise(plan, rows, topology, wall_s=rows[-1].time - rows[0].time)
    if attackers := sorted({row.index for row in rows if row.attacker}):
        names = ", ".join(map(str, attackers))
        notes.append(f"Peers {names} attack ({summary.get('attack', '')}); figures are of others.")
    page = Page(
        title=f"{plan.name}: {plan.method}",
        lead=_lead(plan),
        notes=notes,
        facts=_facts(summary),
        sheet=sheet,
        pictures=pictures,
        files=[(name, (run / name).read_text()) for name in (PLAN, SCENARIO, SUMMARY)
               if (run / name).exists()],
    )  # fmt: skip
    labels = {"method": plan.method}
    return [
        write_page(page, run / f"{REPORT}.html"),
        _write_rounds([(labels, [rows])], run / ROUNDS),
        *_write_text(run / f"{REPORT}.tex", latex(sheet)),
        *files,
    ]


def _report_collection(path: Path) -> list[Path]:
    collection = read_collection(path)
    files, pictures = _save(path, pictures_of_collection(collection))
    sheet = study_sheet(collection)
    notes = []
    if collection.unfinished:
        notes.append(f"Runs that are not finished, and left out: {collection.unfinished}.")
    first = collection.runs[0]
    plan = first.plan
    page = Page(
        title=path.resolve().name,
        lead=_lead(plan, several=True),
        notes=notes,
        facts=[
            ("runs", str(len(collection.runs))),
            ("methods", str(len({run.plan.method for run in collection.runs}))),
            ("seeds", str(len({run.plan.seed for run in collection.runs}))),
            ("peers", str(plan.n)),
            ("rounds", str(plan.rounds)),
        ],
        sheet=sheet,
        pictures=pictures,
        files=[
            (f"{PLAN} of {first.folder.name}", (first.folder / PLAN).read_text()),
            ("all runs", "\n".join(run.folder.name for run in collection.runs)),
        ],
        collection=True,
    )
    lines = [group.line for group in collection.groups]
    told = [
        ({**group.labels, "method": group.name}, [run.rows for run in group.runs])
        for group in collection.groups
    ]
    return [
        write_page(page, path / f"{REPORT}.html"),
        write_csv(lines, path / f"{REPORT}.csv"),
        _write_rounds(told, path / ROUNDS),
        *_write_text(path / f"{REPORT}.tex", latex(sheet)),
        *files,
    ]


def _save(path: Path, drawn: Iterator[Drawn]) -> tuple[list[Path], list[Picture]]:
    """Write pictures, and return all files and what a page shows of them."""
    files: list[Path] = []
    pictures = []
    for own in drawn:
        written = save(own.figure, path / PLOTS / own.name)
        files += written
        pictures.append(Picture(written[0], own.heading, own.caption))
    return files, pictures


def _lead(plan: Plan, *, several: bool = False) -> str:
    label = plan.partition.label
    split = "one distribution" if label == "none-1" else label
    parts = [plan.data, split, plan.model, f"{plan.n} peers", f"{plan.rounds} rounds"]
    return " · ".join(parts if several else [plan.method, *parts, f"seed {plan.seed}"])


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what matters most of a summary, as texts; what it does not have is left out."""
    told = [
        ("accuracy, mean over peers", percent(summary["accuracy_mean"])),
        ("accuracy, worst peer", percent(summary["accuracy_worst"])),
        ("precision of the bags", ratio(summary["precision"])),
        ("recall of the bags", ratio(summary["recall"])),
        ("clusters found", str(summary["clusters_found"] or "-")),
        ("payload sent", human_bytes(summary["bytes_sent"])),
        ("peers that finished", f"{summary['finished']} of {summary['n']}"),
        ("wall time", f"{summary['wall_s']:.0f} s"),
    ]
    if summary.get("perplexity") is not None:
        told.insert(0, ("perplexity", f"{summary['perplexity']:.1f}"))
    if "virtual_s" in summary:
        told.append(("virtual time", f"{summary['virtual_s']:.0f} s"))
    return [(name, text) for name, text in told if text != "-"]


def _write_rounds(
    told: Sequence[tuple[Mapping[str, str], Sequence[Sequence[MetricRow]]]], path: Path
) -> Path:
    """Write the means over peers (and seeds) of every round as CSV, and return `path`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*told[0][0], "round", *MEASURES, "payload_received"])
    for labels, runs in told:
        rows = [row for own in runs for row in own if not row.attacker]
        curves = [over_rounds(rows, measure) for measure in MEASURES]
        tables = [dict(zip(curve.x, curve.y, strict=True)) for curve in curves]
        received: dict[int, list[int]] = {}
        for row in rows:
            received.setdefault(row.t, []).append(row.payload_received)
        for t, counts in sorted(received.items()):
            figures = [table.get(t, "") for table in tables]
            writer.writerow([*labels.values(), t, *figures, sum(counts) / len(counts)])
    write_atomically(path, text.getvalue())
    return path


def _write_text(path: Path, text: str) -> list[Path]:
    write_atomically(path, text)
    return [path]
