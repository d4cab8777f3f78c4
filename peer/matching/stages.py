"""What PANM and PENS have in common: rounds of search by similarity, then rounds out of a bag."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from peer.matching.base import Evidence, MatcherSettings
from peer.matching.selection import (
    check_keys,
    check_round,
    draw,
    most_similar,
    read_count,
    read_peers,
)


class TwoStages(ABC):
    """Stage 1: the k most similar of the candidates are N_i^t. Stage 2: k are drawn from a bag.

    Subclasses say who is a candidate, what the first bag is and how it changes. While the bag is
    not set the peer searches; it is set once, in the first round after stage 1.
    """

    evidence: ClassVar[Evidence]

    def __init__(self, settings: MatcherSettings) -> None:
        self._settings = settings
        self._neighbours: list[int] = []
        self._searches = 0
        self._bag: frozenset[int] | None = None
        self._notes: dict[str, Any] = {}

    @abstractmethod
    def _search(self, known: Sequence[int], rng: np.random.Generator) -> list[int]:
        """Return the candidates of a round of stage 1."""

    @abstractmethod
    def _first_bag(self) -> frozenset[int]:
        """Return the bag at the end of stage 1, from at least one search."""

    def _probe(
        self,
        t: int,  # noqa: ARG002
        bag: frozenset[int],  # noqa: ARG002
        known: Sequence[int],  # noqa: ARG002
        rng: np.random.Generator,  # noqa: ARG002
    ) -> list[int]:
        """Return the candidates of a round of stage 2; by default there are none."""
        return []

    def _update_bag(
        self,
        bag: frozenset[int],
        similarities: Mapping[int, float],  # noqa: ARG002
    ) -> frozenset[int]:
        """Return the bag after the candidates of stage 2 were heard from."""
        return bag

    def candidates(self, t: int, known: Sequence[int], rng: np.random.Generator) -> list[int]:
        """Return the peers to compare with, sorted."""
        check_round(self._settings, t, known)
        bag = self._enter(t)
        chosen = self._search(known, rng) if bag is None else self._probe(t, bag, known, rng)
        return sorted(chosen)

    def settle(
        self,
        t: int,
        known: Sequence[int],
        similarities: Mapping[int, float],
        rng: np.random.Generator,
    ) -> list[int]:
        """Return N_i^t, sorted; a round in which nobody was heard from in stage 1 has none."""
        check_round(self._settings, t, known, similarities)
        bag = self._enter(t)
        self._notes = {}
        if bag is None:
            return self._settle_search(t, similarities)
        if similarities:
            bag = self._bag = self._update_bag(bag, similarities)
        self._neighbours = draw(bag.intersection(known), self._settings.k, rng)
        return self._neighbours.copy()

    def _settle_search(self, t: int, similarities: Mapping[int, float]) -> list[int]:
        if t > self._settings.t1:
            self._notes = {"searching": True}
        if not similarities:
            return []  # what was found before stays remembered
        self._searches += 1
        self._neighbours = most_similar(similarities, self._settings.k)
        return self._neighbours.copy()

    def _enter(self, t: int) -> frozenset[int] | None:
        """Return the bag, None while searching; the first call after stage 1 makes it."""
        if self._bag is None and t > self._settings.t1 and self._searches >= self._needed:
            self._bag = self._first_bag()
        return self._bag

    @property
    def _needed(self) -> int:
        """Searches to be done before there is a bag to trust.

        [choice] a peer that joins late, or heard from nobody in stage 1, searches on until it had
        the chance to meet about everybody once: (n - 1) / l rounds, at most T1.
        """
        s = self._settings
        return min(s.t1, -(-(s.n - 1) // s.l))

    @property
    def bag(self) -> frozenset[int]:
        """The bag; in stage 1 N_i^t."""
        return frozenset(self._neighbours) if self._bag is None else self._bag

    @property
    def notes(self) -> dict[str, Any]:
        """`searching` when a search outlasts T1; what else the method has to say."""
        return self._notes

    def state(self) -> dict[str, Any]:
        """Return N_i^t, the number of searches and the bag."""
        return {
            "neighbours": self._neighbours.copy(),
            "searches": self._searches,
            "bag": None if self._bag is None else sorted(self._bag),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned. Raises ValueError when it is not of this method."""
        check_keys(state, "neighbours", "searches", "bag")
        neighbours = read_peers(state["neighbours"], self._settings)
        searches = read_count(state["searches"])
        bag = None if state["bag"] is None else frozenset(read_peers(state["bag"], self._settings))
        self._neighbours, self._searches, self._bag = neighbours, searches, bag
