"""The pictures of a run: accuracy over rounds, and who averaged with whom.

Pure drawing: rows in, `Figure` out. One style for all of them; colours stand for true clusters and
keep apart for colour-blind eyes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from peer.display import CLUSTER_COLOURS, human_bytes
from peer.plan import Plan
from peer.rundir import MetricRow, TopologyRow
from simulations.curves import Curve, Measure, Values, has_time, over_rounds, over_time

INK = "#1F2430"
MUTED = "#6B7280"
FAINT = "#D5D9E0"
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": "white",
    "savefig.dpi": 160,
    "savefig.bbox": "tight",
    "savefig.pad_inches": 0.2,
    "svg.fonttype": "none",
    "svg.hashsalt": "panmesh",
}
COUNTS = LinearSegmentedColormap.from_list("counts", ["#FFFFFF", "#9DBEDB", "#2F6DA8", "#0B2545"])
COSINES = LinearSegmentedColormap.from_list("cosines", ["#B35806", "#FFFFFF", "#0B4F8A"])
METHOD_COLOURS = {
    "panm-grad": CLUSTER_COLOURS[0],
    "pens": CLUSTER_COLOURS[1],
    "cfl": CLUSTER_COLOURS[2],
    "random": CLUSTER_COLOURS[3],
    "panm-loss": CLUSTER_COLOURS[4],
    "ifca": CLUSTER_COLOURS[5],
    "fixed": CLUSTER_COLOURS[6],
    "fedavg": CLUSTER_COLOURS[7],
    "local": MUTED,
    "oracle": "#000000",
}
"""A method has the same colour in every picture; `local` and `oracle` are no contestants."""
MAX_TICKS = 40
MAX_NUMBERS = 12
MAX_LABELS = 60

Points = Sequence[tuple[float, float]]


def accuracy_figure(
    plan: Plan, rows: Sequence[MetricRow], references: Mapping[str, Points] | None = None
) -> Figure:
    """Return accuracy over rounds: each peer thin, the mean thick, other methods' means broken.

    `references` maps a method to its mean accuracy as (t, share) points.
    """
    with mpl.rc_context(STYLE):
        figure, axes = single_figure(plan, "Accuracy on each peer's own test set", (7.6, 4.6))
        for cluster, peers in by_cluster(rows).items():
            for points in peers.values():
                axes.plot(*zip(*points, strict=True), color=colour_of(cluster), lw=0.9, alpha=0.55)
        ends = [_draw_mean(axes, plan.method, over_rounds(rows))]
        styles = [(0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5))]
        for (method, curve), dashes in zip((references or {}).items(), styles, strict=False):
            line = axes.plot(*zip(*curve, strict=True), color=MUTED, lw=1.8, ls=dashes)
            ends.append((curve[-1][1], f"{method} {100 * curve[-1][1]:.1f}", line[0].get_color()))
        axes.set_xlabel("round")
        axes.set_ylabel("accuracy, %")
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y")
        axes.set_xlim(left=min(1, plan.rounds - 1), right=plan.rounds)
        _mark_stage_two(axes, plan)
        label_ends(axes, ends)
        cluster_legend(axes, sorted(by_cluster(rows)), loc="lower right")
        return figure


def perplexity_figure(plan: Plan, rows: Sequence[MetricRow]) -> Figure:
    """Return perplexity over rounds: each peer thin, that of all peers' test words thick."""
    with mpl.rc_context(STYLE):
        figure, axes = single_figure(plan, "Perplexity on each peer's own test set", (7.6, 4.6))
        clusters = by_cluster(rows, "loss")
        for cluster, peers in clusters.items():
            for points in peers.values():
                ts, losses = zip(*points, strict=True)
                axes.plot(ts, np.exp(losses), color=colour_of(cluster), lw=0.9, alpha=0.55)
        curve = over_rounds(rows, "loss")
        if len(curve.x):
            mean = np.exp(curve.y)
            axes.plot(curve.x, mean, color=INK, lw=2.8, zorder=4)
            label_ends(axes, [(float(mean[-1]), f"{plan.method} {mean[-1]:.1f}", INK)])
        axes.set_xlabel("round")
        axes.set_ylabel("perplexity")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y")
        axes.set_xlim(left=min(1, plan.rounds - 1), right=plan.rounds)
        cluster_legend(axes, sorted(clusters), loc="upper right")
        return figure


