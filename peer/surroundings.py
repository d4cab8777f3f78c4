"""What an experiment puts around a peer: a topology, a network, a lie. One in the open has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from peer.learning.learner import Vector
from peer.network.shaping import Shaper

Forge = Callable[[int, Vector, Vector], Vector]
"""Round t, w^{t-1} [e], w^{t-1/2} [e] -> what the peer gives out as its model [e]."""


@dataclass(frozen=True)
class Surroundings:
    """What is around one peer.

    `reach`: the indices of those that its network lets it reach; it hears of no others. `quorum`:
    how many must be there before round 1, itself included. `shaper`: what its messages meet.
    `forge`: what it gives out instead of the models that it trained.
    """

    reach: frozenset[int]
    quorum: int
    shaper: Shaper | None = None
    forge: Forge | None = None
