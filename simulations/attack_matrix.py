"""`simulate attacks`: attacks x methods x defences of a plan, and where the bar is missed.

The bar: under an attack the honest peers' mean accuracy stays within 2 points of what it is
without, and none ends more than 2 points below its own run of `local`; and when nobody attacks, a
defence costs 1 point at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich import box
from rich.table import Table

from peer.display import percent
from peer.errors import UserError
from peer.matching.registry import CENTRAL
from peer.plan import UNDEFENDED, DefencePlan, Plan, describe
from simulations.attacks import Threat
from simulations.compare import make_console
from simulations.runs import Equipment
from simulations.study import Line, Setting, Study, Variant, check_methods, run_study, toml_value
from simulations.tables import write_csv

NOBODY = "none"
"""The attack of the runs without one, and the defence of plans without one."""
UNDER_ATTACK = 0.02
UNATTACKED = 0.01
"""Mean accuracy that an attack, and a defence against nobody, may cost."""


DEFAULT: Mapping[str, Any] = {"rule": "median"}
"""The defence that a matrix puts beside none, unless told otherwise: docs/attacks.md says why."""


def parse_defences(texts: Sequence[str] | None) -> dict[str, DefencePlan]:
    """Return the defences of texts such as gate=true,clip=2 by their text, after none at all.

    Without texts, the default one. Raises UserError.
    """
    tables: dict[str, Mapping[str, Any]] = {"default": DEFAULT}
    if texts is not None:
        tables = {text: _table(text) for text in texts}
    found = {NOBODY: UNDEFENDED}
    for name, table in tables.items():
        try:
            found[name] = DefencePlan.model_validate(table)
        except ValidationError as error:
            known = ", ".join(DefencePlan.model_fields)
            raise UserError(f"--defence {name}: {describe(error)}", f"its keys: {known}") from None
    return found


def _table(text: str) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (own.strip() for own in part.partition("="))
        if not (key and equals and value):
            raise UserError(f"cannot read --defence {text}", "write --defence gate=true,clip=2")
        if key in table:
            raise UserError(f"--defence {text}: {key} has two values")
        table[key] = toml_value(value)
    return table


@dataclass(frozen=True)
class Matrix:
    """What is run: every method under every threat, with every defence, by its name in tables.

    A coordinator has no samples to judge by, so central methods are not run with a gate. Without
    `undefended`, a plan that has no defence is run only where nobody attacks: what a defence costs
    is judged beside it.
    """

    plan: Plan
    threats: Sequence[Threat]
    methods: Sequence[str]
    defences: Mapping[str, DefencePlan]
    seeds: Sequence[int]
    undefended: bool = True

    def studies(self) -> list[tuple[Threat | None, Study]]:
        """Return the studies whose lines make the matrix, those without attack first."""
        return [
            (threat, self._study(threat, name, defence))
            for threat in (None, *self.threats)
            for name, defence in self.defences.items()
            if self.undefended or threat is None or name != NOBODY
        ]

    def _study(self, threat: Threat | None, name: str, defence: DefencePlan) -> Study:
        methods = [m for m in self.methods if m not in CENTRAL or not defence.gate]
        attack = NOBODY if threat is None else threat.label
        return Study(
            base=self.plan.model_copy(update={"defence": defence}),
            settings=[Setting({"attack": attack, "defence": name})],
            variants=[Variant(method, method) for method in methods],
            seeds=self.seeds,
        )


def run_matrix(
    matrix: Matrix, out: Path, *, equipment: Equipment, evaluate_every: int | None = None
) -> list[Line]:
    """Run what is not finished, print a table a defence, and write all figures as CSV.

    Peers are evaluated in the rounds that `run_study` says. Raises UserError before anything runs
    when a method or a threat cannot be used.
    """
    check_methods(matrix.methods)
    studies = matrix.studies()
    for threat, study in studies:
        armed = replace(equipment, threat=threat)
        for cell in study.cells:
            armed.check(cell.plan)
    console = make_console()
    lines: list[Line] = []
    for threat, study in studies:
        armed = replace(equipment, threat=threat)
        lines += run_study(
            study, out, equipment=armed, evaluate_every=evaluate_every, console=console
        )
    for name in matrix.defences:
        console.print(matrix_table(lines, name))
    console.print(f"{write_csv(lines, out / 'attacks.csv')}")
    return lines


def matrix_table(lines: Sequence[Line], defence: str) -> Table:
    """Return one defence's table: attacks by methods, each with the mean and the worst accuracy.

    In brackets, how many peers are far below their own `local`; a * where the bar is missed. Below
    an attack with a backdoor, its success.
    """
    found = {(own.labels["attack"], own.labels["defence"], own.variant): own for own in lines}
    methods = dict.fromkeys(method for _, name, method in found if name == defence)
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"defence: {defence}   accuracy of honest peers: mean / worst (far below local)",
        title_justify="left",
    )
    table.add_column("attack", no_wrap=True)
    for method in methods:
        table.add_column(method, justify="right", no_wrap=True)
    for attack in dict.fromkeys(attack for attack, name, _ in found if name == defence):
        lines_of = [found[attack, defence, method] for method in methods]
        cells = []
        for method, own in zip(methods, lines_of, strict=True):
            reference = found[NOBODY, NOBODY if attack == NOBODY else defence, method]
            cells.append(_cell(own) + ("*" if misses(own, reference) else ""))
        table.add_row(attack, *cells)
        if any(own.backdoor is not None for own in lines_of):
            table.add_row("  its success", *(percent(own.backdoor) for own in lines_of))
    return table


def misses(line: Line, reference: Line) -> bool:
    """Tell whether a line misses the bar, beside the same method's without what it is judged for.

    That is the attack, or for a line without attack the defence.
    """
    if line.accuracy_mean is None or reference.accuracy_mean is None:
        return True
    allowed = UNATTACKED if line.labels["attack"] == NOBODY else UNDER_ATTACK
    if line.accuracy_mean < reference.accuracy_mean - allowed:
        return True
    return line.labels["attack"] != NOBODY and bool(line.far_below_local)


def _cell(line: Line) -> str:
    mean, worst = (
        percent(value).removesuffix(" %") for value in (line.accuracy_mean, line.accuracy_worst)
    )
    return f"{mean} / {worst} ({line.far_below_local})"
