"""Events in the order of their times: virtual time, where nothing is between them, or real time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any


class Clock:
    """Runs events by time, those of one time in the order in which they were planned.

    `now` is the time of the event that runs, in seconds from the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._planned: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0

    def at(self, time: float, act: Callable[..., None], *arguments: Any) -> None:
        """Plan `act(*arguments)` for `time`. Raises ValueError for a time that has passed."""
        if not time >= self.now:
            raise ValueError(f"{time} is before {self.now}")
        # The sequence number settles ties, so that acts are never compared.
        heapq.heappush(self._planned, (time, self._sequence, act, arguments))
        self._sequence += 1

    def after(self, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        """Plan `act(*arguments)` for `seconds` from now. Raises ValueError if they are negative."""
        self.at(self.now + seconds, act, *arguments)

    @property
    def due(self) -> float:
        """The time of the next event, infinite when there is none."""
        return self._planned[0][0] if self._planned else math.inf

    def catch_up(self, time: float) -> None:
        """Run all events up to `time`, which is now from then on."""
        while self.due <= time:
            self.step()
        self.now = max(self.now, time)

    def step(self) -> bool:
        """Run the next event; False when there is none."""
        if not self._planned:
            return False
        self.now, _, act, arguments = heapq.heappop(self._planned)
        self.events += 1
        act(*arguments)
        return True
