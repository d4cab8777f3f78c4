"""Studies: methods x seeds x settings, each a run directory of its own, and what they come to.

A study can be ended at any moment and goes on where it was: a cell is finished when its directory
has a summary, and is named after the digest of its plan. Plans are brought to the form in which
equal runs have equal digests, so that no run is made twice: `local` does not ask for l or k.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from peer.errors import UserError
from peer.matching.registry import CENTRAL, method_names
from peer.plan import UNDEFENDED, CentralPlan, CflPlan, MatchingPlan, Plan
from peer.rundir import SUMMARY, final_rows, read_json, read_metrics, read_plan
from simulations.runs import Equipment, PopulationMaker, changed, run_population

CELLS = "cells"
BASELINE = "local"
MAX_CELLS = 10_000
FAR_BELOW = 0.02
"""How much accuracy a peer may lose by learning with others, by the noise of its test set."""

_NONE: frozenset[str] = frozenset()
_MIX = frozenset({"k", "weighting"})
_SEARCH = _MIX | {"l", "t1"}
_ASKS_FOR = {
    "local": (_NONE, _NONE),
    "random": (_MIX, _NONE),
    "fixed": (_MIX, _NONE),
    "oracle": (_MIX, _NONE),
    "pens": (_SEARCH | {"loss_samples"}, _NONE),
    "panm-loss": (_SEARCH | {"loss_samples", "tau"}, _NONE),
    "panm-grad": (_SEARCH | {"alpha", "evidence", "fade", "sketch_buckets", "tau"}, _NONE),
    "fedavg": (frozenset({"weighting"}), frozenset({"fraction"})),
    "ifca": (
        frozenset({"weighting", "loss_samples"}),
        frozenset({"fraction", "clusters", "redraws"}),
    ),
}
"""The keys of [matching] and [central] that a method asks for; others may ask for all."""


@dataclass(frozen=True)
class Variant:
    """A method as a study compares it: its name there, and what it changes in the plan.

    `changes` maps dotted keys of the plan (matching.k) to values.
    """

    name: str
    method: str
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """What all methods of a group of runs share: how tables call it, and what it changes."""

    labels: Mapping[str, str]
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    setting: Setting
    variant: Variant
    seed: int
    plan: Plan


@dataclass(frozen=True)
class Study:
    """Every variant in every setting with every seed, beside the plan they have in common.

    With `baseline`, `local` is run in every setting too, to compare each peer with.
    """

    base: Plan
    settings: Sequence[Setting]
    variants: Sequence[Variant]
    seeds: Sequence[int]
    baseline: bool = True

    @cached_property
    def cells(self) -> list[Cell]:
        """All runs, those that can share an engine side by side.

        Raises UserError for changes that make no plan, and for more than MAX_CELLS runs.
        """
        check_count(len(self.settings) * len(self.variants) * len(self.seeds))
        return [
            Cell(setting, variant, seed, self._plan(setting, variant, seed))
            for setting in self.settings
            for seed in self.seeds
            for variant in self.variants
        ]

    def _plan(self, setting: Setting, variant: Variant, seed: int) -> Plan:
        changes = {**setting.changes, **variant.changes, "method": variant.method, "seed": seed}
        return canonical(changed(self.base, changes))


def canonical(plan: Plan) -> Plan:
    """Return the plan with the keys that its method does not ask for at their defaults."""
    if plan.method not in _ASKS_FOR:
        return plan
    matching, central = _ASKS_FOR[plan.method]
    update = {
        "matching": MatchingPlan.model_validate(plan.matching.model_dump(include=set(matching))),
        "central": CentralPlan.model_validate(plan.central.model_dump(include=set(central))),
        "cfl": CflPlan(),
    }
    if plan.method == BASELINE:
        update["defence"] = UNDEFENDED
    return plan.model_copy(update=update)


def asks_for(method: str, key: str) -> bool:
    """Tell whether a method asks for a dotted key of the plan, so that its value matters to it."""
    table, _, name = key.partition(".")
    if method in _ASKS_FOR and table in ("matching", "central"):
        return name in _ASKS_FOR[method][table == "central"]
    if table == "cfl":
        return method not in _ASKS_FOR
    return table != "defence" or method != BASELINE


def parse_variation(text: str) -> list[tuple[str, str, Any]]:
    """Return (key, text, value) of each value of KEY=V1,V2; values are as TOML has them.

    What is no TOML value is a text: partition.kind=rotation needs no quotes. Raises UserError.
    """
    key, equals, values = text.partition("=")
    key = key.strip()
    if not equals or not key or not values.strip():
        raise UserError(f"cannot read {text!r}", "write --set KEY=VALUE or --set KEY=V1,V2")
    if key in ("method", "seed"):
        raise UserError(f"{key} is not set by --set", f"use --{key}s")
    parts = [part.strip() for part in values.split(",") if part.strip()]
    return [(key, part, toml_value(part)) for part in parts]


def toml_value(text: str) -> Any:
    """Return the value that `text` is in TOML; what is none is a text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text


