"""What the peers are: how fast they compute, how well connected they are, how much data they have,
and which of them lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from peer.learning.learner import Vector
from peer.learning.partition import Poison
from peer.plan import Plan
from peer.randomness import Purpose, generator
from simulations.attacks import Threat, View, attack_names
from simulations.scenarios.lines import Key, MistakeError
from simulations.scenarios.links import MEGABIT
from simulations.scenarios.tables import Distribution, Peers, Population, Spread, Table, select

USUAL = "usual"
"""The class of peers that no other class names."""

Share = Annotated[float, Field(gt=0, le=1)]
Rate = Annotated[float, Field(gt=0)]


class DeviceClass(Table):
    """Devices of one kind: what it does not say is as in [peers]."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$", description="of the class")
    peers: Peers = Field(description="which peers are of the class")
    speed: Spread | None = Field(default=None, description="as in [peers]")
    upload: Rate | None = Field(default=None, description="as in [peers]")
    download: Rate | None = Field(default=None, description="as in [peers]")
    data: Share | None = Field(default=None, description="as in [peers]")
    attack: str | None = Field(default=None, description="as in [peers]")


class Centre(Table):
    """The coordinator of methods that have one; every peer reaches it, whatever the topology."""

    upload: Rate | None = Field(default=None, description="Mbit/s; unlimited if not given")
    download: Rate | None = Field(default=None, description="Mbit/s; unlimited if not given")
    latency: Spread | None = Field(
        default=None, description="seconds one way, to each peer; as in [links] if not given"
    )


class Devices(Table):
    """What all peers are like, and those that are otherwise."""

    speed: Spread = Field(
        default=Distribution("constant", 1000.0),
        description="training samples a second, drawn once for each peer",
    )
    upload: Rate | None = Field(default=None, description="Mbit/s; unlimited if not given")
    download: Rate | None = Field(default=None, description="Mbit/s; unlimited if not given")
    data: Share = Field(default=1.0, description="share of the dealt samples that a peer has")
    attack: str | None = Field(default=None, description="how the peers lie, if they do")
    classes: list[DeviceClass] = Field(default=[], description="classes of devices")


@dataclass(frozen=True)
class Device:
    """One peer's device: samples a second, bytes a second, share of its dealt data, attack."""

    speed: float
    up: float
    down: float
    data: float
    attack: str | None


def population_of(devices: Devices, plan: Plan) -> Population:
    """Return whom selectors choose from. Raises MistakeError."""
    clusters = [plan.cluster_of(i) for i in range(plan.n)]
    names = [USUAL] * plan.n
    for place, own in enumerate(devices.classes):
        key: Key = ("peers", "classes", place)
        if own.name in (USUAL, *(other.name for other in devices.classes[:place])):
            raise MistakeError((*key, "name"), f"there is a class {own.name} already")
        # Classes may name peers by cluster and index, not by one another.
        chosen = select(own.peers, Population(plan.n, clusters, [USUAL] * plan.n), (*key, "peers"))
        for i in chosen:
            if names[i] != USUAL:
                raise MistakeError(
                    (*key, "peers"), f"peer {i} is of class {names[i]} and of class {own.name}"
                )
            names[i] = own.name
    return Population(plan.n, clusters, names)


def make_devices(devices: Devices, classes: Sequence[str], seed: int) -> list[Device]:
    """Return every peer's device. Raises MistakeError for an unknown attack, or no speed."""
    by_name = {own.name: (place, own) for place, own in enumerate(devices.classes)}
    check_attack(devices.attack, ("peers", "attack"))
    for place, own in by_name.values():
        check_attack(own.attack, ("peers", "classes", place, "attack"))
    made = []
    for i, name in enumerate(classes):
        place, kind = by_name.get(name, (0, None))
        key: Key = ("peers", "speed")
        spread, up, down, data, attack = (
            devices.speed, devices.upload, devices.download, devices.data, devices.attack,
        )  # fmt: skip
        if kind is not None:
            if kind.speed is not None:
                spread, key = kind.speed, ("peers", "classes", place, "speed")
            up, down = kind.upload or up, kind.download or down
            data, attack = kind.data or data, kind.attack or attack
        speed = spread.draw(generator(seed, Purpose.DEVICES, index=i))
        if speed <= 0:
            raise MistakeError(key, "a peer that trains 0 samples a second never ends")
        made.append(Device(speed, rate(up), rate(down), data, attack))
    return made


def check_attack(name: str | None, key: Key) -> None:
    """Raise MistakeError unless a peer by itself can attack so, or no attack is named."""
    if name is None:
        return
    usable = [own for own in attack_names() if Threat(own).means.knows is None]
    if name not in attack_names():
        raise MistakeError(key, f"there is no attack {name!r}", f"there are {', '.join(usable)}")
    if name not in usable:
        raise MistakeError(
            key,
            f"{name} needs {Threat(name).means.knows}, which a peer of a scenario does not know",
            "simulate compare PLAN --attack runs it in the laboratory",
        )


def poison_of(attack: str | None, plan: Plan, i: int) -> Poison | None:
    """Return what an attack does to the training data of peer i, if anything."""
    means = None if attack is None else Threat(attack).means
    if means is None or not means.poisons:
        return None
    return lambda x, y, classes: means.poison(
        x, y, classes, generator(plan.seed, Purpose.ATTACK, index=i)
    )


def forged(
    attack: str | None, plan: Plan, i: int, t: int, *, before: Vector, trained: Vector
) -> Vector:
    """Return what peer i gives out in round t instead of the model [e] that it trained from
    `before` [e]. Of the others it knows nothing."""
    if attack is None:
        return trained
    n = plan.n
    clusters = [plan.cluster_of(j) for j in range(n)]
    view = View(t, [before] * n, [trained] * n, clusters, attackers=[i], present=[i])
    rng = generator(plan.seed, Purpose.ATTACK, index=i, t=t)
    with np.errstate(all="ignore"):  # what diverged is refused on arrival
        return Threat(attack).means.forge(i, view, rng)


def rate(megabits: float | None) -> float:
    """Return bytes a second; infinity where there is no limit."""
    return math.inf if megabits is None else megabits * MEGABIT
