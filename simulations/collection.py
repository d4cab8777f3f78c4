"""What a directory of many runs holds: those of a comparison, a sweep, or a paper's table.

Nothing but the runs themselves says what set them apart: keys of their plans, or scenarios, in
which runs of one method differ. A key that one method alone varies goes into its name; the others
make settings, and a method that does not ask for one is of every setting.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from peer.errors import UserError
from peer.matching.registry import CENTRAL, method_names
from peer.plan import Plan
from peer.rundir import (
    PLAN,
    SUMMARY,
    MetricRow,
    TopologyRow,
    read_json,
    read_metrics,
    read_topology,
)
from simulations.curves import Curve, over_time
from simulations.scenarios.runs import SCENARIO
from simulations.study import BASELINE, CELLS, Line, asks_for, line_of

NO_LABELS = frozenset({"name", "claim", "seed", "method"})
"""Keys that are no setting."""
UNSET = "unset"
ANY = "any"
"""The value of a key for which a method does not ask."""


@dataclass(frozen=True)
class Run:
    """A finished run: its directory, its plan, and all keys of it and of its scenario."""

    folder: Path
    plan: Plan
    keys: Mapping[str, str]

    @property
    def everybody(self) -> bool:
        """Whether every peer could hear of every other all the time, as far as the files say."""
        return self.keys.get("topology.kind", "complete") == "complete" and not any(
            key.startswith("script.") for key in self.keys
        )

    @cached_property
    def rows(self) -> list[MetricRow]:
        """The rows of metrics of those that do not attack."""
        return [row for row in read_metrics(self.folder) if not row.attacker]

    @cached_property
    def timed(self) -> tuple[Curve, Curve]:
        """Mean accuracy over time, and over payload, by what each peer had at every moment."""
        times, accuracies, payload = over_time(self.plan.n, self.rows)
        mean = np.nanmean(accuracies, axis=1)
        return Curve(times, mean), Curve(payload, mean)

    @cached_property
    def topology(self) -> list[TopologyRow]:
        """Who averaged with whom."""
        return read_topology(self.folder)


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone, by seed; `name` is the method and what it varies."""

    labels: Mapping[str, str]
    name: str
    runs: Sequence[Run]
    alone: Sequence[Run]

    @cached_property
    def line(self) -> Line:
        """What the runs come to."""
        folders, alone = ([run.folder for run in runs] for runs in (self.runs, self.alone))
        return line_of(self.labels, self.name, folders, alone)


@dataclass(frozen=True)
class Collection:
    """All finished runs of a directory, and how many are not finished."""

    path: Path
    groups: Sequence[Group]
    unfinished: int

    @property
    def runs(self) -> list[Run]:
        """All finished runs."""
        return [run for group in self.groups for run in group.runs]

    def settings(self) -> dict[str, list[Group]]:
        """Return the groups of each setting, by its name; those of `ANY` value are of all.

        A single method has its settings side by side, as one.
        """
        if len({group.name for group in self.groups}) == 1:
            return {"": [*self.groups]}
        full = [group.labels for group in self.groups if ANY not in group.labels.values()]
        labels = full or [group.labels for group in self.groups]
        return {
            setting_name(setting): [group for group in self.groups if _fits(group.labels, setting)]
            for setting in labels
        }


def setting_name(labels: Mapping[str, str]) -> str:
    """Return labels as a text: l 10, k 5. Tables of keys are left out where names are unlike."""
    return ", ".join(f"{short_key(key, labels)} {value}" for key, value in labels.items())


def short_key(key: str, keys: Iterable[str]) -> str:
    """Return the last part of a dotted key, all of it when another of `keys` ends alike."""
    last = key.rpartition(".")[2]
    return last if sum(own.rpartition(".")[2] == last for own in keys) == 1 else key


def is_collection(path: Path) -> bool:
    """Tell whether a directory holds the runs of a comparison or a sweep."""
    return (path / CELLS).is_dir()


