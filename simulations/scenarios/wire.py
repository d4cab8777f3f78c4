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


class Wire:
    """Carries messages among n peers; which of them arrive is not its affair.

    `busy_up` and `busy_down` [n] are the seconds for which each connection has carried payload.
    """

    def __init__(self, clock: Clock, conditions: Conditions, n: int, seed: int) -> None:
        self._clock = clock
        self._conditions = conditions
        self._free_up, self._free_down = [0.0] * n, [0.0] * n
        self.busy_up, self.busy_down = [0.0] * n, [0.0] * n
        self._seed = seed
        self._draws: dict[int, np.random.Generator] = {}

    def tell(self, i: int, j: int, act: Callable[..., None], *arguments: Any) -> None:
        """Have `act(*arguments)` run when a message without payload from i reaches j."""
        delay = self._delay(i, self._conditions.link(i, j))
        self._clock.after(delay, act, *arguments)

    def carry(self, i: int, j: int, size: int, act: Callable[..., None], *arguments: Any) -> None:
        """Have `act(*arguments)` run when the last of `size` bytes from i has reached j."""
        link = self._conditions.link(i, j)
        seconds = size / link.up
        start = max(self._clock.now, self._free_up[i])
        self._free_up[i] = start + seconds
        self.busy_up[i] += seconds
        delay = self._delay(i, link)
        last = start + seconds + delay
        self._clock.at(start + delay, self._arrive, j, size / link.down, last, act, arguments)

    def forget(self, i: int) -> None:
        """Empty the queues of a peer whose process ended."""
        self._free_up[i] = self._free_down[i] = self._clock.now

    def _arrive(
        self,
        j: int,
        seconds: float,
        last: float,
        act: Callable[..., None],
        arguments: tuple[Any, ...],
    ) -> None:
        """The first byte is at j: queue there. `last` is when the last byte can be, at best."""
        end = max(max(self._clock.now, self._free_down[j]) + seconds, last)
        self._free_down[j] = end
        self.busy_down[j] += seconds
        self._clock.at(end, act, *arguments)

    def _delay(self, i: int, link: Link) -> float:
        delay = link.latency
        if link.loss or link.jitter.kind != "constant":
            rng = self._draw(i)
            if link.loss:
                delay += stall(link, rng)
            return delay + link.jitter.draw(rng)
        return delay + link.jitter.a

    def _draw(self, i: int) -> np.random.Generator:
        """Return the generator of messages from i. [choice] One for all of them: the order in which
        they are sent is itself determined."""
        if i not in self._draws:
            self._draws[i] = generator(self._seed, Purpose.LINKS, index=i, t=1)
        return self._draws[i]
