"""What others did wrong, in points that decay: whoever has too many is left out for a while.

Offences are what no honest peer does, however slow, late or busy it is: being slow is none of them.
A pure state machine with the time passed in. Points of a peer halve every `HALF_LIFE`; with `limit`
points or more it is left out until they have decayed to half of the limit. [choice] No more than
`MOST` limits are ever held against a peer, so that everybody returns: one that was damaged and has
been repaired, after three half-lives at the latest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Offence(StrEnum):
    """What a peer can do wrong in an exchange."""

    MALFORMED = "malformed"
    """An answer or a message that the protocol does not allow: another kind, size or round, values
    that are not finite, a norm above the limit."""
    FORGED = "forged"
    """A model that contradicts the sketch that was sent before it."""
    LIED = "lied"
    """What no honest peer says of itself, or believes of others and passes on."""


POINTS: Final = {Offence.MALFORMED: 30.0, Offence.FORGED: 60.0, Offence.LIED: 30.0}
"""[choice] With the default limit of 100 the fourth malformed answer or lie is too many, or the
second forged model."""
HALF_LIFE: Final = 600.0
"""Seconds."""
MOST: Final = 4.0
MAX_SCORED: Final = 4096
"""Peers with points that are remembered; beyond that those with the fewest are forgotten."""


@dataclass
class _Score:
    """The points of one peer at the time `at`, and until when it is left out."""

    points: float = 0.0
    at: float = 0.0
    until: float = -math.inf

    def now(self, now: float) -> float:
        return self.points * 2 ** (-max(0.0, now - self.at) / HALF_LIFE)


class Scores:
    """The points of all culprits, by whatever name they are held against.

    Args:
        limit: points from which a peer is left out.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._scores: dict[str, _Score] = {}

    def points(self, culprit: str, now: float) -> float:
        """Return the points that a culprit has at the time `now`."""
        score = self._scores.get(culprit)
        return 0.0 if score is None else score.now(now)

    def left_out(self, culprit: str, now: float) -> bool:
        """Return whether a culprit is to be left out at the time `now`."""
        score = self._scores.get(culprit)
        return score is not None and now < score.until

    def offend(self, culprit: str, offence: Offence, now: float) -> float:
        """Hold an offence against a culprit; return for how many seconds it is left out, else 0."""
        score = self._scores.get(culprit)
        if score is None:
            if len(self._scores) >= MAX_SCORED:
                del self._scores[min(self._scores, key=lambda other: self.points(other, now))]
            score = self._scores[culprit] = _Score()
        score.points = min(MOST * self._limit, score.now(now) + POINTS[offence])
        score.at = now
        if score.points >= self._limit or now < score.until:
            score.until = now + HALF_LIFE * math.log2(2 * score.points / self._limit)
        return max(0.0, score.until - now)
