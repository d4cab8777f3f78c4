"""docs/scenarios.md names every key of a scenario, and its example is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from simulations.attacks import Threat, attack_names
from simulations.scenarios.devices import Centre, DeviceClass, Devices
from simulations.scenarios.links import Between, Links
from simulations.scenarios.scenario import Scenario, load, shipped
from simulations.scenarios.script import EVENTS
from simulations.scenarios.topology import KINDS, Shape

PAGE = (Path(__file__).parents[3] / "docs" / "scenarios.md").read_text(encoding="utf-8")


def table(start: str, end: str) -> dict[str, set[str]]:
    """Return what the first column of the tables between two headings names, and the second."""
    part = PAGE[PAGE.index(start) : PAGE.index(end)]
    named = {}
    for line in part.splitlines():
        if line.startswith("| `"):
            _, first, second, *_ = line.split("|")
            for name in re.findall(r"`([a-z0-9_-]+)`", first):
                named[name] = set(re.findall(r"`([a-z0-9_-]+)`", second))
    return named


@pytest.mark.parametrize(
    ("start", "end", "model", "but"),
    [
        ("## The file", "## `[topology]`", Scenario, set()),
        ("## `[links]`", "`[[links.between]]` says", Links, set()),
        ("`[[links.between]]` says", "## `[peers]`", Between, set(Links.model_fields)),
        ("## `[peers]`", "`[[peers.classes]]` has", Devices, set()),
        ("`[[peers.classes]]` has", "## `[coord", DeviceClass, set(Devices.model_fields)),
        ("## `[coordinator]`", "## `[[script]]`", Centre, set()),
        ("Beside these, every kind takes", "## `[links]`", Shape, {"kind"}),
    ],
)
def test_every_key(start: str, end: str, model: type[BaseModel], but: set[str]) -> None:
    assert table(start, end).keys() - but == set(model.model_fields) - but


def test_every_topology() -> None:
    named = table("## `[topology]`", "Beside these")
    common = {*Shape.model_fields, "kind"}
    assert named == {
        kind.model_fields["kind"].annotation.__args__[0]: set(kind.model_fields) - common  # type: ignore[union-attr]
        for kind in KINDS
    }


def test_every_event() -> None:
    named = table("## `[[script]]`", "## What the virtual")
    named.pop("do", None)
    assert named == {
        event.model_fields["do"].annotation.__args__[0]: set(event.model_fields)  # type: ignore[union-attr]
        - {"do", "round", "second"}
        for event in EVENTS
    }


def test_every_attack_that_peers_can_make() -> None:
    row = next(line for line in PAGE.splitlines() if line.startswith("| `attack` | |"))
    usable = {name for name in attack_names() if Threat(name).means.knows is None}
    assert set(re.findall(r"`([a-z-]+)`", row)) - {"attack"} == usable


def test_the_example(tmp_path: Path) -> None:
    text = PAGE[PAGE.index("```toml\n# mine.toml") + len("```toml\n") :]
    path = tmp_path / "mine.toml"
    path.write_text(text[: text.index("```")])
    scenario = load(path)
    assert scenario.people.classes.count("phone") == 3
    assert len(scenario.script) == 2


def test_every_shipped_scenario() -> None:
    assert set(table("## What the shipped", "has none to change")) == {
        own.name for own in shipped()
    }