def note_of(study: Study) -> str:
    """Return in a line what all runs of a study have in common."""
    told = [
        [own.data, own.partition.label, own.model, f"n={own.n}", f"{own.rounds} rounds"]
        for own in (cell.plan for cell in study.cells)
    ]
    return " · ".join(parts[0] for parts in zip(*told, strict=True) if len(set(parts)) == 1)


def check_count(runs: int) -> None:
    """Raise UserError when a study would have more than MAX_CELLS runs."""
    if runs > MAX_CELLS:
        raise UserError(f"{runs} runs are more than {MAX_CELLS}", "vary fewer values at once")


def check_methods(names: Sequence[str]) -> None:
    """Raise UserError unless there are names, and each is a method that can be run here."""
    known = [*method_names(), *CENTRAL]
    if not names:
        raise UserError("there are no methods to compare", f"choose of {', '.join(known)}")
    for name in names:
        if name not in known:
            raise UserError(f"there is no method {name}", f"choose of {', '.join(known)}")


@dataclass(frozen=True)
class Line:
    """What a variant came to in a setting: figures over its seeds, None where there are none.

    Accuracies are shares in [0, 1]. `..._sd` is the sample standard deviation over seeds,
    `accuracy_worst` the least of any peer with any seed, `below_local` the mean number of peers
    that do worse than by themselves with the same seed, `far_below_local` the largest number that
    do by more than FAR_BELOW; `perplexity` is of text only; `bytes_moved` and `seconds` are those
    of a run. With attackers, all are of honest peers, `backdoor` is a backdoor's success, `chosen`
    the share of attackers among those that they averaged with.
    """

    labels: Mapping[str, str]
    variant: str
    seeds: int
    accuracy_mean: float | None
    accuracy_sd: float | None
    accuracy_worst: float | None
    below_local: float | None
    precision: float | None
    recall: float | None
    clusters_found: float | None
    bytes_moved: float
    seconds: float
    runs: tuple[Path, ...]
    perplexity: float | None = None
    far_below_local: int | None = None
    backdoor: float | None = None
    chosen: float | None = None
    precision_sd: float | None = None
    recall_sd: float | None = None
    perplexity_sd: float | None = None

    @property
    def figures(self) -> dict[str, float | int | None]:
        """The figures by name, in the order of a table's columns."""
        skipped = ("labels", "variant", "runs")
        return {name: value for name, value in vars(self).items() if name not in skipped}


def run_study(
    study: Study,
    out: Path,
    *,
    equipment: Equipment,
    evaluate_every: int | None = None,
    console: Console | None = None,
) -> list[Line]:
    """Run what is not finished of a study in `out`, and return its lines, by setting and variant.

    Peers are evaluated in every `evaluate_every`-th round, by default a twentieth of all, and in
    the last. On a terminal it shows its progress and the time left; elsewhere it prints a line for
    every run that is finished. Raises UserError for what cannot be run.
    """
    where = {cell.plan.digest: cell.plan for cell in study.cells}
    if study.baseline:
        where |= {plan.digest: plan for plan in map(_baseline, study.cells)}
    for plan in where.values():
        equipment.check(plan)
    pending = [
        plan for plan in where.values() if not _finished(cell_folder(out, plan, equipment), plan)
    ]
    console = console or Console()
    try:
        _run_pending(pending, out, equipment, evaluate_every, console)
    except KeyboardInterrupt:
        if console.is_terminal:
            console.print(f"stopped; finished runs stay in {out}, and the same command goes on")
        raise
    return [_line(group, out, equipment, study.baseline) for group in _grouped(study)]


def cell_folder(out: Path, plan: Plan, equipment: Equipment) -> Path:
    """Return the run directory of a plan in the study that is kept in `out`."""
    parts = (plan.method, plan.digest[:12], equipment.label(plan))
    return out / CELLS / "-".join(part for part in parts if part)


def _baseline(cell: Cell) -> Plan:
    return canonical(cell.plan.model_copy(update={"method": BASELINE}))


def _finished(run: Path, plan: Plan) -> bool:
    return (run / SUMMARY).is_file() and read_plan(run).digest == plan.digest


