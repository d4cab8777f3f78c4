"""How much another peer's model looks as if it came from one's own cluster: s_ij."""

from __future__ import annotations

import math
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
    norms = math.sqrt(aa) * math.sqrt(bb)
    if not 0.0 < norms < math.inf or not math.isfinite(dot):
        return 0.0
    return max(-1.0, min(1.0, dot / norms))


def gradient_similarity(own: GradientEvidence, other: GradientEvidence, alpha: float) -> float:
    """Return s_ij = alpha cos(g_i, g_j) + (1 - alpha) cos(h_i, h_j) (PANM-Grad), in [-1, 1].

    Sketches are compared by the same formula: a cosine of sketches estimates that of the vectors.
    """
    return alpha * cosine(own.g, other.g) + (1 - alpha) * cosine(own.h, other.h)


def loss_similarity(loss: float) -> float:
    """Return s_ij = 1 / F_i(w_j) of a mean loss F_i(w_j) on one's own training data (PANM-Loss).

    A loss that is not finite gives 0.0, the least similarity there is.
    """
    return 1.0 / max(loss, LOSS_FLOOR) if math.isfinite(loss) else 0.0
