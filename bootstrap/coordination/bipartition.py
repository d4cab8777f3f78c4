"""Which updates are alike: cosines, the optimal cut of a cluster, and what speaks for the cut.

F. Sattler, K.-R. Müller, W. Samek, "Clustered federated learning", 2019. Everything here follows
from the updates' inner products alone, so it is the same for permuted updates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.cluster.hierarchy import linkage
from scipy.special import stdtr

from peer.learning.learner import Vector

Matrix = npt.NDArray[np.float64]

BLOCK = 16_384
"""Columns that are multiplied at a time: bounds the memory of their float64 copies."""


class Cut(NamedTuple):
    """A bipartition of M clients, by their positions (sorted; `first` holds position 0).

    `cross_max` is alpha_cross_max, the largest cosine between the halves.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    cross_max: float

    @property
    def smaller(self) -> int:
        """Number of clients in the smaller half."""
        return min(len(self.first), len(self.second))


class Contrast(NamedTuple):
    """How much more alike clients are inside the halves of a cut than across it.

    Attributes:
        within: mean cosine inside each half; nan for a half of one client.
        across: mean cosine between the halves.
        p: for each half, the chance that Student's t test gives to a fixed cut of exchangeable
            cosines to be as much more alike inside; 1 for a half of one client.
    """

    within: tuple[float, float]
    across: float
    p: tuple[float, float]


def gram(updates: Sequence[Vector]) -> Matrix:
    """Return the inner products [M, M] of M updates, each [e], in float64.

    Raises ValueError when there are none.
    """
    if not updates:
        raise ValueError("no updates")
    m, e = len(updates), updates[0].size
    products = np.zeros((m, m))
    for start in range(0, e, BLOCK):
        block = np.array([update[start : start + BLOCK] for update in updates], dtype=np.float64)
        products += block @ block.T
    return products


def cosines(products: Matrix) -> Matrix:
    """Return alpha [M, M] from inner products [M, M].

    [choice] an update of zero has no direction: its cosine with every other is 0.
    """
    norms = np.sqrt(np.diag(products))
    scale = np.outer(norms, norms)
    alpha: Matrix = np.divide(products, scale, out=np.zeros_like(products), where=scale > 0)
    np.fill_diagonal(alpha, 1.0)
    return np.clip(alpha, -1, 1, out=alpha)


def bipartition(alpha: Matrix) -> Cut:
    """Return a cut that minimises alpha_cross_max over all bipartitions of M clients.

    The paper's merging procedure (algorithm 1) is single linkage on similarity, stopped at two
    clusters. Raises ValueError for fewer than 2 clients.
    """
    m = len(alpha)
    if m < 2:
        raise ValueError("one client cannot be cut")
    merges = linkage(-alpha[np.triu_indices(m, 1)], method="single")
    # The halves are what the last merge joins: found by descent, for a threshold would not tell
    # merges of equal similarity apart.
    half = np.zeros(m, dtype=np.bool_)
    pending = [int(merges[-1, 0])]
    while pending:
        node = pending.pop()
        if node < m:
            half[node] = True
        else:
            pending += merges[node - m, :2].astype(int).tolist()
    half ^= not half[0]
    first, second = (tuple(np.flatnonzero(part).tolist()) for part in (half, ~half))
    return Cut(first, second, -float(merges[-1, 2]))


def contrast(alpha: Matrix, cut: Cut) -> Contrast:
    """Return how the cosines [M, M] inside the halves of a cut compare with those across."""
    halves = [np.array(cut.first), np.array(cut.second)]
    first, second = (alpha[np.ix_(h, h)][np.triu_indices(len(h), 1)] for h in halves)
    across = alpha[np.ix_(*halves)].ravel()
    return Contrast(
        (_mean(first), _mean(second)),
        _mean(across),
        (_chance(first, across), _chance(second, across)),
    )


def _mean(values: Matrix) -> float:
    return float(values.mean()) if values.size else math.nan


def _chance(within: Matrix, across: Matrix) -> float:
    """Return the p of the t test, variance pooled, that the mean of `within` is the larger."""
    if not within.size:
        return 1.0
    difference = _mean(within) - _mean(across)
    freedom = within.size + across.size - 2
    squares = sum(float(np.square(part - part.mean()).sum()) for part in (within, across))
    error = math.sqrt(squares / freedom * (1 / within.size + 1 / across.size))
    if error == 0:
        return 0.0 if difference > 0 else 1.0
    return float(stdtr(freedom, -difference / error))


def strays(alpha: Matrix, e: int) -> list[int]:
    """Return the positions of clients whose updates, of e values, resemble nobody's: noise, and who
    is opposed to all; from cosines [M, M].

    A random direction has with any other vector a cosine of mean 0 and variance 1 / e. [choice] Six
    standard deviations; and where that is half of the clients or more, cosines tell nothing of
    anybody, and nobody is one.
    """
    nearest = (alpha - 2 * np.eye(len(alpha))).max(axis=1)
    found: list[int] = np.flatnonzero(nearest < 6 / math.sqrt(e)).tolist()
    return found if 2 * len(found) < len(alpha) else []


def separation_gap(alpha: Matrix, cut: Cut, clusters: Sequence[int]) -> float | None:
    """Return g(alpha) = alpha_intra_min - alpha_cross_max, for known true clusters [M].

    None when no two clients share a cluster.
    """
    labels = np.asarray(clusters)
    same = np.triu(labels[:, None] == labels[None, :], 1)
    return float(alpha[same].min()) - cut.cross_max if same.any() else None


def estimate_gammas(alpha: Matrix) -> Matrix:
    """Return an estimate of each client's relative error gamma_i [M], from cosines [M, M].

    [choice] Errors of different clients are independent, so in many dimensions at right angles to
    each other and to the true gradient: clients of one distribution then have the cosine
    1 / sqrt((1 + gamma_i^2) (1 + gamma_j^2)), and three of them give
    1 + gamma_i^2 = alpha_jk / (alpha_ij alpha_ik). As the clusters are not known, j and k are the
    two clients most like i. It is infinite where the three do not agree on a direction (a cosine of
    0 or less), and for fewer than three clients.
    """
    m = len(alpha)
    if m < 3:
        return np.full(m, math.inf)
    others = alpha.copy()
    np.fill_diagonal(others, -math.inf)
    j, k = np.argsort(-others, axis=1, kind="stable")[:, :2].T
    i = np.arange(m)
    triple = np.stack([alpha[i, j], alpha[i, k], alpha[j, k]])
    agree = (triple > 0).all(axis=0)
    squares = np.full(m, math.inf)
    squares[agree] = triple[2, agree] / (triple[0, agree] * triple[1, agree]) - 1
    gammas: Matrix = np.sqrt(squares.clip(min=0))
    return gammas
