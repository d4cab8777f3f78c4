"""Who is there, who reaches whom, and who believes what of it.

What is true changes at once; what peers believe follows as failure detection and gossip would have
it. [choice] All learn of a death, or of a partition, when a probe has failed and its suspicion has
run out, and of a healed network at the next look for lost peers; arrivals and departures by word
are known at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

from peer.network.swarm import STEADY
from peer.plan import Plan
from simulations.scenarios.clock import Clock

if TYPE_CHECKING:
    import networkx as nx

REUNION = STEADY
"""Seconds in which the sides of a healed partition find each other: a look for lost peers."""


def detection_seconds(plan: Plan) -> float:
    """Return how long after its death a peer is called dead."""
    network = plan.network
    suspicion = network.suspicion * max(1.0, math.log10(plan.n))
    return network.probe_interval + network.probe_timeout + suspicion


class Delays(NamedTuple):
    """Seconds until it is known that a node has died, that the network has fallen apart, and that
    it is whole again."""

    death: float
    partition: float
    reunion: float

    @classmethod
    def of_swarm(cls, plan: Plan) -> Self:
        """Return those of peers among themselves."""
        return cls(detection_seconds(plan), detection_seconds(plan), REUNION)


class World:
    """The nodes of `graph`, 0 to n - 1, as they are, and as they take each other to be.

    `alive` and `incarnation` [n] are the truth. `on_believed` is called when beliefs have changed,
    `on_reachable` when nodes may reach each other that could not.
    """

    def __init__(
        self, clock: Clock, graph: nx.Graph[int], *, absent: Collection[int], delays: Delays
    ) -> None:
        self.clock = clock
        self._delays = delays
        self.n = len(graph)
        self.alive = [i not in absent for i in range(self.n)]
        self.incarnation = [0] * self.n
        self._first_round: dict[int, int] = {}
        self._neighbours = [sorted(graph.neighbors(i)) for i in range(self.n)]
        self._side = [0] * self.n
        self._partitions = 0
        self._present = self.alive.copy()
        self._believed_side = self._side
        self._whole = not absent
        self._version = 0
        self._views: dict[int, tuple[int, list[int]]] = {}
        self.on_believed: Callable[[], None] = _nothing
        self.on_reachable: Callable[[], None] = _nothing

    def reaches(self, i: int, j: int) -> bool:
        """Tell whether a message from i would arrive at j now."""
        return self.alive[i] and self.alive[j] and self._side[i] == self._side[j]

    def believes(self, i: int, j: int) -> bool:
        """Tell whether i takes j to be there."""
        return self._present[j] and self._believed_side[i] == self._believed_side[j]

    def known(self, i: int, t: int) -> list[int]:
        """Return the sorted others that take part in round t, as peer i knows them."""
        if not self._first_round:
            return self.view(i).copy()
        return [j for j in self.view(i) if self._first_round.get(j, 1) <= t]

    def takes_part_from(self, i: int, t: int) -> None:
        """Peer i tells all others that it takes part from round t on."""
        self._first_round[i] = t

    def view(self, i: int) -> list[int]:
        """Return the sorted neighbours that peer i takes to be there; not to be changed."""
        if self._whole:
            return self._neighbours[i]
        version, view = self._views.get(i, (-1, []))
        if version != self._version:
            view = [j for j in self._neighbours[i] if self.believes(i, j)]
            self._views[i] = self._version, view
        return view

    def vanish(self, i: int) -> None:
        """Peer i is gone without a word."""
        self._end(i)
        self.clock.after(self._delays.death, self._miss, i, self.incarnation[i])

    def leave(self, i: int) -> None:
        """Peer i has taken its leave."""
        self._end(i)
        self._present[i] = False
        self._believe()

    def come(self, i: int) -> None:
        """Peer i is there, for the first time or again."""
        self.alive[i] = True
        self._present[i] = True
        self._believe()
        self.on_reachable()

    def part(self, sides: Sequence[int]) -> None:
        """Peers of different sides [n] no longer reach each other."""
        self._side = list(sides)
        self._partitions += 1
        self.clock.after(self._delays.partition, self._believe_sides, self._partitions)
        self.on_reachable()  # of an earlier partition's sides some may be one now

    def heal(self) -> None:
        """All who are there reach each other."""
        self._side = [0] * self.n
        self._partitions += 1
        self.clock.after(self._delays.reunion, self._believe_sides, self._partitions)
        self.on_reachable()

    def _end(self, i: int) -> None:
        self.alive[i] = False
        self.incarnation[i] += 1

    def _miss(self, i: int, incarnation: int) -> None:
        if not self.alive[i] and self.incarnation[i] == incarnation:
            self._present[i] = False
            self._believe()

    def _believe_sides(self, number: int) -> None:
        if number == self._partitions:
            self._believed_side = self._side
            self._believe()

    def _believe(self) -> None:
        self._version += 1
        self._whole = all(self._present) and len(set(self._believed_side)) == 1
        self.on_believed()


def _nothing() -> None:
    pass
