"""`random`, `fixed` and `oracle`: neighbours drawn uniformly from a pool, models unseen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from peer.errors import UserError
from peer.matching.base import Evidence, MatcherSettings
from peer.matching.registry import method
from peer.matching.selection import check_keys, check_round, draw, read_peers
from peer.randomness import Purpose, generator


class Uniform:
    """Draws k neighbours anew every round from those of `pool` that are known."""

    evidence: ClassVar[Evidence] = Evidence.NONE

    def __init__(self, settings: MatcherSettings) -> None:
        self._settings = settings
        self.pool = frozenset(range(settings.n)) - {settings.index}

    def candidates(self, t: int, known: Sequence[int], rng: np.random.Generator) -> list[int]:  # noqa: ARG002
        """Return nobody: these methods compare no models."""
        check_round(self._settings, t, known)
        return []

    def settle(
        self,
        t: int,
        known: Sequence[int],
        similarities: Mapping[int, float],
        rng: np.random.Generator,
    ) -> list[int]:
        """Return k of the known peers of the pool, all when there are fewer."""
        check_round(self._settings, t, known, similarities)
        return draw(self.pool.intersection(known), self._settings.k, rng)

    @property
    def bag(self) -> frozenset[int]:
        """The pool: the peers that this method holds to be worth learning with."""
        return self.pool

    @property
    def notes(self) -> dict[str, Any]:
        """Nothing to say."""
        return {}

    def state(self) -> dict[str, Any]:
        """Nothing to keep: the pool follows from the settings."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back nothing. Raises ValueError for anything more."""
        check_keys(state)


@method("fixed")
class Fixed(Uniform):
    """FixTopology: the pool is k peers drawn once, so all of them that are known are neighbours."""

    def __init__(self, settings: MatcherSettings) -> None:
        super().__init__(settings)
        rng = generator(settings.seed, Purpose.TOPOLOGY, index=settings.index)
        self.pool = frozenset(draw(self.pool, settings.k, rng))


@method("oracle")
class Oracle(Uniform):
    """The pool is one's true cluster, which no other method is told."""

    def __init__(self, settings: MatcherSettings) -> None:
        super().__init__(settings)
        clusters = settings.clusters
        if clusters is None:
            raise UserError(
                "method oracle needs to know the true clusters",
                "it works with a partitioned data set, not with data of one's own",
            )
        self.pool = frozenset(j for j in self.pool if clusters[j] == clusters[settings.index])


@method("random")
class Random(Uniform):
    """The pool is everybody else.

    The bag is the last round's neighbours, N_i^t: so its precision says how pure a blind draw is.
    """

    def __init__(self, settings: MatcherSettings) -> None:
        super().__init__(settings)
        self._neighbours: list[int] = []

    def settle(
        self,
        t: int,
        known: Sequence[int],
        similarities: Mapping[int, float],
        rng: np.random.Generator,
    ) -> list[int]:
        """Return k of the known peers, all when there are fewer."""
        self._neighbours = super().settle(t, known, similarities, rng)
        return self._neighbours.copy()

    @property
    def bag(self) -> frozenset[int]:
        """N_i^t."""
        return frozenset(self._neighbours)

    def state(self) -> dict[str, Any]:
        """Return N_i^t."""
        return {"neighbours": self._neighbours.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back N_i^t. Raises ValueError when the state is not of this method."""
        check_keys(state, "neighbours")
        self._neighbours = read_peers(state["neighbours"], self._settings)