def _run_pending(
    pending: Sequence[Plan],
    out: Path,
    equipment: Equipment,
    evaluate_every: int | None,
    console: Console,
) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("peer rounds"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )
    quiet = not console.is_terminal
    total, done, began = sum(plan.rounds * plan.n for plan in pending), 0, time.monotonic()
    # Runs differ in speed: the time left is by the mean of the last hour, not of the last seconds.
    with (
        Progress(*columns, console=console, disable=quiet, speed_estimate_period=3600) as progress,
        PopulationMaker(equipment) as maker,
    ):
        task = progress.add_task("", total=total)
        for number, plan in enumerate(pending, start=1):
            name = f"run {number} of {len(pending)}: {plan.method}, seed {plan.seed}"
            progress.update(task, description=name)
            summary = run_population(
                plan,
                cell_folder(out, plan, equipment),
                maker=maker,
                evaluate_every=evaluate_every or max(1, plan.rounds // 20),
                progress=_advance(progress, task, plan.n),
            )
            done += plan.rounds * plan.n
            if quiet:
                left = time_left(time.monotonic() - began, done, total)
                console.print(f"{name}: {_outcome(summary)}; {left} left", soft_wrap=True)


def time_left(elapsed: float, done: int, total: int) -> timedelta:
    """Return how long the rest of `total` peer rounds takes, if as long each as those `done` in
    `elapsed` seconds."""
    return timedelta(seconds=round(elapsed * (total - done) / done))


def _outcome(summary: Mapping[str, Any]) -> str:
    return f"accuracy {100 * summary['accuracy_mean']:.1f}, {summary['wall_s']:.0f} s"


def _advance(progress: Progress, task: TaskID, n: int) -> Callable[[str, int], None]:
    """Return what counts a round of n peers."""

    def advance(_method: str, _t: int) -> None:
        progress.advance(task, n)

    return advance


def _grouped(study: Study) -> Iterator[list[Cell]]:
    """Yield the cells of each setting and variant, which differ in their seed."""
    for setting in study.settings:
        for variant in study.variants:
            yield [
                cell for cell in study.cells if cell.setting is setting and cell.variant is variant
            ]


def _line(cells: Sequence[Cell], out: Path, equipment: Equipment, baseline: bool) -> Line:
    runs = [cell_folder(out, cell.plan, equipment) for cell in cells]
    alone = [cell_folder(out, _baseline(cell), equipment) for cell in cells] if baseline else []
    return line_of(cells[0].setting.labels, cells[0].variant.name, runs, alone)


def line_of(
    labels: Mapping[str, str], variant: str, runs: Sequence[Path], alone: Sequence[Path]
) -> Line:
    """Return what finished runs that differ in their seed come to.

    `alone` are the runs of `local` with the same seeds in the same order, or none.
    """
    summaries = [read_json(run / SUMMARY) for run in runs]
    accuracies = [_accuracies(run) for run in runs]
    lost = [  # empty without a baseline
        [local[i] - own[i] for i in own if i in local]
        for own, local in zip(accuracies, map(_accuracies, alone), strict=False)
    ]
    return Line(
        labels=labels,
        variant=variant,
        seeds=len(runs),
        accuracy_mean=_mean(summaries, "accuracy_mean"),
        accuracy_sd=_sd(summaries, "accuracy_mean"),
        accuracy_worst=min((value for own in accuracies for value in own.values()), default=None),
        below_local=fmean(float(sum(loss > 0 for loss in own)) for own in lost) if lost else None,
        precision=_mean(summaries, "precision"),
        recall=_mean(summaries, "recall"),
        clusters_found=_mean(summaries, "clusters_found"),
        bytes_moved=fmean(summary["bytes_moved"] for summary in summaries),
        seconds=fmean(summary["wall_s"] for summary in summaries),
        runs=tuple(runs),
        perplexity=_mean(summaries, "perplexity"),
        far_below_local=max((sum(loss > FAR_BELOW for loss in own) for own in lost), default=None),
        backdoor=_mean(summaries, "backdoor"),
        chosen=_mean(summaries, "chosen"),
        precision_sd=_sd(summaries, "precision"),
        recall_sd=_sd(summaries, "recall"),
        perplexity_sd=_sd(summaries, "perplexity"),
    )


def _accuracies(run: Path) -> dict[int, float]:
    """Return every honest peer's accuracy after its last round, by index."""
    rows = final_rows(read_metrics(run))
    return {row.index: row.accuracy or 0.0 for row in rows if not row.attacker}


def _mean(summaries: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = _values(summaries, key)
    return fmean(values) if values else None


def _sd(summaries: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = _values(summaries, key)
    return stdev(values) if len(values) > 1 else None


def _values(summaries: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [value for summary in summaries if (value := summary.get(key)) is not None]
