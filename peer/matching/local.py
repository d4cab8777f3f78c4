"""`local`: no exchange at all, the baseline that learning together must beat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from peer.matching.base import Evidence, MatcherSettings
from peer.matching.registry import method
from peer.matching.selection import check_keys, check_round


@method("local")
class Local:
    """Every peer trains alone; it has no neighbours and no bag."""

    evidence: ClassVar[Evidence] = Evidence.NONE
    bag: frozenset[int] = frozenset()

    def __init__(self, settings: MatcherSettings) -> None:
        self._settings = settings

    def candidates(self, t: int, known: Sequence[int], rng: np.random.Generator) -> list[int]:  # noqa: ARG002
        """Return nobody."""
        check_round(self._settings, t, known)
        return []

    def settle(
        self,
        t: int,
        known: Sequence[int],
        similarities: Mapping[int, float],
        rng: np.random.Generator,  # noqa: ARG002
    ) -> list[int]:
        """Return nobody."""
        check_round(self._settings, t, known, similarities)
        return []

    @property
    def notes(self) -> dict[str, Any]:
        """Nothing to say."""
        return {}

    def state(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back nothing. Raises ValueError for anything more."""
        check_keys(state)
