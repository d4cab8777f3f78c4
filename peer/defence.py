"""What a peer does with the models that it received before they become part of its own.

In this order: the gate asks which of them serve on samples that nobody trained on; norm clipping
bounds how far each can move; the rule makes one model of them. Live peers and the laboratory mix by
this one definition. None of it tells an attacker from an honest stranger, and none sees a backdoor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from peer import robust
from peer.aggregation import Vector, average
from peer.plan import DefencePlan

Judge = Callable[[list[Vector]], list[float]]
"""Models, each [e] -> their losses on one's own held-out samples."""


class Mixed(NamedTuple):
    """What a mixing came to: w_i^t [e], whose models are in it, and whose the gate refused."""

    model: Vector
    used: list[int]
    refused: list[int]


def admitted(loss: float, own: float, defence: DefencePlan) -> bool:
    """Tell whether the gate lets in a model of such a held-out loss, beside that of one's own."""
    return math.isfinite(loss) and loss <= defence.gate_ratio * own + defence.gate_margin


def refusals(refused: Sequence[int]) -> dict[str, list[int]]:
    """Return the note of the metrics that says whom the gate refused, if anybody."""
    return {"refused": list(refused)} if refused else {}


def mix(
    defence: DefencePlan,
    own: Vector,
    before: Vector,
    received: Mapping[int, Vector],
    *,
    weights: Sequence[float] | None,
    judge: Judge,
) -> Mixed:
    """Return w_i^t from w_i^{t-1/2} (`own`), w_i^{t-1} (`before`) and the models received, by peer.

    `weights`: of [own, *received], None for equal ones. `judge` is asked by the gate alone. Lengths
    are measured by the norm of one's own update of the round, ||own - before||, which no other peer
    has a say in. Raises ValueError as `average` does.
    """
    used = list(received)
    if defence.gate and received:
        at_home, *losses = judge([own, *received.values()])
        used = [
            j for j, loss in zip(received, losses, strict=True) if admitted(loss, at_home, defence)
        ]
    refused = [j for j in received if j not in used]
    others = [received[j] for j in used]
    if weights is not None:
        shares = dict(zip(received, weights[1:], strict=True))
        weights = [weights[0], *(shares[j] for j in used)]
    if defence.clip is not None and others:
        bound = defence.clip * robust.norm(own, before)
        others = [robust.clip_difference(own, other, bound) for other in others]
    return Mixed(_combine(defence, own, before, others, weights), used, refused)


def _combine(
    defence: DefencePlan,
    own: Vector,
    before: Vector,
    others: Sequence[Vector],
    weights: Sequence[float] | None,
) -> Vector:
    models = [own, *others]
    match defence.rule:
        case "mean":
            return average(own, others, weights)
        case "median":
            return robust.median(models)
        case "trimmed-mean":
            return robust.trimmed_mean(models, defence.byzantine)
        case "krum":
            return robust.krum(models, defence.byzantine)
        case "multi-krum":
            return robust.multi_krum(models, defence.byzantine)
        case "centred-clipping":
            radius = defence.radius * robust.norm(own, before)
            return robust.centred_clipping(models, radius, defence.steps)
