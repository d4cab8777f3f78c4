"""The hard EM of NAEM: which similarities belong to the own cluster, and which to strangers.

PANM's neighbour augmentation (NAEM) fits two Gaussians to the similarities y_j of the peers heard
from, component 0 (the own cluster) with the higher mean, and assigns every peer wholly to one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

MAX_STEPS = 100
SIGMA_FLOOR = 0.1
"""Least sigma, as a share of the standard deviation of all y."""
PARAMETERS = (2, 5)
"""Free parameters of one Gaussian (mu, sigma) and of two (and beta), for BIC."""


class Separation(NamedTuple):
    """What `separate` found.

    Attributes:
        same: for each y_j, whether j is of the own cluster (component 0), shape [m].
        means, sigmas, weights: mu_r, sigma_r and beta_r of components 0 and 1.
        steps: EM steps taken.
        separated: whether two Gaussians explain y better than one. If not, `same` is the initial
            assignment and the numbers are those of the last step.
    """

    same: Mask
    means: tuple[float, float]
    sigmas: tuple[float, float]
    weights: tuple[float, float]
    steps: int
    separated: bool


class _Mixture(NamedTuple):
    """mu_r, sigma_r and beta_r of components 0 and 1, each [2]."""

    means: Values
    sigmas: Values
    weights: Values

    def log_joint(self, y: Values) -> Values:
        """Return log beta_r + log phi(y_j | mu_r, sigma_r), shape [2, m]."""
        # [choice] log densities: far from both means the densities themselves underflow to a tie.
        z = (y - self.means[:, None]) / self.sigmas[:, None]
        scale = np.log(self.weights) - np.log(self.sigmas) - 0.5 * math.log(2 * math.pi)
        joint: Values = scale[:, None] - 0.5 * z**2
        return joint

    def assign(self, y: Values) -> Mask:
        """Return for each y_j [m] whether beta_0 phi_0 > beta_1 phi_1: the E step."""
        joint = self.log_joint(y)
        same: Mask = joint[0] > joint[1]
        # [choice] unequal sigmas would send the *most* similar peer to the wide component.
        same[y >= self.means[0]] = True
        same[y <= self.means[1]] = False
        return same


def separate(y: npt.ArrayLike, initial: npt.ArrayLike) -> Separation:
    """Split similarities y [m] into own cluster and strangers, from an initial assignment [m].

    `initial` is True for the members of the bag (S) and False for the others (C). The result does
    not depend on the order of y, nor on its scale and origin, and when two clusters were separated
    it is monotone: if it takes y_i for the own cluster, it takes every y_j >= y_i. Raises
    ValueError when y is empty or not finite or the shapes differ.
    """
    y, initial = np.asarray(y, dtype=np.float64), np.asarray(initial, dtype=np.bool_)
    if y.ndim != 1 or y.shape != initial.shape or not y.size or not np.isfinite(y).all():
        raise ValueError("similarities are one or more finite numbers, each with a flag")
    # Sorted values make every sum, and so every comparison, independent of the order given.
    order = np.lexsort((initial, y))
    result = _separate_sorted(y[order], initial[order])
    same = np.empty_like(initial)
    same[order] = result.same
    return result._replace(same=same)


def _separate_sorted(y: Values, initial: Mask) -> Separation:
    mean, spread = float(y.mean()), float(y.std())
    # [choice] Values that differ by rounding alone, or no more of them than parameters (five), say
    # nothing: with l <= 2 there are never more, and no bag changes.
    if y.size <= PARAMETERS[1] or spread <= 1e-9 * float(np.abs(y).max()):
        return Separation(initial, (mean, mean), (spread, spread), (1.0, 0.0), 0, separated=False)
    same = initial
    if same.all() or not same.any():
        # [choice] the paper starts from S and C; where one is missing, from those above the mean.
        same = y > mean
    steps = 0
    while steps < MAX_STEPS:
        steps += 1
        mixture = _fit(y, same, SIGMA_FLOOR * spread)
        before, same = same, mixture.assign(y)
        if same.all() or not same.any() or np.array_equal(before, same):
            break
    # [choice] a component that empties leaves one Gaussian, so nothing was told apart. As both are
    # otherwise inhabited, a bag that is updated never ends empty.
    separated = bool(same.any() and not same.all() and _two_are_better(y, same, mixture, spread))
    means, sigmas, weights = (tuple(part.tolist()) for part in mixture)
    return Separation(same if separated else initial, means, sigmas, weights, steps, separated)


def _fit(y: Values, same: Mask, floor: float) -> _Mixture:
    """Return the components' parameters from an assignment that uses both: the M step."""
    parts = [y[same], y[~same]]
    # [choice] the component of the higher mean is 0: an impure bag may have turned them round.
    if parts[0].mean() < parts[1].mean():
        parts.reverse()
    pooled = math.sqrt(sum(float(np.sum((part - part.mean()) ** 2)) for part in parts) / y.size)
    # [choice] one member has no spread of its own: it takes the pooled sigma. No sigma falls below
    # a floor relative to the spread of y: equal similarities would make a density infinite.
    sigmas = [max(floor, float(part.std()) if part.size > 1 else pooled) for part in parts]
    return _Mixture(
        np.array([part.mean() for part in parts]),
        np.array(sigmas),
        np.array([part.size / y.size for part in parts]),
    )


def _two_are_better(y: Values, same: Mask, mixture: _Mixture, spread: float) -> bool:
    """Return whether BIC prefers the two components with their assignment to one Gaussian.

    [choice] BIC decides whether the bag is touched at all. Two Gaussians are judged by the
    likelihood of the assignment, which is what hard EM climbs; so BIC also asks that they hardly
    overlap, and a bag is not torn up over noise.
    """
    joint = mixture.log_joint(y)
    two = float(np.where(same, joint[0], joint[1]).sum())
    one = -y.size * (math.log(spread) + 0.5 * math.log(2 * math.pi) + 0.5)
    return two - one > 0.5 * (PARAMETERS[1] - PARAMETERS[0]) * math.log(y.size)
