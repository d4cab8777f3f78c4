"""IFCA: c models; every peer trains the one that has the least loss on its own data.

A. Ghosh, J. Chung, D. Yin, K. Ramchandran, "An efficient framework for clustered federated
learning", 2020 (Algorithm 1, model averaging).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bootstrap.coordination import fedavg
from bootstrap.coordination.fedavg import Model
from peer.aggregation import Vector
from peer.plan import UNDEFENDED, DefencePlan


def aggregate(
    models: Sequence[Model],
    received: Mapping[int, Vector],
    identities: Mapping[int, int],
    weights: Mapping[int, float] | None = None,
    defence: DefencePlan = UNDEFENDED,
) -> list[Vector | Model]:
    """Return the c models after a round: each the mean of those its cluster's peers sent.

    With a `defence` it is what `fedavg.aggregate` makes of these.

    `received`, `identities` and `weights` are by peer. A cluster that nobody sent a model for keeps
    its own.
    """
    return [
        fedavg.aggregate(
            model, {i: sent for i, sent in received.items() if identities[i] == j}, weights, defence
        )
        for j, model in enumerate(models)
    ]
