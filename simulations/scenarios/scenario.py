"""The scenario: what is learned, over which network, by which devices, and what happens when.

Reading one checks all of it, each mistake with its line and key, before anything runs. The same
file is meant for every backend; nothing in it is about how it is run.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import networkx as nx
import tomli_w
from pydantic import Field, ValidationError

from peer.errors import UserError
from peer.plan import Name, Plan
from simulations.scenarios.devices import Centre, Device, Devices, make_devices, population_of, rate
from simulations.scenarios.lines import Key, MistakeError, line_of, name_of
from simulations.scenarios.links import Conditions, Links, pair
from simulations.scenarios.script import (
    BecomeMalicious,
    Drift,
    Event,
    Happening,
    Join,
    Kill,
    Leave,
    Restart,
)
from simulations.scenarios.tables import Population, Table, select
from simulations.scenarios.topology import Complete, Topology, build_graph

TABLES = ("plan", "topology", "links", "peers", "coordinator", "script")
"""What tells a scenario from a plan: a plan has none of these keys."""

MAX_BYTES = 2**20
"""Bytes of a scenario file at most."""


class Scenario(Table):
    """A checked scenario: `graph`, `people` and `equipment` are what its tables come to."""

    name: Name = Field(default="scenario", description="of the scenario, and of its run directory")
    claim: str = Field(default="", max_length=400, description="what it shows, in one line")
    plan: Plan = Field(description="what is learned: a plan's tables, or the path of its file")
    topology: Topology = Field(default=Complete(), description="who reaches whom")
    links: Links = Field(default=Links(), description="what the links are like")
    peers: Devices = Field(default=Devices(), description="what the peers are like")
    coordinator: Centre = Field(default=Centre(), description="what it is like, if there is one")
    script: list[Event] = Field(default=[], description="what happens when")

    @cached_property
    def people(self) -> Population:
        """Whom selectors choose from."""
        return population_of(self.peers, self.plan)

    @cached_property
    def graph(self) -> nx.Graph[int]:
        """Who reaches whom."""
        return build_graph(self.topology, self.plan.n, self.plan.seed)

    @cached_property
    def equipment(self) -> list[Device]:
        """Every peer's device."""
        return make_devices(self.peers, self.people.classes, self.plan.seed)

    @cached_property
    def edges(self) -> frozenset[tuple[int, int]]:
        """The links, lower end first."""
        return frozenset(pair(i, j) for i, j in self.graph.edges)

    @cached_property
    def absent(self) -> frozenset[int]:
        """Those that are not there at the beginning: they join later."""
        return frozenset(
            i
            for event in self.script
            if isinstance(event, Join)
            for i in select(event.peers, self.people, ())
        )

    @cached_property
    def states(self) -> list[tuple[int, int, str | None]]:
        """(peer, cluster, attack) of all that the script may make of a peer, beside what it is."""
        clusters = [{c} for c in self.people.clusters]
        attacks: list[set[str | None]] = [{own.attack} for own in self.equipment]
        for event in self.script:
            if isinstance(event, Drift | BecomeMalicious):
                for i in select(event.peers, self.people, ()):
                    if isinstance(event, Drift):
                        clusters[i].add(event.cluster)
                    else:
                        attacks[i].add(event.attack)
        return [
            (i, c, attack)
            for i in range(self.plan.n)
            if len(clusters[i]) + len(attacks[i]) > 2
            for c in sorted(clusters[i])
            for attack in sorted(attacks[i], key=str)
        ]

    def conditions(self) -> Conditions:
        """Return what every link is like at the beginning."""
        devices, centre = self.equipment, self.coordinator
        up = [*(own.up for own in devices), rate(centre.upload)]
        down = [*(own.down for own in devices), rate(centre.download)]
        seed = self.plan.seed
        return Conditions(self.links, self.people, up, down, seed, centre=centre.latency)

    def check(self) -> None:
        """Raise MistakeError when the tables contradict each other or name what there is not."""
        self.links.check(self.people, self.edges)
        assert self.equipment
        for place, event in enumerate(self.script):
            event.check(self.plan, self.people, ("script", place))
        self._check_presence()

    def _check_presence(self) -> None:
        """Who joins was not there before, who restarts had gone."""
        gone: set[int] = set(self.absent)
        joined: set[int] = set()
        for place, event in sorted(enumerate(self.script), key=lambda item: _order(item[1])):
            key: Key = ("script", place, "peers")
            if isinstance(event, Join):
                again = joined.intersection(chosen := select(event.peers, self.people, key))
                if again:
                    raise MistakeError(
                        key, f"peer {min(again)} joins twice", 'it comes back by "restart"'
                    )
                joined.update(chosen)
                gone.difference_update(chosen)
            elif isinstance(event, Kill | Leave):
                gone.update(select(event.peers, self.people, key))
            elif isinstance(event, Restart):
                chosen = select(event.peers, self.people, key)
                if here := set(chosen) - gone:
                    raise MistakeError(key, f"peer {min(here)} was neither killed nor has it left")
                gone.difference_update(chosen)
        if len(self.absent) > self.plan.n - 2:
            raise MistakeError(("script",), "fewer than 2 peers are there at the beginning")

    @property
    def digest(self) -> str:
        """12 hex digits; equal iff two scenarios ask for the same run."""
        table = self.model_dump(mode="json", exclude={"name", "claim"})
        canonical = json.dumps(table, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    def to_toml(self) -> str:
        """Return the scenario as TOML that `parse` reads back, its plan in it."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    def changed(self, changes: Mapping[str, Any]) -> Scenario:
        """Return the scenario with other values of dotted keys (plan.method, links.latency).

        A key whose value is None stays as it is. Raises UserError when the result is none.
        """
        table = self.model_dump(mode="json", exclude_none=True)
        for key, value in changes.items():
            if value is not None:
                _put(table, key, value)
        return _checked(table, "the changed scenario", "")


@dataclass(frozen=True)
class Shipped:
    """A scenario that comes with panmesh."""

    name: str
    path: Path
    claim: str


def is_scenario(path: Path) -> bool:
    """Tell whether a file holds a scenario rather than a plan; False for what cannot be parsed."""
    try:
        table = tomllib.loads(_text(path))
    except (tomllib.TOMLDecodeError, UserError):
        return False
    return any(key in table for key in TABLES)


def find(name: str | Path) -> Path:
    """Return the file of a scenario: a path as it is, or the file of a shipped one by its name."""
    path = Path(name)
    if path.exists():
        return path
    return next((own.path for own in shipped() if own.name == str(name)), path)


def shipped() -> list[Shipped]:
    """Return the scenarios that come with panmesh, by name."""
    folder = Path(str(files("simulations.scenarios")))
    found = []
    for path in sorted(folder.glob("*.toml")):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        found.append(Shipped(path.stem, path, str(table.get("claim", ""))))
    return found


def load(path: Path) -> Scenario:
    """Read and check a scenario file. Raises UserError that names line and key."""
    text = _text(path)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
    table = _with_files(table, path, text)
    return _checked(table, str(path), text)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(f"{path} is too long to be a scenario: over {MAX_BYTES} bytes")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read the scenario {path}: {error}",
            "give a file, or the name of one that ships (simulate list)",
        ) from None


def _with_files(table: dict[str, Any], path: Path, text: str) -> dict[str, Any]:
    """Return the table with the plan that it names by file, and paths from the file's folder on."""
    plan = table.get("plan")
    if isinstance(plan, str):
        try:
            table["plan"] = Plan.load(path.parent / plan)
        except UserError as error:
            line = line_of(text, ("plan",))
            raise UserError(f"{path}, line {line}: plan: {error.message}", error.hint) from None
    topology = table.get("topology")
    if isinstance(topology, dict) and isinstance(topology.get("file"), str):
        topology["file"] = str(path.parent.absolute() / topology["file"])
    return table


def _checked(table: dict[str, Any], source: str, text: str) -> Scenario:
    try:
        scenario = Scenario.model_validate(table)
        scenario.check()
    except ValidationError as error:
        _refuse(error, table, source, text)
    except MistakeError as mistake:
        if not text:
            raise UserError(f"{name_of(mistake.key)}: {mistake.message}", mistake.hint) from None
        raise mistake.located(source, text) from None
    return scenario


def _refuse(error: ValidationError, table: Mapping[str, Any], source: str, text: str) -> NoReturn:
    """Raise the UserError of the first thing that pydantic found wrong."""
    item = error.errors(include_url=False)[0]
    key = _plain_key(item["loc"], table)
    if item["type"] == "missing":
        key = (*key, item["loc"][-1])
    message = item["msg"].removeprefix("Value error, ")
    match item["type"]:
        case "extra_forbidden":
            message = "there is no such key"
        case "missing":
            message = "is missing"
        case "union_tag_not_found":
            message = f"say which: {item['ctx']['discriminator']} is missing"
        case "union_tag_invalid":
            key = (*key, str(item["ctx"]["discriminator"]).strip("'"))
            tags = str(item["ctx"]["expected_tags"]).replace("'", "")
            message = f"there is no {item['ctx']['tag']!r}; there are {tags}"
    mistake = MistakeError(key, message)
    if not text:
        raise UserError(f"{name_of(key)}: {message}", "docs/scenarios.md lists every key")
    raise mistake.located(source, text)


def _plain_key(loc: tuple[int | str, ...], table: Mapping[str, Any]) -> Key:
    """Return where an error is without what pydantic adds: the names of a union's members."""
    key: list[int | str] = []
    place: Any = table
    for part in loc:
        inside = isinstance(place, dict) and part in place
        inside |= isinstance(place, list) and isinstance(part, int) and part < len(place)
        if inside:
            place = place[part]
            key.append(part)
    return tuple(key)


def _order(event: Happening) -> tuple[float, float]:
    """[choice] Rounds and seconds cannot be compared before a run: rounds are taken to come in
    their own order, seconds in theirs, and rounds first."""
    return (0.0, float(event.round)) if event.round is not None else (1.0, event.second or 0.0)


def _put(table: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    part: Any = table
    for name in path:
        if isinstance(part, list):
            part = _member(part, name, key)
        elif isinstance(part, dict):
            part = part.setdefault(name, {})
        else:
            raise UserError(f"{key}: {name} is in no table of the scenario")
    if isinstance(part, list):
        _member(part, last, key)
        part[int(last) - 1] = value
    elif isinstance(part, dict):
        part[last] = value
    else:
        raise UserError(f"{key}: {last} is in no table of the scenario")


def _member(part: list[Any], name: str, key: str) -> Any:
    if not name.isdecimal() or not 1 <= int(name) <= len(part):
        raise UserError(f"{key}: there is no number {name} of {len(part)}", "the first is 1")
    return part[int(name) - 1]