def heatmap_figure(plan: Plan, topology: Sequence[TopologyRow]) -> Figure:
    """Return who averaged with whom: in how many rounds row i took column j's model.

    Peers are ordered by true cluster and framed by it, as in the heatmaps of the PANM paper.
    """
    with mpl.rc_context(STYLE):
        peers = _clusters(plan, topology)
        side = float(np.clip(0.2 * len(peers), 4.6, 7))
        figure, axes = single_figure(plan, "Who averaged with whom", (side + 1.4, side + 0.9))
        image, order, counts = draw_counts(axes, plan, topology)
        _name_peers(axes, order)
        if len(order) <= MAX_NUMBERS:
            _write_counts(axes, counts)
        gap = 4.0 if len(order) <= MAX_TICKS else 14.0
        axes.set_xlabel("model of peer j", labelpad=gap)
        axes.set_ylabel("averaged at peer i", labelpad=gap)
        bar = figure.colorbar(image, ax=axes, shrink=0.82, pad=0.03, aspect=28)
        bar.set_label(f"rounds, of {max((row.t for row in topology), default=0)}")
        bar.locator = MaxNLocator(integer=True)
        bar.update_ticks()
        bar.outline.set_visible(False)
        return figure


def similarity_figure(plan: Plan, peers: Sequence[int], cosines: Values) -> Figure:
    """Return the cosines [m, m] between the models of `peers`, by true cluster and framed by it."""
    with mpl.rc_context(STYLE):
        side = float(np.clip(0.2 * len(peers), 4.6, 7))
        text = "How alike the final models are"
        figure, axes = single_figure(plan, text, (side + 1.4, side + 0.9))
        clusters = [plan.cluster_of(index) for index in peers]
        places = sorted(range(len(peers)), key=lambda place: (clusters[place], peers[place]))
        shown = cosines[np.ix_(places, places)]
        image = axes.imshow(shown, cmap=COSINES, vmin=-1, vmax=1, interpolation="nearest")
        _frame_clusters(axes, [clusters[place] for place in places])
        axes.set_xticks([])
        axes.set_yticks([])
        _name_peers(axes, [peers[place] for place in places])
        axes.set_xlabel("peer", labelpad=4.0 if len(peers) <= MAX_TICKS else 14.0)
        bar = figure.colorbar(image, ax=axes, shrink=0.82, pad=0.03, aspect=28)
        bar.set_label("cosine")
        bar.outline.set_visible(False)
        return figure


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write `stem`.png and `stem`.svg and return both; the same figure gives the same files."""
    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    with mpl.rc_context(STYLE):
        figure.savefig(paths[0])
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def draw_counts(
    axes: Axes, plan: Plan, topology: Sequence[TopologyRow]
) -> tuple[AxesImage, list[int], npt.NDArray[np.int64]]:
    """Draw in how many rounds each peer averaged with each, by true cluster and framed by it.

    Returns the image, the peers in the order of its rows, and the counts.
    """
    clusters = _clusters(plan, topology)
    order = sorted(clusters, key=lambda index: (clusters[index], index))
    counts = aggregation_counts(topology, order)
    axes.set_facecolor("#ECEEF1")  # what a peer has with itself
    others = np.ma.masked_array(counts, mask=np.eye(len(order), dtype=bool))
    image = axes.imshow(others, cmap=COUNTS, vmin=0, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    _frame_clusters(axes, [clusters[index] for index in order])
    return image, order, counts


def aggregation_counts(
    topology: Sequence[TopologyRow], order: Sequence[int]
) -> npt.NDArray[np.int64]:
    """Return [m, m]: in how many rounds peer order[i] averaged with peer order[j]."""
    place = {index: i for i, index in enumerate(order)}
    counts = np.zeros((len(order), len(order)), dtype=np.int64)
    for row in topology:
        for j in row.neighbours:
            if j in place:
                counts[place[row.index], place[j]] += 1
    return counts


def single_figure(plan: Plan, text: str, size: tuple[float, float]) -> tuple[Figure, Axes]:
    """Return a figure of `size` inches and its only axes, under a title."""
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    title(axes, plan, text)
    return figure, axes


def title(axes: Axes, plan: Plan, text: str) -> None:
    """Write a title above, and below it what was run."""
    axes.set_title(text, loc="left", fontsize=13, fontweight="bold", pad=24)
    label = plan.partition.label
    split = "one distribution" if label == "none-1" else label
    axes.annotate(
        f"{plan.method} · {plan.data} · {split} · n={plan.n} · {plan.rounds} rounds · "
        f"seed {plan.seed}",
        (0, 1), xytext=(0, 8), xycoords="axes fraction", textcoords="offset points",
        fontsize=9, color=MUTED,
    )  # fmt: skip


def colour_of(cluster: int | None) -> str:
    """Return the colour of a true cluster, grey where it is not known."""
    return MUTED if cluster is None else CLUSTER_COLOURS[cluster % len(CLUSTER_COLOURS)]


def _clusters(plan: Plan, topology: Sequence[TopologyRow]) -> dict[int, int]:
    """Return {index: true cluster} of every peer that `topology` tells of, by index."""
    named = {row.index for row in topology}
    named |= {j for row in topology for j in (*row.neighbours, *row.bag)}
    return {index: plan.cluster_of(index) for index in sorted(named)}


def by_cluster(
    rows: Sequence[MetricRow], measure: Measure = "accuracy"
) -> dict[int, dict[int, list[tuple[float, float]]]]:
    """Return {cluster: {index: points (t, value)}} of the rows that have the measure."""
    groups: dict[int, dict[int, list[tuple[float, float]]]] = {}
    for row in rows:
        if (value := getattr(row, measure)) is not None:
            group = groups.setdefault(row.cluster or 0, {})
            group.setdefault(row.index, []).append((row.t, value))
    return groups


def _draw_mean(axes: Axes, method: str, curve: Curve) -> tuple[float, str, Any]:
    if not len(curve.x):
        return 0.0, method, INK
    axes.plot(curve.x, curve.y, color=INK, lw=2.8, solid_capstyle="round", zorder=4)
    return float(curve.y[-1]), f"{method} {100 * curve.y[-1]:.1f}", INK


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, Any]]) -> None:
    """Write each mean's name at its right end, kept apart where they would overlap."""
    low, high = axes.get_ylim()
    gap = 0.05 * (high - low)
    above = float("inf")
    for height, text, colour in sorted(ends, reverse=True, key=lambda end: end[0]):
        above = min(height, above - gap)
        axes.annotate(
            text, (1, above), xytext=(6, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="center", fontsize=9, color=colour,
            fontweight="bold" if colour == INK else "normal", annotation_clip=False,
        )  # fmt: skip


def _mark_stage_two(axes: Axes, plan: Plan) -> None:
    if not plan.method.startswith(("panm", "pens")) or plan.t1 >= plan.rounds:
        return
    axes.axvline(plan.t1 + 0.5, color=MUTED, lw=0.8, ls=(0, (1, 2)), zorder=1)
    axes.annotate(
        "stage 2", (plan.t1 + 0.5, 1), xytext=(3, -10), xycoords=("data", "axes fraction"),
        textcoords="offset points", fontsize=8, color=MUTED,
    )  # fmt: skip


def cluster_legend(
    axes: Axes,
    clusters: Sequence[int],
    loc: Literal["lower right", "upper left", "upper right"],
    more: Sequence[Line2D] = (),
    anchor: tuple[float, float] | None = None,
    *,
    lines: bool = False,
) -> None:
    """Name the colours of true clusters, as `lines` or as dots, and `more`; one cluster needs no
    name."""
    look = {"lw": 1.6} if lines else {"marker": "o", "ls": "", "ms": 7}
    marks = [
        Line2D([], [], color=colour_of(c), label=f"cluster {c}", **look)
        for c in clusters
        if len(clusters) > 1
    ]
    if marks or more:
        axes.legend(handles=[*marks, *more], loc=loc, bbox_to_anchor=anchor, handlelength=1.6)


def _frame_clusters(axes: Axes, clusters: Sequence[int]) -> None:
    """Frame each cluster's block on the diagonal and colour its stretch of both axes."""
    for cluster in sorted(set(clusters)):
        start, count = clusters.index(cluster), clusters.count(cluster)
        corner = start - 0.5
        axes.add_patch(
            Rectangle((corner, corner), count, count, fill=False, lw=1.8, ec=colour_of(cluster),
                      clip_on=False)
        )  # fmt: skip
        for spot in ((0, corner), (corner, 0)):
            vertical = spot[0] == 0
            transform = axes.get_yaxis_transform() if vertical else axes.get_xaxis_transform()
            size = (-0.014, count) if vertical else (count, -0.014)
            axes.add_patch(
                Rectangle(spot, *size, color=colour_of(cluster), lw=0, transform=transform,
                          clip_on=False)
            )  # fmt: skip
    for spine in axes.spines.values():
        spine.set_visible(False)


def _name_peers(axes: Axes, order: Sequence[int]) -> None:
    axes.tick_params(length=0, pad=6, labelsize=8)
    if len(order) <= MAX_TICKS:
        axes.set_xticks(range(len(order)), [str(index) for index in order])
        axes.set_yticks(range(len(order)), [str(index) for index in order])


def _write_counts(axes: Axes, counts: npt.NDArray[np.int64]) -> None:
    dark = 0.5 * counts.max()
    for (i, j), count in np.ndenumerate(counts):
        if i != j and count:
            colour = "white" if count > dark else INK
            axes.text(j, i, str(count), ha="center", va="center", fontsize=8, color=colour)


def cost_figure(
    plan: Plan, rows: Sequence[MetricRow], moments: Sequence[tuple[str, float]] = ()
) -> Figure:
    """Return the mean accuracy, and the band from the worst to the best peer, against the payload
    that a peer has received on average, and against time where rounds took time of their own.

    `moments` are what happened, and at which second.
    """
    times, accuracies, payload = over_time(plan.n, rows)
    timed = has_time(rows)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.0 if timed else 7.6, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, 1 + timed, sharey=True, squeeze=False)[0]
        title(panels[0], plan, "Accuracy against bytes")
        _draw_band(panels[0], payload, accuracies)
        panels[0].set_xlabel("payload received by a peer")
        panels[0].xaxis.set_major_formatter(lambda value, _: human_bytes(value))
        panels[0].xaxis.set_major_locator(MaxNLocator(5))
        if timed:
            panels[1].set_title("and time", loc="left", fontsize=13, fontweight="bold", pad=24)
            _draw_band(panels[1], times, accuracies)
            panels[1].set_xlabel("seconds")
        for _, second in moments:
            panels[-1].axvline(second, color=MUTED, lw=0.9, ls=(0, (3, 2)), zorder=1)
        for event, second in legible(moments, 0.1 * float(np.max(times, initial=0.0))):
            panels[-1].annotate(
                event, (second, 1), xycoords=("data", "axes fraction"), xytext=(3, -10),
                textcoords="offset points", fontsize=8, color=MUTED,
            )  # fmt: skip
        panels[0].set_ylabel("accuracy, %")
        panels[0].yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}")
        for axes in panels:
            axes.grid(axis="y")
        return figure


def legible(labels: Sequence[tuple[str, float]], room: float) -> list[tuple[str, float]]:
    """Return the labels, each with its place, that cover no earlier one when each takes `room`."""
    shown: list[tuple[str, float]] = []
    for text, place in sorted(labels, key=lambda label: label[1]):
        if not shown or place >= shown[-1][1] + room:
            shown.append((text, place))
    return shown


def _draw_band(axes: Axes, x: Values, accuracies: Values) -> None:
    low, mean, high = (pick(accuracies, axis=1) for pick in (np.nanmin, np.nanmean, np.nanmax))
    axes.fill_between(x, low, high, step="post", color=CLUSTER_COLOURS[0], alpha=0.15, lw=0)
    axes.step(x, mean, where="post", color=INK, lw=2.4)
