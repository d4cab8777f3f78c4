"""The c models of IFCA as every node knows them: how they begin, and which of them is a peer's.

A. Ghosh, J. Chung, D. Yin, K. Ramchandran, "An efficient framework for clustered federated
learning", 2020.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from peer.learning.learner import Manifest, Vector
from peer.randomness import Purpose, generator


def initial_model(initial: Vector, manifest: Manifest, seed: int, j: int, draw: int = 0) -> Vector:
    """Return the initial model j of a draw (both from 0), the same wherever it is computed.

    Model 0 of draw 0 is w_0 = `initial` [e]. [choice] The others are w_0 with the values of each
    tensor shuffled: drawn from the same distribution, without the library that made w_0.
    """
    if j == 0 and draw == 0:
        return initial
    rng = generator(seed, Purpose.CLUSTER_MODELS, index=j, t=draw)
    tensors = manifest.unflatten(initial)
    return manifest.flatten(
        {name: rng.permutation(t.ravel()).reshape(t.shape) for name, t in tensors.items()}
    )


def initial_models(
    initial: Vector, manifest: Manifest, c: int, seed: int, draw: int = 0
) -> list[Vector]:
    """Return the c initial models of a draw."""
    return [initial_model(initial, manifest, seed, j, draw) for j in range(c)]


def best_model(losses: Sequence[float]) -> int:
    """Return the cluster identity of a peer: the model of the least of its `losses` [c].

    Ties go to the lower index; a loss that is not a number is never the least, unless all are.
    """
    return int(np.argmin(np.where(np.isnan(losses), np.inf, losses)))


def idle(identities: Collection[int], c: int) -> list[int]:
    """Return the models, of 0 to c - 1, that are nobody's best: a reason to draw anew."""
    return sorted(set(range(c)) - set(identities))
