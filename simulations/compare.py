"""`simulate compare`: methods x seeds x settings of a plan, in one table."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from peer.errors import UserError
from peer.plan import Plan
from simulations.figures import save
from simulations.runs import Equipment
from simulations.study import (
    Line,
    Setting,
    Study,
    Variant,
    check_count,
    check_methods,
    note_of,
    run_study,
)
from simulations.study import parse_variation as parse
from simulations.tables import study_figure, study_table, write_csv

WIDTH = 120
"""Columns of a table that is not written to a terminal."""


def make_console() -> Console:
    """Return a console that is wide enough for a table wherever it goes."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def compare(
    plan: Plan,
    methods: Sequence[str],
    seeds: Sequence[int],
    variations: Sequence[str],
    out: Path,
    *,
    equipment: Equipment,
    baseline: bool = True,
    evaluate_every: int | None = None,
) -> list[Line]:
    """Run what is not finished, print the table, and write it into `out` as CSV and picture.

    `variations` are texts KEY=V1,V2; every combination of their values is a setting. With
    `baseline`, every peer is compared with what it reaches alone. Raises UserError before anything
    runs when one of them, or a method, cannot be used.
    """
    check_methods(methods)
    study = Study(
        base=plan,
        settings=_settings(variations, equipment),
        variants=[Variant(name, name) for name in dict.fromkeys(methods)],
        seeds=list(dict.fromkeys(seeds)),
        baseline=baseline,
    )
    console = make_console()
    lines = run_study(
        study, out, equipment=equipment, evaluate_every=evaluate_every, console=console
    )
    console.print(study_table(lines))
    table = write_csv(lines, out / "comparison.csv")
    pictures = save(study_figure(lines, plan.name, note_of(study)), out / "comparison")
    console.print(f"{table}  {pictures[0]}")
    return lines


_SEED = re.compile("[0-9]{1,18}")


def parse_seeds(text: str) -> list[int]:
    """Return the numbers of 0,1,2 or of 0-2, or of both mixed. Raises UserError."""
    spans: list[range] = []
    for part in filter(None, map(str.strip, text.split(","))):
        first, dash, last = part.partition("-")
        ends = [first.strip(), (last if dash else first).strip()]
        if not all(map(_SEED.fullmatch, ends)) or int(ends[1]) < int(ends[0]):
            raise UserError(f"{text!r} are no seeds", "write, say, --seeds 0,1,2 or --seeds 0-9")
        spans.append(range(int(ends[0]), int(ends[1]) + 1))
    if not spans:
        raise UserError("there are no seeds", "write, say, --seeds 0,1,2 or --seeds 0-9")
    check_count(sum(map(len, spans)))  # before there is a number for each
    return list(itertools.chain(*spans))


def _settings(variations: Sequence[str], equipment: Equipment) -> list[Setting]:
    """Return every combination of the values of all keys; keys with one value are no labels.

    An attack is a label, so that no table hides one.
    """
    attack = {"attack": equipment.threat.label} if equipment.threat else {}
    values = [parse(text) for text in variations]
    keys = [choices[0][0] for choices in values]
    if len(set(keys)) < len(keys):
        raise UserError("a key is set twice", "write its values as --set KEY=V1,V2")
    check_count(math.prod(map(len, values)))  # before there is one object for each
    return [
        Setting(
            labels=attack
            | {
                key: text
                for (key, text, _), choices in zip(chosen, values, strict=True)
                if len(choices) > 1
            },
            changes={key: value for key, _, value in chosen},
        )
        for chosen in itertools.product(*values)
    ]


def parse_single(text: str) -> tuple[str, Any]:
    """Return the key and the value of KEY=VALUE. Raises UserError when there are several values."""
    values = parse(text)
    if len(values) > 1:
        raise UserError(f"{values[0][0]} has several values here", "give one: --set KEY=VALUE")
    return values[0][0], values[0][2]
