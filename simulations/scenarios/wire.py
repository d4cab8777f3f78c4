"""How long messages take: latency, bandwidth, and queues at both ends.

A peer's connection carries one payload at a time in each direction, in the order of their coming. A
payload leaves once those before it have left, its first byte arrives after the link's latency, and
its last when both the sender's and the receiver's connection have carried all of it: the slower end
counts once, not both (bytes flow while more follow). Requests and refusals are a few hundred bytes:
[choice] they take the latency alone and do not queue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from peer.randomness import Purpose, generator
from simulations.scenarios.clock import Clock
from simulations.scenarios.links import Conditions, Link, stall


class Lane:
    """One direction of a peer's connection: one payload at a time, first come first served.

    `free`: when it has carried all that came so far; `busy`: for how long it has carried; seconds.
    """

    def __init__(self) -> None:
        self.free = self.busy = 0.0

    def upload(self, now: float, seconds: float) -> float:
        """Carry a payload that is ready now for `seconds`; return when its first byte leaves."""
        start = max(now, self.free)
        self.free = start + seconds
        self.busy += seconds
        return start

    def download(self, now: float, seconds: float, last: float) -> float:
        """Carry a payload whose first byte is here now for `seconds`, and whose last byte is here
        at `last` at best; return when all of it has been carried."""
        self.free = max(max(now, self.free) + seconds, last)
        self.busy += seconds
        return self.free


def delay(link: Link, rng: np.random.Generator) -> float:
    """Return the seconds that the first byte of a message takes over a link, by draws of `rng`."""
    seconds = link.latency + (stall(link, rng) if link.loss else 0.0)
    return seconds + link.jitter.draw(rng)


class Wire:
    """Carries messages among n peers; which of them arrive is not its affair.

    `up` and `down` [n] are the two directions of their connections.
    """

    def __init__(self, clock: Clock, conditions: Conditions, n: int, seed: int) -> None:
        self._clock = clock
        self._conditions = conditions
        self.up, self.down = [[Lane() for _ in range(n)] for _ in range(2)]
        self._seed = seed
        self._draws: dict[int, np.random.Generator] = {}

    def tell(self, i: int, j: int, act: Callable[..., None], *arguments: Any) -> None:
        """Have `act(*arguments)` run when a message without payload from i reaches j."""
        link = self._conditions.link(i, j)
        self._clock.after(delay(link, self._draw(i)), act, *arguments)

    def carry(self, i: int, j: int, size: int, act: Callable[..., None], *arguments: Any) -> None:
        """Have `act(*arguments)` run when the last of `size` bytes from i has reached j."""
        link = self._conditions.link(i, j)
        seconds = size / link.up
        start = self.up[i].upload(self._clock.now, seconds)
        lag = delay(link, self._draw(i))
        last = start + seconds + lag
        self._clock.at(start + lag, self._arrive, j, size / link.down, last, act, arguments)

    def forget(self, i: int) -> None:
        """Empty the queues of a peer whose process ended."""
        self.up[i].free = self.down[i].free = self._clock.now

    def _arrive(
        self,
        j: int,
        seconds: float,
        last: float,
        act: Callable[..., None],
        arguments: tuple[Any, ...],
    ) -> None:
        """The first byte is at j: queue there. `last` is when the last byte can be, at best."""
        self._clock.at(self.down[j].download(self._clock.now, seconds, last), act, *arguments)

    def _draw(self, i: int) -> np.random.Generator:
        """Return the generator of messages from i. [choice] One for all of them: the order in which
        they are sent is itself determined."""
        if i not in self._draws:
            self._draws[i] = generator(self._seed, Purpose.LINKS, index=i, t=1)
        return self._draws[i]
