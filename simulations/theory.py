"""Purity of neighbours in theory: how probable it is that all k neighbours are of the own cluster.

PANM, Section IV-E, Theorem 1 and Table III, under its Assumption 2: similarity is effective, so a
peer of the own cluster is always more similar than a stranger. As in the papers there are n peers,
a of them in a cluster (oneself included in both), l candidates a round and k neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import hypergeom

from peer.errors import UserError
from peer.plan import Plan

Distribution = npt.NDArray[np.float64]
"""Probabilities [k + 1] of having 0, 1, ..., k true neighbours."""


@dataclass(frozen=True)
class Theory:
    """What is expected of the neighbours of stage 1, in rounds 1, 2, ...: shares in [0, 1]."""

    name: str
    precision: list[float]
    recall: list[float]
    purity: list[float]


def stage_one(plan: Plan) -> Theory | None:
    """Return what is expected of a plan's stage 1, where every peer hears of all others.

    None where the theory has nothing to say: other methods, clusters that are not of one size or
    but one, a skew that makes members of a cluster differ, more candidates than there are.
    """
    K = plan.partition.clusters
    n, a, l, k = plan.n, plan.n // K, plan.matching.l, plan.matching.k  # noqa: E741
    if K == 1 or n % K or a == 1 or plan.partition.skew != "none" or not (k <= l < n - k):
        return None
    if plan.method in ("panm-grad", "panm-loss"):
        name, distributions = "NSMC", nsmc(n, a, l, k, plan.t1)
    elif plan.method == "pens":
        name, distributions = "PENS", [pens(n, a, l, k)] * plan.t1
    else:
        return None
    precision = [expected_precision(p) for p in distributions]
    recall = [k * share / (a - 1) for share in precision]
    return Theory(name, precision, recall, [all_true(p) for p in distributions])


def nsmc(n: int, a: int, l: int, k: int, rounds: int) -> list[Distribution]:  # noqa: E741
    """Return the distribution of the number of true neighbours in rounds 1 to `rounds` of NSMC.

    m_t = min(k, m_{t-1} + X_t), where X_t of the l candidates, drawn from the n - 1 - k that are
    not neighbours, are among the a - 1 - m_{t-1} true ones there. In round 1 there are no
    neighbours yet: X_1 is drawn from all n - 1.

    Raises UserError unless 1 <= a <= n, k <= l and l + k < n.
    """
    _check(n, a, l, k)
    first = np.zeros(k + 1)
    first[0] = 1.0
    distributions = [_after(first, n - 1, a, l, k)]
    while len(distributions) < rounds:
        distributions.append(_after(distributions[-1], n - 1 - k, a, l, k))
    return distributions


def pens(n: int, a: int, l: int, k: int) -> Distribution:  # noqa: E741
    """Return the distribution of the number of true neighbours of PENS, the same in every round.

    It has no memory: the k best of l candidates drawn from all n - 1. Raises as `nsmc`.
    """
    return nsmc(n, a, l, k, 1)[0]


def all_true(distribution: Distribution) -> float:
    """Return P(all k neighbours are true)."""
    return float(distribution[-1])


def expected_precision(distribution: Distribution) -> float:
    """Return the expected share of true neighbours."""
    return float(distribution @ np.arange(len(distribution))) / (len(distribution) - 1)


def _after(before: Distribution, population: int, a: int, l: int, k: int) -> Distribution:  # noqa: E741
    """Return the distribution after l more candidates out of `population` peers."""
    after = np.zeros(k + 1)
    for m in np.flatnonzero(before).tolist():
        true = max(0, a - 1 - m)
        found = np.arange(min(l, true) + 1)
        np.add.at(
            after, np.minimum(k, m + found), before[m] * hypergeom.pmf(found, population, true, l)
        )
    return after


def _check(n: int, a: int, l: int, k: int) -> None:  # noqa: E741
    if not (1 <= a <= n and 1 <= k <= l and l + k < n):
        raise UserError(
            f"no theory for n = {n}, a = {a}, l = {l}, k = {k}",
            "it needs 1 <= a <= n, k <= l and l + k < n",
        )
