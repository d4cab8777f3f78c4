"""IFCA: c models; every peer trains the one that has the least loss on its own data.

A. Ghosh, J. Chung, D. Yin, K. Ramchandran, "An efficient framework for clustered federated
learning", 2020 (Algorithm 1, model averaging).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from bootstrap.coordination import fedavg
from peer.aggregation import Vector
from peer.learning.learner import Manifest
from peer.randomness import Purpose, generator


def initial_models(
    initial: Vector, manifest: Manifest, c: int, seed: int, draw: int = 0
) -> list[Vector]:
    """Return the c initial models of a draw (counted from 0), the same wherever they are computed.

    Model 0 of draw 0 is w_0 = `initial` [e]. [choice] The others are w_0 with the values of each
    tensor shuffled: drawn from the same distribution, without the library that made w_0.
    """
    models = []
    for j in range(c):
        if j == 0 and draw == 0:
            models.append(initial)
            continue
        rng = generator(seed, Purpose.CLUSTER_MODELS, index=j, t=draw)
        tensors = manifest.unflatten(initial)
        models.append(
            manifest.flatten(
                {name: rng.permutation(t.ravel()).reshape(t.shape) for name, t in tensors.items()}
            )
        )
    return models


def best_model(losses: Sequence[float]) -> int:
    """Return the cluster identity of a peer: the model of the least of its `losses` [c].

    Ties go to the lower index; a loss that is not a number is never the least, unless all are.
    """
    return int(np.argmin(np.where(np.isnan(losses), np.inf, losses)))


def idle(identities: Collection[int], c: int) -> list[int]:
    """Return the models, of 0 to c - 1, that are nobody's best: a reason to draw anew."""
    return sorted(set(range(c)) - set(identities))


def aggregate(
    models: Sequence[Vector],
    received: Mapping[int, Vector],
    identities: Mapping[int, int],
    weights: Mapping[int, float] | None = None,
) -> list[Vector]:
    """Return the c models after a round: each the mean of those its cluster's peers sent.

    `received`, `identities` and `weights` are by peer. A cluster that nobody sent a model for keeps
    its own.
    """
    return [
        fedavg.aggregate(
            model, {i: sent for i, sent in received.items() if identities[i] == j}, weights
        )
        for j, model in enumerate(models)
    ]
