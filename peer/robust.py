"""Robust rules: what to make of several models of which some may be meant to harm.

Pure functions of models, each a flat float32 vector [e]; m is their number and f how many of them
may be Byzantine. Sums are taken in float64 over blocks, so that equal inputs give equal bits
everywhere and no rule holds a second copy of all models. All raise ValueError when there is no
model or their sizes differ.

Every guarantee is for models of *one* distribution. Among peers of hidden clusters it holds only as
far as the models given are of one cluster, and an honest stranger is an outlier like an attacker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from peer.aggregation import BLOCK, average

Vector = npt.NDArray[np.float32]
Values = npt.NDArray[np.float64]

FEW = 32
"""Models up to which ranks are found by comparing whole vectors."""


def norm(vector: Vector, origin: Vector | None = None) -> float:
    """Return the Euclidean norm of `vector` [e], or of its difference from `origin` [e]."""
    square = 0.0
    for start in range(0, vector.size, BLOCK):
        part = vector[start : start + BLOCK].astype(np.float64)
        if origin is not None:
            part -= origin[start : start + BLOCK]
        # np.sum rather than a BLAS product: its order does not depend on the number of threads.
        square += float(np.sum(part * part))
    return math.sqrt(square)


def clip_difference(centre: Vector, other: Vector, bound: float) -> Vector:
    """Return centre + d min(1, bound / ||d||) [e] with d = other - centre: norm clipping.

    Z. Sun, P. Kairouz, A. T. Suresh, H. B. McMahan, "Can you really backdoor federated learning?",
    2019.
    """
    _check([centre, other])
    length = norm(other, centre)
    return other if length <= bound else _towards(centre, other, bound / length)


def _towards(centre: Vector, other: Vector, share: float) -> Vector:
    moved = np.empty_like(centre)
    for start in range(0, centre.size, BLOCK):
        block = slice(start, start + BLOCK)
        begin = centre[block].astype(np.float64)
        moved[block] = begin + share * (other[block] - begin)
    return moved


def median(models: Sequence[Vector]) -> Vector:
    """Return the coordinate-wise median [e]; of an even number, the mean of the middle two.

    D. Yin, Y. Chen, K. Ramchandran, P. Bartlett, "Byzantine-robust distributed learning: towards
    optimal statistical rates", 2018, Definition 1.
    """
    _check(models)
    middle = (len(models) - 1) // 2
    return _mean_of_ranks(models, middle, len(models) - middle)


def trimmed_mean(models: Sequence[Vector], f: int) -> Vector:
    """Return the coordinate-wise mean [e] without the f largest and the f smallest values.

    Yin et al. 2018, Definition 2. [choice] Of m <= 2 f models as many are trimmed as leave one or
    two: the median.
    """
    _check(models)
    f = min(f, (len(models) - 1) // 2)
    return _mean_of_ranks(models, f, len(models) - f)


def _mean_of_ranks(models: Sequence[Vector], first: int, stop: int) -> Vector:
    """Return the mean, coordinate by coordinate, of the values of rank `first` to `stop` - 1."""
    mean = np.empty_like(models[0])
    for start in range(0, mean.size, BLOCK):
        block = slice(start, start + BLOCK)
        ordered = _ordered([model[block] for model in models])
        mean[block] = np.mean(ordered[first:stop], axis=0, dtype=np.float64)
    return mean


def _ordered(rows: Sequence[Vector]) -> list[Vector]:
    """Return as many vectors, the values of each coordinate ascending from the first to the last.

    A few rows go through a network of comparisons of whole vectors: sorting one short column after
    the other takes several times as long.
    """
    if len(rows) > FEW:
        return list(np.sort(np.stack(rows), axis=0))
    ordered = list(rows)
    for turn in range(len(ordered)):  # odd-even transposition
        for i in range(turn % 2, len(ordered) - 1, 2):
            low, high = ordered[i : i + 2]
            ordered[i : i + 2] = np.minimum(low, high), np.maximum(low, high)
    return ordered


def krum_scores(models: Sequence[Vector], f: int) -> list[float]:
    """Return each model's Krum score: the sum of its squared distances to the m - f - 2 closest.

    P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer, "Machine learning with adversaries:
    Byzantine tolerant gradient descent", 2017, Section 4. The guarantee asks for m >= 2 f + 3.
    [choice] With fewer models f is taken as large as that allows, at least 0.
    """
    _check(models)
    m = len(models)
    f = tolerated(m, f)
    squares = np.zeros((m, m))
    for i in range(m):
        for j in range(i):
            squares[i, j] = squares[j, i] = norm(models[i], models[j]) ** 2
    closest = max(0, m - f - 2)
    scores = []
    for i in range(m):
        others = np.sort(np.delete(squares[i], i))
        scores.append(float(others[:closest].sum()))
    return scores


def tolerated(m: int, f: int) -> int:
    """Return how many of m models Krum takes for Byzantine when it is told f."""
    return max(0, min(f, (m - 3) // 2))


def krum(models: Sequence[Vector], f: int) -> Vector:
    """Return the model [e] of the least Krum score. [choice] Ties go to the first."""
    scores = krum_scores(models, f)
    return models[scores.index(min(scores))].copy()


def multi_krum(models: Sequence[Vector], f: int) -> Vector:
    """Return the mean [e] of the m - f models of the least Krum scores (Blanchard et al. 2017)."""
    scores = krum_scores(models, f)
    kept = len(models) - tolerated(len(models), f)
    chosen = sorted(sorted(range(len(models)), key=lambda i: (scores[i], i))[:kept])
    first, *others = (models[i] for i in chosen)
    return average(first, others)


def centred_clipping(models: Sequence[Vector], centre: Vector, radius: float, steps: int) -> Vector:
    """Return v after `steps` >= 1 of v <- v + mean_i (x_i - v) min(1, radius / ||x_i - v||), [e].

    v starts at `centre`: the last aggregate, or what stands for it. S. P. Karimireddy, L. He, M.
    Jaggi, "Learning from history for Byzantine robust optimization", 2021, equation (CC). One step
    is norm clipping and the mean.
    """
    _check(models)
    _check([centre, models[0]])
    for _ in range(steps):
        lengths = [norm(model, centre) for model in models]
        shares = [1.0 if length <= radius else radius / length for length in lengths]
        moved = np.empty_like(centre)
        for start in range(0, centre.size, BLOCK):
            block = slice(start, start + BLOCK)
            begin = centre[block].astype(np.float64)
            step = np.zeros_like(begin)
            for model, share in zip(models, shares, strict=True):
                step += share * (model[block] - begin)
            moved[block] = begin + step / len(models)
        centre = moved
    return centre


def _check(models: Sequence[Vector]) -> None:
    if not models:
        raise ValueError("there is no model to make one of")
    if any(model.shape != models[0].shape for model in models):
        raise ValueError("models of different sizes cannot be compared")
