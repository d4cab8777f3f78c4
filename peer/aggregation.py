"""How models are mixed: pure functions of one's own model and those of the neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]


BLOCK = 16_384
"""Values that are averaged at a time."""


def average(
    own: Vector, others: Sequence[Vector], weights: Sequence[float] | None = None
) -> Vector:
    """Return the mean of `own` [e] and `others` (each [e]): w_i^t of PANM's aggregation step.

    [choice] all count equally, oneself included, unless `weights` are given: one for oneself and
    one for each of the others, for example their numbers of training samples. Sums are taken in
    float64 in the order given, so that equal inputs give equal bits everywhere.

    Raises ValueError when the shapes differ, or the weights are not as many as the models, finite,
    at least 0 and positive in sum.
    """
    if any(other.shape != own.shape for other in others):
        raise ValueError("models of different sizes cannot be averaged")
    models = [own, *others]
    shares = np.ones(len(models)) if weights is None else np.asarray(weights, dtype=np.float64)
    if (
        shares.shape != (len(models),)
        or not np.isfinite(shares).all()
        or shares.min() < 0
        or shares.sum() <= 0
    ):
        raise ValueError(f"{weights!r} are not the weights of {len(models)} models")
    mean = np.empty_like(own)
    # By blocks: the float64 sums stay in the cache, and no second copy of the models is made.
    for start in range(0, own.size, BLOCK):
        block = slice(start, start + BLOCK)
        total = np.zeros(own[block].shape)
        for model, share in zip(models, shares, strict=True):
            total += share * model[block].astype(np.float64)
        mean[block] = total / shares.sum()
    return mean


def with_own_statistics(mixed: Vector, own: Vector, trainable: int) -> Vector:
    """Return `mixed` [e] with all behind its first `trainable` values as it is in `own` [e].

    What training does not change by its steps, BatchNorm's running statistics, describes a peer's
    own data. M. Andreux, J. Ogier du Terrail, C. Beguier, E. W. Tramel, "Siloed federated learning
    for multi-centric histopathology datasets", 2020 (SiloBN).
    """
    return np.concatenate([mixed[:trainable], own[trainable:]])
