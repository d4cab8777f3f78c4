"""`panm-loss` and `panm-grad`: personalised adaptive neighbour matching (PANM, Algorithm 1).

Stage 1 is NSMC (neighbour selection by Monte Carlo with memory), stage 2 NAEM (neighbour
augmentation by expectation maximisation). The two methods differ only in what similarity is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from peer.matching.base import Evidence
from peer.matching.gaussians import separate
from peer.matching.registry import method
from peer.matching.selection import draw
from peer.matching.stages import TwoStages


class Panm(TwoStages):
    """NSMC, then every tau rounds NAEM.

    A peer that has died stays in the bag: it may come back, and similarity alone puts it out.
    """

    def _search(self, known: Sequence[int], rng: np.random.Generator) -> list[int]:
        """Return C united with N_i^{t-1} (NSMC)."""
        memory = set(self._neighbours).intersection(known)
        # [choice] C is drawn from outside N_i^{t-1}, so that every round meets l others.
        return [*draw(set(known) - memory, self._settings.l, rng), *memory]

    def _first_bag(self) -> frozenset[int]:
        """Return N_i^{T1}."""
        return frozenset(self._neighbours)

    def _probe(
        self, t: int, bag: frozenset[int], known: Sequence[int], rng: np.random.Generator
    ) -> list[int]:
        """Return C, l from outside the bag, and S, l from the bag, when tau divides t (NAEM)."""
        if t % self._settings.tau:
            return []
        outside = draw(set(known) - bag, self._settings.l, rng)
        return outside + draw(bag.intersection(known), self._settings.l, rng)

    def _update_bag(self, bag: frozenset[int], similarities: Mapping[int, float]) -> frozenset[int]:
        """Return (B without S) united with H, for the members of C and S that were heard from.

        When nothing separates S from C, H is S: the bag stays as it is, and the notes say so.
        """
        heard = sorted(similarities)
        found = separate([similarities[j] for j in heard], [j in bag for j in heard])
        own = frozenset(j for j, same in zip(heard, found.same, strict=True) if same)
        updated = (bag - frozenset(heard)) | own
        self._notes = {
            "naem": "updated" if found.separated else "kept",
            "joined": sorted(updated - bag),
            "left": sorted(bag - updated),
        }
        return updated


@method("panm-loss")
class PanmLoss(Panm):
    """s_ij = 1 / F_i(w_j)."""

    evidence: ClassVar[Evidence] = Evidence.LOSS


@method("panm-grad")
class PanmGrad(Panm):
    """s_ij = alpha cos(g_i, g_j) + (1 - alpha) cos(h_i, h_j)."""

    evidence: ClassVar[Evidence] = Evidence.GRADIENT
