"""FedAvg: one model, trained by those who take part in the round, then their mean.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas, "Communication-efficient learning
of deep networks from decentralized data", 2017.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from peer.aggregation import Vector
from peer.defence import pool
from peer.matching.selection import draw
from peer.plan import UNDEFENDED, DefencePlan
from peer.randomness import Purpose, generator

Model = TypeVar("Model", bound=Vector | None)
"""A model, or None where only the peers know it yet: their initial one."""


def participants(known: Collection[int], fraction: float, seed: int, t: int) -> list[int]:
    """Return who takes part in round t: a share of the `known` peers drawn uniformly, sorted.

    [choice] fraction * len(known) to the nearest whole number, halves to the even one, at least one
    peer. Raises ValueError unless 0 < fraction <= 1.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"{fraction} is not a share of the peers")
    size = max(1, round(fraction * len(known)))
    return draw(known, size, generator(seed, Purpose.PARTICIPANTS, t=t))


def aggregate(
    model: Model,
    received: Mapping[int, Vector],
    weights: Mapping[int, float] | None = None,
    defence: DefencePlan = UNDEFENDED,
) -> Vector | Model:
    """Return the mean [e] of the models received, by peer; `model` itself when there are none.

    `model` is what they were trained from. All count equally unless `weights` (sample counts, say)
    are given, one for every peer at least that a model came from. With a `defence` it is not the
    mean but what `peer.defence.pool` makes of them. Raises ValueError as that does.
    """
    if not received:
        return model
    senders = sorted(received)
    shares = None if weights is None else [weights[i] for i in senders]
    return pool(defence, model, [received[i] for i in senders], shares)
