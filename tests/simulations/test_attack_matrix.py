"""The matrix of attacks: what is run, what is marked, and that it goes on where it was."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from peer.errors import UserError
from peer.plan import UNDEFENDED, DefencePlan, Plan
from simulations import study as studies
from simulations.attack_matrix import Matrix, matrix_table, misses, parse_defences, run_matrix
from simulations.attacks import Threat
from simulations.cli import app
from simulations.compare import compare
from simulations.runs import Equipment, run_population
from simulations.study import Line

PLAN = Plan.model_validate(
    {
        "n": 4,
        "rounds": 1,
        "matching": {"l": 2, "k": 1},
        "partition": {"kind": "rotation", "clusters": 2, "train_per_peer": 20, "test_per_peer": 50},
    }
)
REFERENCE = Equipment(reference=True)


def line(attack: str, defence: str, mean: float, **changes: Any) -> Line:
    values: dict[str, Any] = {
        "labels": {"attack": attack, "defence": defence}, "variant": "random", "seeds": 1,
        "accuracy_mean": mean, "accuracy_sd": None, "accuracy_worst": 0.25, "below_local": 3.0,
        "precision": None, "recall": None, "clusters_found": None, "bytes_moved": 0.0,
        "seconds": 1.0, "runs": (), "far_below_local": 0,
    }  # fmt: skip
    return Line(**(values | changes))


def test_the_bar() -> None:
    quiet = line("none", "none", 0.80)
    assert not misses(line("ipm-0.2", "none", 0.7801), quiet)
    assert misses(line("ipm-0.2", "none", 0.7799), quiet)
    assert misses(line("ipm-0.2", "none", 0.80, far_below_local=1), quiet)
    # Nobody attacks: a defence may cost a point, and is not blamed for what the method does.
    assert not misses(line("none", "gate", 0.7901, far_below_local=2), quiet)
    assert misses(line("none", "gate", 0.7899), quiet)


def test_tables_say_where_the_bar_is_missed() -> None:
    lines = [
        line("none", "none", 0.80),
        line("backdoor-0.2", "none", 0.80, backdoor=0.634),
        line("none", "gate", 0.795),
        line("backdoor-0.2", "gate", 0.77, far_below_local=2, backdoor=0.1),
    ]
    console = Console(width=100, record=True, file=io.StringIO())
    for name in ("none", "gate"):
        console.print(matrix_table(lines, name))
    text = console.export_text()
    successes = [row.split()[-2:] for row in text.splitlines() if "its success" in row]
    assert successes == [["63.4", "%"], ["10.0", "%"]]
    assert "79.5 / 25.0 (0) " in text
    assert "77.0 / 25.0 (2)*" in text
    assert text.count("*") == 1


def test_defences_are_read_from_text() -> None:
    assert parse_defences(None) == {
        "none": DefencePlan(), "default": DefencePlan(rule="median"),
    }  # fmt: skip
    found = parse_defences(["rule=median", "gate=true, clip=2"])
    assert found["rule=median"].rule == "median"
    assert found["gate=true, clip=2"] == DefencePlan(gate=True, clip=2.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gate", "cannot read --defence gate"),
        ("clip=", "cannot read --defence clip="),
        ("=3", "cannot read --defence =3"),
        ("clip=1,rule=median,clip=2", "clip has two values"),
        ("rule=best", "--defence rule=best: rule: "),
        ("clip=-1", "--defence clip=-1: clip: "),
        ("wall=3,clip=x", "--defence wall=3,clip=x: clip: .*; unknown key wall$"),
    ],
)
def test_defences_that_are_none(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_defences([text])
    assert "\n" not in str(caught.value)


def test_a_matrix_is_run_once_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, str]] = []

    def run(plan: Plan, out: Path, **options: Any) -> dict[str, Any]:
        made.append((plan.method, out.name))
        return run_population(plan, out, **options)

    monkeypatch.setattr(studies, "run_population", run)
    matrix = Matrix(
        PLAN,
        [Threat("backdoor", 0.25)],
        ["random", "fedavg"],
        {"none": UNDEFENDED, "gate": DefencePlan(gate=True), "clip": DefencePlan(clip=2.0)},
        [0],
    )
    lines = run_matrix(matrix, tmp_path, equipment=REFERENCE)
    # random in 2 x 3 kinds, fedavg with all but a gate, and one local for all.
    assert sorted(method for method, _ in made) == ["fedavg"] * 4 + ["local"] + ["random"] * 6
    assert sum("backdoor-0.25" in name for _, name in made) == 5
    assert [(*own.labels.values(), own.variant) for own in lines] == [
        (attack, defence, method)
        for attack in ("none", "backdoor-0.25")
        for defence in ("none", "gate", "clip")
        for method in ("random", "fedavg")
        if (defence, method) != ("gate", "fedavg")
    ]
    assert all((own.backdoor is not None) == ("backdoor" in own.labels["attack"]) for own in lines)
    with (tmp_path / "attacks.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["attack"] for row in rows] == ["none"] * 5 + ["backdoor-0.25"] * 5
    assert {"accuracy_mean", "accuracy_worst", "far_below_local", "backdoor", "chosen"} <= set(
        rows[0]
    )
    made.clear()
    assert run_matrix(matrix, tmp_path, equipment=REFERENCE) == lines
    assert not made


def test_attacked_without_a_defence_is_left_out_if_one_says_so(tmp_path: Path) -> None:
    matrix = Matrix(
        PLAN.model_copy(update={"rounds": 3}),
        [Threat("gaussian", 0.25)],
        ["random"],
        {"none": UNDEFENDED, "clip": DefencePlan(clip=2.0)},
        [0],
        undefended=False,
    )
    lines = run_matrix(matrix, tmp_path, equipment=REFERENCE, evaluate_every=2)
    assert [tuple(own.labels.values()) for own in lines] == [
        ("none", "none"), ("none", "clip"), ("gaussian-0.25", "clip"),
    ]  # fmt: skip
    assert matrix_table(lines, "none").row_count == 1
    assert matrix_table(lines, "clip").row_count == 2
    (run, *_) = (tmp_path / "cells").glob("random-*")
    rows = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    assert {row["t"] for row in rows if row["accuracy"] is not None} == {2, 3}


def test_a_comparison_under_attack_says_so(tmp_path: Path) -> None:
    armed = Equipment(reference=True, threat=Threat("gaussian", 0.25))
    (own,) = compare(PLAN, ["random"], [0], [], tmp_path, equipment=armed)
    assert own.labels == {"attack": "gaussian-0.25"}
    assert own.chosen is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attacks", "PLAN", "--attacks", "evil"], "there is no attack evil"),
        (["attacks", "PLAN", "--methods", "magic"], "there is no method magic"),
        (["attacks", "PLAN", "--attackers", "0.01"], "is nobody"),
        (["attacks", "PLAN", "--defence", "gate=5"], "gate"),
        (
            ["attacks", "PLAN", "--defence", "rule=krum"],
            "krum against byzantine = 1 needs 5",
        ),
        (["compare", "PLAN", "--attack", "ipm", "--attackers", "2"], "not between 0 and 1"),
        (["compare", "PLAN", "--methods", "cfl", "--set", "defence.gate=true"], "no samples"),
        (["run", "PLAN", "--backend", "processes", "--attack", "ipm"], "for the laboratory"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.to_toml(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        app([str(plan) if part == "PLAN" else part for part in arguments], standalone_mode=False)
    assert not (tmp_path / "runs").exists()
