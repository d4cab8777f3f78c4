"""What is made of models received: of its neighbours' by a peer, of a cluster's by a coordinator.

In this order: the gate asks which of them serve on samples that nobody trained on, which only peers
have; norm clipping bounds how far each can move; the rule makes one model of them. Live federations
and the laboratory mix by this one definition. None of it tells an attacker from an honest stranger,
and none sees a backdoor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

from peer import robust
from peer.aggregation import Vector, average
from peer.plan import DefencePlan

Judge = Callable[[list[Vector]], list[float]]
"""Models, each [e] -> their losses on one's own held-out samples."""


class Measure(NamedTuple):
    """What differences are taken from, [e], and what their lengths are measured by."""

    centre: Vector
    length: float


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
    models = [own, *(received[j] for j in used)]
    if weights is not None:
        shares = dict(zip(received, weights[1:], strict=True))
        weights = [weights[0], *(shares[j] for j in used)]

    def measure() -> Measure:
        # [choice] from one's own model, as peers have no common one to take differences from (L.
        # He, S. P. Karimireddy, M. Jaggi, "Byzantine-robust decentralized learning via
        # ClippedGossip", 2022).
        return Measure(own, robust.norm(own, before))

    return Mixed(combine(defence, models, weights, measure), used, refused)


def pool(
    defence: DefencePlan,
    centre: Vector | None,
    received: Sequence[Vector],
    weights: Sequence[float] | None,
) -> Vector:
    """Return what a coordinator makes of the models received from a cluster, each [e].

    `centre` [e] is the model that they were trained from; None when the coordinator does not know
    it: [choice] the coordinate-wise median of those received then stands for it. Lengths are
    measured by the median of ||w_i - centre||, in which attackers have no say but to make it
    shorter while at least half are honest: the adaptive clipping of T. D. Nguyen, P. Rieger, H.
    Chen et al., "FLAME: taming backdoors in federated learning", 2022, algorithm 1. [choice] Of an
    even number, the lower one of the middle two. The gate is for peers: it is not asked. Raises
    ValueError as `average` does.
    """

    def measure() -> Measure:
        begin = robust.median(received) if centre is None else centre
        return Measure(begin, median_low(robust.norm(model, begin) for model in received))

    return combine(defence, received, weights, measure)


def combine(
    defence: DefencePlan,
    models: Sequence[Vector],
    weights: Sequence[float] | None,
    measure: Callable[[], Measure],
) -> Vector:
    """Return one model [e] of several by the defence's clipping and rule.

    `weights`: of the models, None for equal ones. `measure` is asked only where lengths count.
    Raises ValueError as `average` does.
    """
    centre, length = measure() if defence.measures else Measure(models[0], math.inf)
    if defence.clip is not None:
        bound = defence.clip * length
        models = [robust.clip_difference(centre, model, bound) for model in models]
    match defence.rule:
        case "mean":
            return average(models[0], models[1:], weights)
        case "median":
            return robust.median(models)
        case "trimmed-mean":
            return robust.trimmed_mean(models, defence.byzantine)
        case "krum":
            return robust.krum(models, defence.byzantine)
        case "multi-krum":
            return robust.multi_krum(models, defence.byzantine)
        case "centred-clipping":
            return robust.centred_clipping(models, centre, defence.radius * length, defence.steps)
