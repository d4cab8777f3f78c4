"""The separation theorem of CFL as numbers: when can K clusters be told apart for certain?

F. Sattler, K.-R. Müller, W. Samek, "Clustered federated learning", 2019, theorem 1. M clients draw
their data from K distributions; theta* is a stationary solution of their common objective, so the
K true gradients cancel, each weighted by its cluster's data. Client i sees its true gradient with
the relative error gamma_i = ||true - empirical|| / ||true|| < 1, which turns it by at most
arcsin(gamma_i). Of K directions that cancel, some bipartition has all angles across at least
pi / (K - 1). Both bounds follow from these two angles.
"""

from __future__ import annotations

import math


def alignment(gamma_i: float, gamma_j: float) -> float:
    """Return H_ij = -gamma_i gamma_j + sqrt(1 - gamma_i^2) sqrt(1 - gamma_j^2), in (-1, 1].

    The cosine of the largest angle that the errors alone can put between two clients of the same
    distribution. Raises ValueError unless both errors are in [0, 1).
    """
    for gamma in (gamma_i, gamma_j):
        if not 0 <= gamma < 1:
            raise ValueError(f"gamma = {gamma} is not in [0, 1)")
    return math.sqrt(1 - gamma_i**2) * math.sqrt(1 - gamma_j**2) - gamma_i * gamma_j


def cross_bound(clusters: int, gamma: float) -> float:
    """Return the upper bound of alpha_cross_max over all clients with errors up to `gamma`.

    The cosine between any two clients of different halves of the best bipartition is at most
    cos(pi / (K - 1)) H + sin(pi / (K - 1)) sqrt(1 - H^2), or 1 where the errors can turn two
    clients by more than pi / (K - 1). Raises ValueError for fewer than 2 clusters or gamma outside
    [0, 1).
    """
    if clusters < 2:
        raise ValueError("there is nothing to cut in fewer than 2 clusters")
    h, angle = alignment(gamma, gamma), math.pi / (clusters - 1)
    if h < math.cos(angle):
        return 1.0
    return math.cos(angle) * h + math.sin(angle) * math.sqrt(1 - h**2)


def intra_bound(gamma: float) -> float:
    """Return the lower bound of alpha_intra_min, H = 1 - 2 gamma^2, whatever the K.

    Raises ValueError for gamma outside [0, 1).
    """
    return alignment(gamma, gamma)


def largest_gamma(clusters: int) -> float:
    """Return sin(pi / (4 (K - 1))), the error below which separation is certain.

    There the bounds meet: alpha_intra_min is the cosine of 2 arcsin(gamma), alpha_cross_max that
    of pi / (K - 1) - 2 arcsin(gamma). Raises ValueError for fewer than 2 clusters.
    """
    if clusters < 2:
        raise ValueError("there is nothing to cut in fewer than 2 clusters")
    return math.sin(math.pi / (4 * (clusters - 1)))


def can_separate(clusters: int, gamma: float) -> bool:
    """Tell whether the theorem promises a correct bipartition of K clusters with this error.

    The promise is sufficient, not necessary: clusters whose gradients differ more than the worst
    case are separated with larger errors too. Raises ValueError as `cross_bound`.
    """
    return intra_bound(gamma) > cross_bound(clusters, gamma)


def gate(cross_max: float, gamma_max: float) -> bool:
    """Return whether gamma_max < sqrt((1 - alpha_cross_max) / 2), the paper's test of a cut.

    If so, alpha_intra_min >= 1 - 2 gamma_max^2 > alpha_cross_max, so that no two clients of one
    distribution were separated, whatever the K.
    """
    return gamma_max < math.sqrt(max(0.0, 1 - cross_max) / 2)


def answer(clusters: int, gamma: float) -> str:
    """Return what the theorem says, in words. Raises ValueError as `cross_bound`."""
    verdict = (
        "yes: every such federation has a cut that separates no two clients of one distribution"
        if can_separate(clusters, gamma)
        else "not for certain: clusters that differ more than the worst case may still come apart"
    )
    return "\n".join(
        (
            f"clusters K = {clusters}, relative error of the clients' updates gamma = {gamma:g}",
            f"cosines inside a cluster:     at least {intra_bound(gamma):+.3f}",
            f"cosines across the best cut:  at most  {cross_bound(clusters, gamma):+.3f}",
            f"the bounds meet at gamma = {largest_gamma(clusters):.3f}",
            f"can they be told apart? {verdict}",
        )
    )
