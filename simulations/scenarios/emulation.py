"""The links of a scenario between real processes, in user space: who sends lets time pass.

A message leaves once those before it have left, and is handed to the real network when its first
byte would arrive; its receiver takes it when the last byte has passed both ends. These are the
rules, and the queues, of the virtual network (`simulations.scenarios.wire`). What the real network
does beside, loopback or namespaces, comes on top.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import StrEnum

from peer.randomness import Purpose, generator
from simulations.scenarios.links import Conditions
from simulations.scenarios.wire import Lane, delay


class Aspect(StrEnum):
    """What of a network is emulated; the rest is left to whatever the processes talk over."""

    LATENCY = "latency"
    BANDWIDTH = "bandwidth"
    PARTITION = "partition"


class EmulatedLinks:
    """All links of peer `own`, as its transport meets them: a `peer.network.shaping.Shaper`.

    `conditions` may change at any time, and so may `sides` [n], which must be equal for two peers
    to reach each other. [choice] The bootstrap node, and whoever is not known yet, is next to peer
    0: on its side, without a delay.
    """

    def __init__(self, own: int, conditions: Conditions, aspects: frozenset[Aspect]) -> None:
        self.sides: Sequence[int] = ()
        self._own = own
        self._conditions = conditions
        self._aspects = aspects
        self._up, self._down = Lane(), Lane()
        self._rng = generator(conditions.seed, Purpose.LINKS, index=own, t=1)
        self._index_of: Callable[[str], int | None] = lambda _: None

    def introduce(self, index_of: Callable[[str], int | None]) -> None:
        """Say how the index of the other end is found."""
        self._index_of = index_of

    async def leave(self, to: str, payload: int) -> bool:
        """Wait until the first byte of a message is at the other end, if it arrives there."""
        j = self._index_of(to)
        if not self._reaches(j):
            return False
        if j is None:
            return True
        link = self._conditions.link(self._own, j)
        now = asyncio.get_running_loop().time()
        start = now
        if payload and Aspect.BANDWIDTH in self._aspects:
            start = self._up.upload(now, payload / link.up)
        lag = delay(link, self._rng) if Aspect.LATENCY in self._aspects else 0.0
        await asyncio.sleep(start + lag - now)
        return self._reaches(j)

    async def arrive(self, sender: str, payload: int) -> bool:
        """Wait until the last byte of a message has come, if it does."""
        j = self._index_of(sender)
        if j is not None and payload and Aspect.BANDWIDTH in self._aspects:
            link = self._conditions.link(j, self._own)
            now = asyncio.get_running_loop().time()
            end = self._down.download(now, payload / link.down, now + payload / link.up)
            await asyncio.sleep(end - now)
        return self._reaches(j)

    def _reaches(self, j: int | None) -> bool:
        if Aspect.PARTITION not in self._aspects or not self.sides:
            return True
        return self.sides[self._own] == self.sides[j or 0]
