"""How much another peer's model looks as if it came from one's own cluster: s_ij."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]

LOSS_FLOOR = 1e-12
"""A mean loss below this counts as this, so that a perfect model's similarity stays finite."""


class GradientEvidence(NamedTuple):
    """What PANM-Grad compares: two vectors, or the CountSketches of both.

    g = w^{t-1/2} - w^{t-1} is the local update of the round, h = w^{t-1/2} - w_0 the whole way from
    the initial model; trainable values only.
    """

    g: Vector
    h: Vector


def cosine(a: Vector, b: Vector) -> float:
    """Return the cosine of two vectors [m], in [-1, 1].

    A zero vector has no direction and gives 0.0, and so does a vector that is not finite (one's own
    model may diverge; nobody resembles it). Raises ValueError when the shapes differ.
    """
    if a.shape != b.shape:
        raise ValueError(f"no cosine between vectors of {a.shape} and {b.shape}")
    # np.sum rather than a BLAS product: its pairwise order does not depend on the number of
    # threads, so peers that run with different settings still choose the same neighbours.
    with np.errstate(invalid="ignore", over="ignore"):
        dot, aa, bb = (
            float(np.sum(np.multiply(x, y, dtype=np.float64))) for x, y in ((a, b), (a, a), (b, b))
        )
    return _ratio(dot, math.sqrt(aa) * math.sqrt(bb))


def gradient_similarity(
    own: GradientEvidence, other: GradientEvidence, alpha: float, fade: float = 0.0
) -> float:
    """Return s_ij = alpha cos(g_i, g_j) + (1 - alpha) cos(h_i, h_j) (PANM-Grad), in [-1, 1].

    Sketches are compared by the same formula: a cosine of sketches estimates that of the vectors.
    With `fade`, alpha is what `faded` makes of it.
    """
    weight = faded(alpha, fade, _norm(own.g), _norm(own.h))
    return weight * cosine(own.g, other.g) + (1 - weight) * cosine(own.h, other.h)


def faded(alpha: float, fade: float, g: float, h: float) -> float:
    """Return alpha where ||g_i|| >= fade ||h_i||, and less in proportion to a smaller ||g_i||.

    `g` and `h` are the two norms of one's own. [choice] Once models have converged, an update is
    what averaging with one's like undoes in every round: the g of a cluster cancel, their cosines
    are below those to strangers, and the paper's sum (`fade` = 0) takes strangers for one's like.
    The smaller an update is beside the whole way, the less it tells.
    """
    return alpha * (g / (fade * h)) if 0 <= g < fade * h < math.inf else alpha


def _norm(vector: Vector) -> float:
    """Return the Euclidean norm, which may be infinite or not a number."""
    with np.errstate(invalid="ignore", over="ignore"):
        return math.sqrt(float(np.sum(np.multiply(vector, vector, dtype=np.float64))))


def gradient_similarities(
    own: GradientEvidence, others: Sequence[GradientEvidence], alpha: float, fade: float = 0.0
) -> list[float]:
    """Return the `gradient_similarity` with each of `others`: the same bits, for less Python."""
    if not others:
        return []
    g = _cosines(own.g, np.stack([other.g for other in others]))
    h = _cosines(own.h, np.stack([other.h for other in others]))
    weight = faded(alpha, fade, _norm(own.g), _norm(own.h))
    return [weight * a + (1 - weight) * b for a, b in zip(g, h, strict=True)]


def _cosines(own: Vector, others: Vector) -> list[float]:
    """Return the `cosine` of `own` [m] with each row of `others` [c, m]."""
    norm = _norm(own)
    with np.errstate(invalid="ignore", over="ignore"):
        dots, squares = (
            np.sum(np.multiply(x, others, dtype=np.float64), axis=1).tolist() for x in (own, others)
        )
    return [
        _ratio(dot, norm * math.sqrt(square)) for dot, square in zip(dots, squares, strict=True)
    ]


def _ratio(dot: float, norms: float) -> float:
    """Return dot / norms as a cosine, 0.0 where it means nothing."""
    if not 0.0 < norms < math.inf or not math.isfinite(dot):
        return 0.0
    return max(-1.0, min(1.0, dot / norms))


def loss_similarity(loss: float) -> float:
    """Return s_ij = 1 / F_i(w_j) of a mean loss F_i(w_j) on one's own training data (PANM-Loss).

    A loss that is not finite gives 0.0, the least similarity there is.
    """
    return 1.0 / max(loss, LOSS_FLOOR) if math.isfinite(loss) else 0.0
