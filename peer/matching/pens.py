"""`pens`: performance-based neighbour selection, PANM's forerunner and baseline.

N. Onoszko, G. Karlsson, O. Mogren, E. Listo Zec, "Decentralized federated learning of deep neural
networks on non-iid data", 2021.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from peer.matching.base import Evidence, MatcherSettings
from peer.matching.registry import method
from peer.matching.selection import check_keys, draw, read_count, read_peers
from peer.matching.stages import TwoStages


@method("pens")
class Pens(TwoStages):
    """Stage 1: the k best of l fresh candidates. Stage 2: those chosen more often than expected."""

    evidence: ClassVar[Evidence] = Evidence.LOSS

    def __init__(self, settings: MatcherSettings) -> None:
        super().__init__(settings)
        self._met: Counter[int] = Counter()
        self._chosen: Counter[int] = Counter()

    def _search(self, known: Sequence[int], rng: np.random.Generator) -> list[int]:
        """Return l fresh candidates; there is no memory."""
        return draw(known, self._settings.l, rng)

    def _settle_search(self, t: int, similarities: Mapping[int, float]) -> list[int]:
        """Return the k best, and count who was met and who chosen."""
        neighbours = super()._settle_search(t, similarities)
        self._met.update(similarities.keys())
        self._chosen.update(neighbours)
        return neighbours

    def _first_bag(self) -> frozenset[int]:
        """Return the peers selected more often than expected: count_ij > times met * k / l.

        [choice] l is at most n - 1 here, for no more can be met in a round. If nobody is above what
        was expected, the k selected most often are taken, ties to the lower index.
        """
        k, l = self._settings.k, min(self._settings.l, self._settings.n - 1)  # noqa: E741
        often = [j for j, count in self._chosen.items() if count * l > self._met[j] * k]
        return frozenset(often or sorted(self._chosen, key=lambda j: (-self._chosen[j], j))[:k])

    def state(self) -> dict[str, Any]:
        """Return what both stages need, with [j, times met, times chosen] of every peer met."""
        counts = [[j, met, self._chosen[j]] for j, met in sorted(self._met.items())]
        return {**super().state(), "counts": counts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned. Raises ValueError when it is not of this method."""
        check_keys(state, "neighbours", "searches", "bag", "counts")
        counts = state["counts"]
        if not isinstance(counts, list) or any(
            not isinstance(row, list) or len(row) != 3 for row in counts
        ):
            raise ValueError("counts are a list of [peer, times met, times chosen]")
        peers = read_peers([row[0] for row in counts], self._settings)
        met, chosen = ([read_count(row[column]) for row in counts] for column in (1, 2))
        if any(c > m or not m for m, c in zip(met, chosen, strict=True)):
            raise ValueError("no peer is chosen more often than met")
        super().restore({key: value for key, value in state.items() if key != "counts"})
        self._met = Counter(dict(zip(peers, met, strict=True)))
        self._chosen = Counter({j: c for j, c in zip(peers, chosen, strict=True) if c})
