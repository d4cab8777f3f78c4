"""What a scenario's director and its peers' processes tell each other: JSON, an object a line.

A peer says which round it begins; the director then says `Go`, or ends it. What the network is
like, all of it, comes to every peer whenever it changes.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Cue(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Begin(_Cue):
    """A peer is about to train for round t. Its training before took this machine so many
    `seconds` for `samples`, all epochs together; none before the first."""

    t: int
    samples: int = 0
    seconds: float = 0.0


class Go(_Cue):
    """A peer may train: whose data it has, how it lies, and how much slower it is than the scenario
    says."""

    cluster: int
    attack: str | None
    slowness: float


class Degraded(_Cue):
    """Links of some peers that have got worse; factors as `Conditions.degrade` takes them."""

    peers: tuple[int, ...]
    latency: float
    bandwidth: float
    loss: float | None


class Network(_Cue):
    """What has become of the network: the side [n] of every peer, and what was degraded, in
    order."""

    sides: tuple[int, ...]
    degraded: tuple[Degraded, ...] = ()


class Word(_Cue):
    """One line of the director: either or both."""

    go: Go | None = None
    network: Network | None = None