def read_collection(path: Path) -> Collection:
    """Read what the directory of a comparison or a sweep holds.

    Raises UserError when no run in it is finished.
    """
    folders = sorted(file.parent for file in (path / CELLS).glob(f"*/{PLAN}"))
    runs = [_read(folder) for folder in folders if (folder / SUMMARY).is_file()]
    if not runs:
        raise UserError(
            f"no run in {path} is finished", "the command that began it goes on with it"
        )
    varied = _varied(runs)
    methods = {run.plan.method for run in runs}
    named = {key for key, varying in varied.items() if len(varying) == 1 < len(methods)}
    groups: dict[tuple[tuple[str, ...], str], list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.plan.seed):
        labels, name = _told(run, varied, named)
        groups.setdefault((tuple(labels.values()), name), []).append(run)
    alone = {_identity(run): run for run in runs if run.plan.method == BASELINE}
    made = []
    for own in groups.values():
        beside = [found for run in own if (found := alone.get(_identity(run)))]
        made.append(Group(*_told(own[0], varied, named), own, beside * (len(beside) == len(own))))
    return Collection(path, sorted(made, key=_order), len(folders) - len(runs))


def _read(folder: Path) -> Run:
    plan = Plan.load(folder / PLAN)
    keys = _flat(tomllib.loads(plan.to_toml()))
    if (folder / SCENARIO).is_file():
        table = tomllib.loads((folder / SCENARIO).read_text(encoding="utf-8"))
        return Run(folder, plan, keys | _flat({k: v for k, v in table.items() if k != "plan"}))
    # What the laboratory was told beside the plan is in the directory's name, and in the summary.
    equipment = folder.name.removeprefix(f"{plan.method}-{plan.digest[:12]}").removeprefix("-")
    attack = read_json(folder / SUMMARY).get("attack")
    if attack is not None:
        equipment = equipment.removesuffix(attack).removesuffix("-")
    return Run(folder, plan, keys | {"attack": attack or "none", "equipment": equipment})


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return {dotted key: value as text}; members of lists of tables are counted from 1."""
    found: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            members = {str(number): own for number, own in enumerate(value, start=1)}
            found |= _flat(members, f"{prefix}{key}.")
        else:
            text = str(value)
            found[prefix + key] = text.lower() if isinstance(value, bool) else text
    return found


def _asked(run: Run, key: str) -> bool:
    if key == "attack":
        return run.plan.method != BASELINE
    return asks_for(run.plan.method, key)


def _varied(runs: Sequence[Run]) -> dict[str, set[str]]:
    """Return the methods that vary each key, for the keys that any of them does."""
    values: dict[str, dict[str, set[str]]] = {}
    keys = {key for run in runs for key in run.keys} - NO_LABELS
    for run in runs:
        for key in keys:
            if _asked(run, key):
                by_method = values.setdefault(key, {})
                by_method.setdefault(run.plan.method, set()).add(run.keys.get(key, ""))
    return {
        key: varying
        for key, by_method in sorted(values.items())
        if (varying := {method for method, seen in by_method.items() if len(seen) > 1})
    }


def _told(run: Run, varied: Mapping[str, set[str]], named: Set[str]) -> tuple[dict[str, str], str]:
    """Return the labels of a run's setting and its name; keys of `named` are told in the name."""
    labels = {
        key: run.keys.get(key, UNSET) if _asked(run, key) else ANY
        for key in varied
        if key not in named
    }
    own = [f"{key.rpartition('.')[2]} {run.keys.get(key, UNSET)}" for key in varied
           if key in named and run.plan.method in varied[key]]  # fmt: skip
    return labels, ", ".join([run.plan.method, *own])


def _identity(run: Run) -> frozenset[tuple[str, str]]:
    """Return what a run has in common with the run of `local` that it is compared with."""
    apart = NO_LABELS - {"seed"} | {"attack"}
    return frozenset(
        (key, value)
        for key, value in run.keys.items()
        if key not in apart and asks_for(BASELINE, key)
    )


def _order(group: Group) -> tuple[list[tuple[float, str]], int, str]:
    """Return what groups are sorted by: numbers as numbers, methods as they are listed."""
    method = group.runs[0].plan.method
    known = [*method_names(), *CENTRAL]
    place = known.index(method) if method in known else len(known)
    return [_number(text) for text in group.labels.values()], place, group.name


def _number(text: str) -> tuple[float, str]:
    try:
        return float(text), ""
    except ValueError:
        return math.inf, text


def _fits(labels: Mapping[str, str], setting: Mapping[str, str]) -> bool:
    return all(labels[key] in (value, ANY) for key, value in setting.items())
