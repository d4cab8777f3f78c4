"""What links are like: latency, jitter, bandwidth and loss, for all, by class of link, or by edge.

`Links` is the table of a scenario; `Conditions` answers what a link is like now, which a script may
have changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from peer.randomness import Purpose, generator
from simulations.scenarios.lines import MistakeError
from simulations.scenarios.tables import Distribution, Population, Spread, Table

MEGABIT = 125_000
"""Bytes of a megabit."""

SEGMENT = 1460
"""Bytes of data in a TCP segment."""
RETRANSMISSION = 0.2
"""Seconds that TCP waits at least before it sends a lost segment again (Linux)."""
MOST_REPEATS = 6
"""Times that one segment is lost in a row at most."""
MATHIS = math.sqrt(1.5)
"""Of the throughput that loss p allows: SEGMENT / RTT * MATHIS / sqrt(p) (Mathis et al., 1997)."""


MOST_KNOWN = 200_000
"""Links that are remembered; more are worked out anew."""


class Between(Table):
    """Links of one class, or one edge: what it does not say is as everywhere."""

    classes: tuple[str, str] | None = Field(
        default=None, description="device classes of the two ends, in either order"
    )
    edge: tuple[int, int] | None = Field(default=None, description="the two peers")
    latency: Spread | None = Field(default=None, description="as in [links]")
    jitter: Spread | None = Field(default=None, description="as in [links]")
    bandwidth: float | None = Field(default=None, gt=0, description="as in [links]")
    loss: float | None = Field(default=None, ge=0, le=0.5, description="as in [links]")


class Links(Table):
    """What all links are like, and those that are otherwise."""

    latency: Spread = Field(
        default=Distribution("constant", 0.0),
        description="seconds one way, drawn once for each link",
    )
    jitter: Spread = Field(
        default=Distribution("constant", 0.0),
        description="seconds added to the latency, drawn for each message",
    )
    bandwidth: float | None = Field(
        default=None, gt=0, description="Mbit/s; unlimited if not given"
    )
    loss: float = Field(
        default=0.0, ge=0, le=0.5, description="share of the packets that is lost, felt as delay"
    )
    between: list[Between] = Field(default=[], description="links that are otherwise")

    def check(self, people: Population, edges: frozenset[tuple[int, int]]) -> None:
        """Raise MistakeError where `between` names classes or links that there are not."""
        for place, own in enumerate(self.between):
            key = ("links", "between", place)
            if (own.classes is None) == (own.edge is None):
                raise MistakeError(key, "say for which links: classes = [A, B] or edge = [i, j]")
            for name in own.classes or ():
                if name not in people.classes:
                    raise MistakeError((*key, "classes"), f"there are no peers of class {name!r}")
            if own.edge is not None and pair(*own.edge) not in edges:
                raise MistakeError((*key, "edge"), f"the topology does not link {list(own.edge)}")


class Link(NamedTuple):
    """What one link is like in one direction: seconds, bytes a second, share of packets lost."""

    latency: float
    jitter: Distribution
    up: float
    down: float
    loss: float


def pair(i: int, j: int) -> tuple[int, int]:
    """Return an edge by its lower end first."""
    return (i, j) if i < j else (j, i)


class Conditions:
    """What every link is like now.

    `up` and `down` [n + 1] are the rates of the peers' own connections in bytes a second and, last,
    of the coordinator's, node n. `centre` is the latency of its links, if not that of all.
    """

    def __init__(
        self,
        links: Links,
        people: Population,
        up: Sequence[float],
        down: Sequence[float],
        seed: int,
        *,
        centre: Distribution | None = None,
    ) -> None:
        self._links = links
        self._centre = centre
        self._people = people
        self._up, self._down = up, down
        self.seed = seed
        self._by_edge = {pair(*b.edge): b for b in links.between if b.edge is not None}
        self._by_class = {pair_of(b.classes): b for b in links.between if b.classes is not None}
        self._drawn: dict[tuple[int, Distribution], npt.NDArray[np.float64]] = {}
        self._degraded: dict[int, tuple[float, float, float | None]] = {}
        self._known: dict[tuple[int, int], Link] = {}

    def link(self, i: int, j: int) -> Link:
        """Return what a message from i to j meets."""
        found = self._known.get((i, j))
        if found is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            found = self._known[i, j] = self._made(i, j)
        return found

    def degrade(
        self, peers: Sequence[int], *, latency: float, bandwidth: float, loss: float | None
    ) -> None:
        """Multiply latency and bandwidth of all links of `peers`, as the file has them, and put
        `loss` in place of theirs."""
        for i in peers:
            self._degraded[i] = (latency, bandwidth, loss)
        self._known.clear()

    def _made(self, i: int, j: int) -> Link:
        central = self._people.n in (i, j)
        own = None if central else self._override(i, j)
        base = self._links
        spread = base.latency if own is None or own.latency is None else own.latency
        if central and self._centre is not None:
            spread = self._centre
        jitter = base.jitter if own is None or own.jitter is None else own.jitter
        bandwidth = base.bandwidth if own is None or own.bandwidth is None else own.bandwidth
        loss = base.loss if own is None or own.loss is None else own.loss
        latency = spread.a if spread.kind == "constant" else self._latency(spread, i, j)
        rate = math.inf if bandwidth is None else bandwidth * MEGABIT
        if i in self._degraded or j in self._degraded:
            # [choice] the end that is worse off counts.
            ends = [self._degraded.get(end, (1.0, 1.0, None)) for end in (i, j)]
            latency *= max(times for times, _, _ in ends)
            rate *= min(share for _, share, _ in ends)
            loss = max((own for _, _, own in ends if own is not None), default=loss)
        if loss:
            round_trip = max(2 * latency, 1e-3)
            rate = min(rate, SEGMENT / round_trip * MATHIS / math.sqrt(loss))
        up, down = min(rate, self._up[i]), min(rate, self._down[j])
        # [choice] A link's own bandwidth is felt at the peer's end, which has this one link to the
        # coordinator: a slow link does not hold up what the coordinator has with others.
        if central:
            up, down = (self._up[i], down) if i > j else (up, self._down[j])
        return Link(latency, jitter, up, down, loss)

    def _override(self, i: int, j: int) -> Between | None:
        """[choice] What is said of an edge goes before what is said of its class."""
        if not self._by_edge and not self._by_class:
            return None
        classes = pair_of((self._people.classes[i], self._people.classes[j]))
        return self._by_edge.get(pair(i, j)) or self._by_class.get(classes)

    def _latency(self, spread: Distribution, i: int, j: int) -> float:
        """Return the latency of a link: the same in both directions, whenever it is asked for."""
        low, high = pair(i, j)
        if (low, spread) not in self._drawn:
            rng = generator(self.seed, Purpose.LINKS, index=low)
            shares = rng.uniform(1e-12, 1.0, size=self._people.n + 1)
            self._drawn[low, spread] = spread.quantiles(shares)
        return float(self._drawn[low, spread][high])


def pair_of(classes: tuple[str, str]) -> tuple[str, str]:
    """Return two classes in their order."""
    a, b = classes
    return (a, b) if a <= b else (b, a)


def stall(link: Link, rng: np.random.Generator) -> float:
    """Return the seconds that loss holds a message up.

    [choice] Losses inside a message are made good while the rest travels, and cost throughput
    alone; that of its last segment is noticed by a time-out only, which doubles with each repeat.
    """
    repeats = min(int(rng.geometric(1 - link.loss)) - 1, MOST_REPEATS)
    timeout = max(RETRANSMISSION, 2 * link.latency + RETRANSMISSION / 2)
    return timeout * ((1 << repeats) - 1)
