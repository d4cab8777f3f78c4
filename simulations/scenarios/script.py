"""What happens in the course of a scenario: timed events, each a small table of its own.

An event has either `round` or `second`. What befalls single peers in a round (kill, leave, slow,
drift, attack) befalls each as it begins that round; what concerns the network or those who are away
(partition, heal, degrade, join, restart) comes as soon as any peer begins it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from peer.plan import Plan
from simulations.scenarios.devices import check_attack
from simulations.scenarios.lines import Key, MistakeError
from simulations.scenarios.tables import Peers, Population, Selector, Table, select

COORDINATOR = "coordinator"
"""What the groups of a partition call it."""


class Happening(Table):
    """What all events have in common."""

    individual: ClassVar[bool] = False
    """Whether each peer meets the event as it begins the round."""

    round: int | None = Field(default=None, ge=1, description="round at whose beginning it happens")
    second: float | None = Field(default=None, ge=0, description="second at which it happens")

    @model_validator(mode="after")
    def _timed(self) -> Self:
        if (self.round is None) == (self.second is None):
            raise ValueError("say when: either round = R or second = S")
        return self

    def check(self, plan: Plan, people: Population, key: Key) -> None:
        """Raise MistakeError when there are no such peers or rounds."""
        if self.round is not None and self.round > plan.rounds:
            raise MistakeError(
                (*key, "round"), f"there are {plan.rounds} rounds, none is {self.round}"
            )
        if peers := getattr(self, "peers", None):
            select(peers, people, (*key, "peers"))


class Partition(Happening):
    """The network falls apart: groups no longer reach one another."""

    do: Literal["partition"]
    groups: list[list[Selector]] = Field(
        min_length=1,
        description="peers on each side, and the coordinator; those not named are one more side",
    )

    def sides(self, people: Population, key: Key) -> list[int]:
        """Return the side [n + 1] of every peer and, last, of the coordinator: 0 where no group
        names it. [choice] A coordinator that no group names is with the peers that none names or,
        where all are named, with the first group. Raises MistakeError."""
        key = (*key, "groups")
        sides = [0] * (people.n + 1)
        for number, group in enumerate(self.groups, start=1):
            chosen = select([own for own in group if own != COORDINATOR], people, key)
            for i in (*chosen, people.n) if COORDINATOR in group else chosen:
                if sides[i]:
                    who = f"peer {i}" if i < people.n else "the coordinator"
                    raise MistakeError(key, f"{who} is on two sides")
                sides[i] = number
        if not sides[people.n] and all(sides[: people.n]):
            sides[people.n] = 1
        return sides

    def check(self, plan: Plan, people: Population, key: Key) -> None:
        """Raise MistakeError as well when nobody is parted from anybody."""
        super().check(plan, people, key)
        if len(set(self.sides(people, key))) < 2:
            raise MistakeError((*key, "groups"), "all peers are on one side: this parts nobody")


class Heal(Happening):
    """The network is whole again."""

    do: Literal["heal"]


class _OfPeers(Happening):
    peers: Peers = Field(description="whom it befalls")


class Kill(_OfPeers):
    """Peers vanish without a word; the others find out."""

    individual: ClassVar[bool] = True
    do: Literal["kill"]


class Restart(_OfPeers):
    """Peers that were killed or have left come back, and go on after their last finished round."""

    do: Literal["restart"]


class Join(_OfPeers):
    """Peers that were not there before come for the first time."""

    do: Literal["join"]


class Leave(_OfPeers):
    """Peers take their leave: the others know at once."""

    individual: ClassVar[bool] = True
    do: Literal["leave"]


class Slow(_OfPeers):
    """Training takes `factor` times as long as the file says; 1 restores it."""

    individual: ClassVar[bool] = True
    do: Literal["slow"]
    factor: float = Field(gt=0, le=1e6, description="of the training time")


class Degrade(_OfPeers):
    """All links of the peers get worse, in proportion to what the file says; 1 restores them."""

    do: Literal["degrade"]
    latency: float = Field(default=1.0, ge=0, le=1e6, description="factor of the latency")
    bandwidth: float = Field(default=1.0, gt=0, le=1e6, description="factor of the bandwidth")
    loss: float | None = Field(
        default=None, ge=0, le=0.5, description="share of packets lost from now on"
    )


class Drift(_OfPeers):
    """The peers' data, training and test, become those of another cluster."""

    individual: ClassVar[bool] = True
    do: Literal["drift"]
    cluster: int = Field(ge=0, description="the cluster whose data they now have")

    def check(self, plan: Plan, people: Population, key: Key) -> None:
        """Raise MistakeError as well when there is no such cluster to drift to."""
        super().check(plan, people, key)
        if plan.partition.kind in ("none", "natural"):
            raise MistakeError(
                (*key, "do"),
                f"data cannot drift in a partition of kind {plan.partition.kind}",
                "the clusters must differ by a transform: rotation, label-swap",
            )
        if self.cluster >= plan.partition.clusters:
            raise MistakeError(
                (*key, "cluster"),
                f"there is no cluster {self.cluster}: the last is {plan.partition.clusters - 1}",
            )


class BecomeMalicious(_OfPeers):
    """The peers begin to lie."""

    individual: ClassVar[bool] = True
    do: Literal["attack"]
    attack: str = Field(description="how they lie")

    def check(self, plan: Plan, people: Population, key: Key) -> None:
        """Raise MistakeError as well when there is no such attack."""
        super().check(plan, people, key)
        check_attack(self.attack, (*key, "attack"))


Event = Annotated[
    Partition | Heal | Kill | Restart | Join | Leave | Slow | Degrade | Drift | BecomeMalicious,
    Field(discriminator="do"),
]

EVENTS: tuple[type[Happening], ...] = (
    Partition, Heal, Kill, Restart, Join, Leave, Slow, Degrade, Drift, BecomeMalicious,
)  # fmt: skip
