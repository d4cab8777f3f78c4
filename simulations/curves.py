"""What a run's rows come to over rounds, time and bytes, and bands of several runs over seeds.

Pure arithmetic on rows; `simulations.figures*` draw what comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from peer.rundir import MetricRow

Values = npt.NDArray[np.float64]
Measure = Literal["accuracy", "loss", "precision", "recall"]
"""A figure of a row of metrics that may be missing."""

MOST = 0.9
"""Share of the peers that a mean over time waits for."""
POINTS = 200
"""Points of a band whose runs were not measured at the same places."""


class Curve(NamedTuple):
    """Values y [m] over increasing places x [m]."""

    x: Values
    y: Values


class Band(NamedTuple):
    """The mean [m] of several curves over places x [m], and their sample standard deviation [m].

    The deviation is None where there is one curve only.
    """

    x: Values
    mean: Values
    sd: Values | None


def over_rounds(rows: Sequence[MetricRow], measure: Measure = "accuracy") -> Curve:
    """Return the mean over peers in every round in which any of them has the measure."""
    by_round: dict[int, list[float]] = {}
    for row in rows:
        if (value := getattr(row, measure)) is not None:
            by_round.setdefault(row.t, []).append(value)
    rounds = sorted(by_round)
    means = [np.mean(by_round[t]) for t in rounds]
    return Curve(np.array(rounds, dtype=np.float64), np.array(means, dtype=np.float64))


def over_time(
    n: int, rows: Sequence[MetricRow], points: int = 400
) -> tuple[Values, Values, Values]:
    """Return at most `points` times [m], every peer's accuracy then [m, n] (NaN before its first),
    and the payload bytes received by then, the mean over all n peers [m].

    Times are seconds since the first peer began, from when `MOST` of the peers have an accuracy on:
    a mean over those who are first would rise and fall with who is there. A peer's accuracy holds
    until its next round ends.
    """
    judged = sorted((row for row in rows if row.accuracy is not None), key=lambda row: row.time)
    if not judged:
        return np.empty(0), np.empty((0, n)), np.empty(0)
    began = start_of(rows)
    times = np.unique([row.time - began for row in judged])
    if len(times) > points:
        times = np.linspace(times[0], times[-1], points)
    accuracy = np.full((len(times), n), np.nan)
    payload = np.zeros(len(times))
    by_peer: dict[int, list[MetricRow]] = {}
    for row in judged:
        by_peer.setdefault(row.index, []).append(row)
    for i, own in sorted(by_peer.items()):
        place = np.searchsorted([row.time - began for row in own], times, side="right") - 1
        there = place >= 0
        values = np.array([row.accuracy for row in own], dtype=np.float64)
        received = np.array([row.payload_received for row in own], dtype=np.float64)
        accuracy[there, i] = values[place[there]]
        payload[there] += received[place[there]] / n
    known = np.isfinite(accuracy).sum(axis=1)
    first = int(np.argmax(known >= MOST * known.max(initial=0)))
    return times[first:], accuracy[first:], payload[first:]


def start_of(rows: Sequence[MetricRow]) -> float:
    """Return when the first peer began its first round, on the clock of the rows; 0 of no rows."""
    return min((row.time - row.seconds.round for row in rows), default=0.0)


def has_time(rows: Sequence[MetricRow]) -> bool:
    """Tell whether rounds took time of their own: in the laboratory all peers share a machine."""
    return any(row.seconds.round > 0 for row in rows)


def band(curves: Sequence[Curve]) -> Band:
    """Return the band of curves: at their places where all have the same, else at `POINTS` places
    that all of them cover, linearly between theirs.

    Raises ValueError when there is no curve, or one of them has no point.
    """
    if not curves or not all(len(curve.x) for curve in curves):
        raise ValueError("a band is of one or more curves, each of one or more points")
    first = curves[0].x
    if all(np.array_equal(curve.x, first) for curve in curves):
        x = first
    else:
        low = max(curve.x[0] for curve in curves)
        x = np.linspace(low, max(low, min(curve.x[-1] for curve in curves)), POINTS)
    values = np.array([np.interp(x, curve.x, curve.y) for curve in curves])
    sd = values.std(axis=0, ddof=1) if len(curves) > 1 else None
    return Band(x, values.mean(axis=0), sd)
