"""The pictures of a run of CFL: norms against thresholds, cosines, and the accuracy per cluster.

Pure drawing: rows in, `Figure` out, as the figures of F. Sattler, K.-R. Müller, W. Samek,
"Clustered federated learning", 2019, section VI. Colours of accuracies stand for true clusters,
those of norms and cosines for nodes of the parameter tree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from peer.display import CLUSTER_COLOURS
from peer.learning.names import TEXT_MODELS
from peer.plan import Plan
from peer.rundir import MetricRow
from simulations.figures import FAINT, INK, MUTED, STYLE, title

Attempt = dict[str, Any]
"""What a coordinator says of splitting one cluster in one round (`Attempt.to_json` of CFL)."""
Points = list[tuple[int, float]]

MAX_NAMED = 12
"""Nodes that the legend names."""


def attempts_of(rows: Sequence[MetricRow]) -> dict[int, list[Attempt]]:
    """Return the attempts to split that the rows tell of, by node of the tree and in order."""
    found: dict[int, list[Attempt]] = {}
    for row in sorted(rows, key=lambda row: row.t):
        if (attempt := row.notes.get("attempt")) is not None:
            found.setdefault(attempt["node"], []).append(attempt)
    return dict(sorted(found.items()))


def splits_of(attempts: Mapping[int, Sequence[Attempt]]) -> list[int]:
    """Return the rounds in which nodes were split, one for each split, in order."""
    told = (attempt for own in attempts.values() for attempt in own)
    return sorted(attempt["t"] for attempt in told if attempt["children"] is not None)


def clustering_figure(plan: Plan, rows: Sequence[MetricRow]) -> Figure:
    """Return accuracy, norms and cosines over the rounds, one below the other, splits marked.

    Raises ValueError when the rows tell of no attempts: then this was no run of CFL.
    """
    attempts = attempts_of(rows)
    if not attempts:
        raise ValueError("the rows tell of no attempts to split")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 9.0), layout="constrained")
        FigureCanvasAgg(figure)
        accuracy, norms, cosines = figure.subplots(3, 1, sharex=True)
        draw_accuracy(accuracy, rows, text=plan.model in TEXT_MODELS)
        draw_norms(norms, attempts)
        draw_cosines(cosines, attempts)
        rounds = splits_of(attempts)
        for axes in (accuracy, norms, cosines):
            for t in rounds:
                axes.axvline(t, color=MUTED, lw=0.8, zorder=0)
        if rounds:
            accuracy.annotate("splits" if len(rounds) > 1 else "split", (rounds[-1], 1), (3, -3),
                              xycoords=("data", "axes fraction"), textcoords="offset points",
                              va="top", fontsize=8, color=MUTED)  # fmt: skip
        title(accuracy, plan, "How the clusters came apart")
        cosines.set_xlabel("round")
        cosines.set_xlim(1, max(2, *(row.t for row in rows)))
        cosines.xaxis.set_major_locator(MaxNLocator(integer=True))
        return figure


def draw_accuracy(axes: Axes, rows: Sequence[MetricRow], *, text: bool = False) -> None:
    """Draw the mean accuracy of each true cluster's peers, of `text` their perplexity."""
    measured: dict[int, dict[int, list[float]]] = {}
    for row in rows:
        if (value := row.loss if text else row.accuracy) is not None:
            by_round = measured.setdefault(row.cluster or 0, {})
            by_round.setdefault(row.t, []).append(value)
    for cluster, by_round in sorted(measured.items()):
        means = [(t, fmean(values)) for t, values in sorted(by_round.items())]
        points = [(t, math.exp(mean) if text else 100 * mean) for t, mean in means]
        _draw(axes, points, cluster, label=f"cluster {cluster}")
    axes.set_ylabel("perplexity" if text else "accuracy, %")
    axes.grid(axis="y")
    if len(measured) > 1:
        axes.legend(loc="upper right" if text else "lower right")


def draw_norms(axes: Axes, attempts: dict[int, list[Attempt]]) -> None:
    """Draw each node's mean update against eps1, and its largest member's against eps2."""
    for v, told in attempts.items():
        _draw(axes, _points(told, "mean_norm"), v)
        _draw(axes, _points(told, "max_norm"), v, ls=(0, (4, 2)), lw=1.2)
    for name in ("eps1", "eps2"):
        highest: dict[int, float] = {}
        for told in attempts.values():
            for t, value in _points(told, name):
                highest[t] = max(value, highest.get(t, 0.0))
        points = sorted(highest.items())
        axes.plot(*zip(*points, strict=True), color=MUTED, lw=1.0, ls=(0, (1, 1.5)))
        axes.annotate(name, points[-1], (4, 0), textcoords="offset points", va="center",
                      color=MUTED, annotation_clip=False)  # fmt: skip
    axes.set_ylabel("norm of updates")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    styles = [Line2D([], [], color=INK, lw=1.6), Line2D([], [], color=INK, lw=1.2, ls=(0, (4, 2)))]
    axes.legend(styles, ["mean of the cluster", "largest of a member"], loc="upper right")


def draw_cosines(axes: Axes, attempts: dict[int, list[Attempt]]) -> None:
    """Draw alpha_cross_max of each node's best cut, and its separation gap where it is known."""
    for v, told in attempts.items():
        _draw(axes, _points(told, "cross_max"), v, label=f"node {v}")
        _draw(axes, _points(told, "gap"), v, ls=(0, (4, 2)), lw=1.2)
    axes.axhline(0, color=FAINT, lw=0.8, zorder=0)
    axes.set_ylabel("cosine")
    axes.grid(axis="y")
    handles, labels = axes.get_legend_handles_labels()
    handles, labels = handles[:MAX_NAMED], labels[:MAX_NAMED]
    handles.append(Line2D([], [], color=INK, lw=1.2, ls=(0, (4, 2))))
    axes.legend(handles, [*labels, "separation gap"], loc="upper right", ncols=2,
                title=r"$\alpha_{cross}^{max}$")  # fmt: skip


def _points(told: Sequence[Attempt], name: str) -> Points:
    return [(attempt["t"], attempt[name]) for attempt in told if attempt.get(name) is not None]


def _draw(axes: Axes, points: Points, number: int, **style: Any) -> None:
    """Draw a line in the colour of a number; one point alone as a dot."""
    if points:
        colour = CLUSTER_COLOURS[number % len(CLUSTER_COLOURS)]
        marker = "o" if len(points) == 1 else None
        axes.plot(*zip(*points, strict=True), **{"lw": 1.6, **style}, color=colour, marker=marker)
