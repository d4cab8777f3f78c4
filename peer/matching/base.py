"""What a matching method is: two questions, asked once a round, answered without any I/O.

The live peer answers the matcher's need for similarities over ZeroMQ, the laboratory from a matrix
that holds all models; the matcher cannot tell which. It sees integer peer indices only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np

if TYPE_CHECKING:
    from peer.plan import Plan


class Evidence(StrEnum):
    """What a matcher must know of a candidate before it settles on its neighbours."""

    NONE = "none"
    LOSS = "loss"
    """s_ij = 1 / F_i(w_j): needs j's model."""
    GRADIENT = "gradient"
    """s_ij = alpha cos(g_i, g_j) + (1 - alpha) cos(h_i, h_j): needs j's g and h, or sketches."""


@dataclass(frozen=True, kw_only=True)
class MatcherSettings:
    """What a matcher is built from: its peer's index, the plan's numbers, in the papers' symbols.

    Attributes:
        index: this peer's index i, in [0, n).
        n: number of peers in the federation.
        seed: the plan's seed, for draws that are made once (`fixed`).
        l: candidate list size. k: aggregation list size.
        t1: rounds of stage 1 (T1). tau: NAEM interval.
        clusters: true cluster of every index (length n), known to `oracle` only; None elsewhere.
    """

    index: int
    n: int
    seed: int
    l: int  # noqa: E741 - the papers' symbol
    k: int
    t1: int
    tau: int
    clusters: tuple[int, ...] | None = None

    @classmethod
    def from_plan(cls, plan: Plan, index: int) -> Self:
        """Return the settings of peer `index` of a federation."""
        return cls(
            index=index,
            n=plan.n,
            seed=plan.seed,
            l=plan.matching.l,
            k=plan.matching.k,
            t1=plan.t1,
            tau=plan.matching.tau,
            clusters=tuple(plan.cluster_of(j) for j in range(plan.n)),
        )


class Matcher(Protocol):
    """Chooses, at one peer, whom to hear from and whom to average with.

    A round calls `candidates` once, then `settle` once. `known` is the sorted indices of the peers
    that take part in round t, as this peer knows them, without itself; it is the same in both
    calls. `similarities` maps every candidate that could be heard from to a finite s_ij; it is
    empty when `evidence` is NONE or `candidates` returned nothing. Both raise ValueError when an
    index lies outside `known` or t < 1.
    """

    evidence: ClassVar[Evidence]

    def candidates(self, t: int, known: Sequence[int], rng: np.random.Generator) -> list[int]:
        """Return the indices to hear from in round t (1-based), without repetition."""
        ...

    def settle(
        self,
        t: int,
        known: Sequence[int],
        similarities: Mapping[int, float],
        rng: np.random.Generator,
    ) -> list[int]:
        """Return the neighbours N_i^t to average with, sorted, and update the bag."""
        ...

    @property
    def bag(self) -> frozenset[int]:
        """Those this peer takes for its own cluster: B_i in stage 2, N_i^t in stage 1."""
        ...

    @property
    def notes(self) -> dict[str, Any]:
        """What the last `settle` has to say for the metrics (JSON-able; may be empty)."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what must survive a restart, JSON-able."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned. Raises ValueError when it is not of this method."""
        ...
