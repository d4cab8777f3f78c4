"""The pictures of a run: accuracy over rounds, who averaged with whom, and the final topology.

Pure drawing: rows in, `Figure` out. One style for all of them; colours stand for true clusters and
keep apart for colour-blind eyes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import networkx as nx
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from peer.display import CLUSTER_COLOURS
from peer.plan import Plan
from peer.rundir import MetricRow, TopologyRow, final_rows

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
MAX_TICKS = 40
MAX_NUMBERS = 12
MAX_LABELS = 60
MAX_CIRCLE = 12

Curve = Sequence[tuple[float, float]]


def accuracy_figure(
    plan: Plan, rows: Sequence[MetricRow], references: Mapping[str, Curve] | None = None
) -> Figure:
    """Return accuracy over rounds: each peer thin, the mean thick, other methods' means broken.

    `references` maps a method to its mean accuracy as (t, share) points.
    """
    with mpl.rc_context(STYLE):
        figure, axes = _figure(plan, "Accuracy on each peer's own test set", (7.6, 4.6))
        for cluster, peers in _by_cluster(rows).items():
            for points in peers.values():
                axes.plot(*zip(*points, strict=True), color=_colour(cluster), lw=0.9, alpha=0.55)
        ends = [_draw_mean(axes, plan.method, _mean_curve(rows))]
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
        _label_ends(axes, ends)
        _cluster_legend(axes, sorted(_by_cluster(rows)), loc="lower right")
        return figure


def perplexity_figure(plan: Plan, rows: Sequence[MetricRow]) -> Figure:
    """Return perplexity over rounds: each peer thin, that of all peers' test words thick."""
    with mpl.rc_context(STYLE):
        figure, axes = _figure(plan, "Perplexity on each peer's own test set", (7.6, 4.6))
        clusters = _by_cluster(rows, "loss")
        for cluster, peers in clusters.items():
            for points in peers.values():
                ts, losses = zip(*points, strict=True)
                axes.plot(ts, np.exp(losses), color=_colour(cluster), lw=0.9, alpha=0.55)
        curve = [(t, float(np.exp(loss))) for t, loss in _mean_curve(rows, "loss")]
        if curve:
            axes.plot(*zip(*curve, strict=True), color=INK, lw=2.8, zorder=4)
            _label_ends(axes, [(curve[-1][1], f"{plan.method} {curve[-1][1]:.1f}", INK)])
        axes.set_xlabel("round")
        axes.set_ylabel("perplexity")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y")
        axes.set_xlim(left=min(1, plan.rounds - 1), right=plan.rounds)
        _cluster_legend(axes, sorted(clusters), loc="upper right")
        return figure


def heatmap_figure(plan: Plan, topology: Sequence[TopologyRow]) -> Figure:
    """Return who averaged with whom: in how many rounds row i took column j's model.

    Peers are ordered by true cluster and framed by it, as in the heatmaps of the PANM paper.
    """
    with mpl.rc_context(STYLE):
        clusters = _clusters(plan, topology)
        order = sorted(clusters, key=lambda index: (clusters[index], index))
        counts = aggregation_counts(topology, order)
        side = float(np.clip(0.2 * len(order), 4.6, 9))
        figure, axes = _figure(plan, "Who averaged with whom", (side + 1.4, side + 0.9))
        image = axes.imshow(counts, cmap=COUNTS, vmin=0, interpolation="nearest")
        for i in range(len(order)):
            axes.add_patch(Rectangle((i - 0.5, i - 0.5), 1, 1, color="#ECEEF1", lw=0))
        _frame_clusters(axes, [clusters[index] for index in order])
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


def topology_figure(plan: Plan, topology: Sequence[TopologyRow]) -> Figure:
    """Return the final bags as a graph: mutual membership strong, one-sided faint with an arrow."""
    with mpl.rc_context(STYLE):
        figure, axes = _figure(plan, "Final bags", (7.0, 6.2))
        clusters = _clusters(plan, topology)
        graph = bag_graph(topology)
        graph.add_nodes_from(clusters)
        mutual = [(i, j) for i, j in graph.edges if i < j and graph.has_edge(j, i)]
        single = [(i, j) for i, j in graph.edges if not graph.has_edge(j, i)]
        position = _layout(clusters)
        size = float(np.clip(9000 / max(len(graph), 1), 30, 520))
        width = float(np.clip(30 / max(len(graph), 1), 0.5, 1.8))
        nx.draw_networkx_edges(
            graph, position, edgelist=single, edge_color=MUTED, width=0.6 * width, alpha=0.6,
            arrowsize=8, style="dashed", connectionstyle="arc3,rad=0.08", node_size=size, ax=axes,
        )  # fmt: skip
        nx.draw_networkx_edges(
            graph, position, edgelist=mutual, edge_color=INK, width=width,
            alpha=0.75 if len(graph) <= MAX_LABELS else 0.25, arrows=False, ax=axes,
        )  # fmt: skip
        nodes = nx.draw_networkx_nodes(
            graph, position, node_color=[_colour(clusters[i]) for i in graph],
            edgecolors="white", linewidths=1.4, node_size=size, ax=axes,
        )  # fmt: skip
        nodes.set_zorder(3)
        if len(graph) <= MAX_LABELS:
            points = float(np.clip(np.sqrt(size) * 0.45, 5, 10))
            nx.draw_networkx_labels(
                graph, position, ax=axes, font_size=points, font_color="white", font_weight="bold"
            )
        axes.set_axis_off()
        axes.set_aspect("equal")
        axes.margins(0.08)
        edges = [
            Line2D([], [], color=INK, lw=1.6, label="in each other's bag"),
            Line2D([], [], color=MUTED, lw=1, ls=(0, (3, 2)), label="in one bag only"),
        ]
        _cluster_legend(axes, sorted(set(clusters.values())), "upper left", edges, (1.0, 1.0))
        return figure


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write `stem`.png and `stem`.svg and return both; the same figure gives the same files."""
    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    with mpl.rc_context(STYLE):
        figure.savefig(paths[0])
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


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


def bag_graph(topology: Sequence[TopologyRow]) -> nx.DiGraph[int]:
    """Return the graph of the last bags: an edge i -> j when j is in the bag of i."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    for row in final_rows(topology):
        graph.add_node(row.index)
        graph.add_edges_from((row.index, j) for j in row.bag)
    return graph


def _figure(plan: Plan, text: str, size: tuple[float, float]) -> tuple[Figure, Axes]:
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


def _colour(cluster: int | None) -> str:
    return MUTED if cluster is None else CLUSTER_COLOURS[cluster % len(CLUSTER_COLOURS)]


def _clusters(plan: Plan, topology: Sequence[TopologyRow]) -> dict[int, int]:
    """Return {index: true cluster} of every peer that `topology` tells of, by index."""
    named = {row.index for row in topology}
    named |= {j for row in topology for j in (*row.neighbours, *row.bag)}
    return {index: plan.cluster_of(index) for index in sorted(named)}


def _by_cluster(
    rows: Sequence[MetricRow], figure: Literal["accuracy", "loss"] = "accuracy"
) -> dict[int, dict[int, list[tuple[float, float]]]]:
    """Return {cluster: {index: (t, accuracy or loss) points}} of rows that have the figure."""
    groups: dict[int, dict[int, list[tuple[float, float]]]] = {}
    for row in rows:
        if (value := getattr(row, figure)) is not None:
            group = groups.setdefault(row.cluster or 0, {})
            group.setdefault(row.index, []).append((row.t, value))
    return groups


def _mean_curve(
    rows: Sequence[MetricRow], figure: Literal["accuracy", "loss"] = "accuracy"
) -> list[tuple[float, float]]:
    by_round: dict[int, list[float]] = {}
    for row in rows:
        if (value := getattr(row, figure)) is not None:
            by_round.setdefault(row.t, []).append(value)
    return [(t, float(np.mean(values))) for t, values in sorted(by_round.items())]


def _draw_mean(axes: Axes, method: str, curve: Curve) -> tuple[float, str, Any]:
    if not curve:
        return 0.0, method, INK
    axes.plot(*zip(*curve, strict=True), color=INK, lw=2.8, solid_capstyle="round", zorder=4)
    return curve[-1][1], f"{method} {100 * curve[-1][1]:.1f}", INK


def _label_ends(axes: Axes, ends: Sequence[tuple[float, str, Any]]) -> None:
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


def _cluster_legend(
    axes: Axes,
    clusters: Sequence[int],
    loc: Literal["lower right", "upper left", "upper right"],
    more: Sequence[Line2D] = (),
    anchor: tuple[float, float] | None = None,
) -> None:
    marks = [
        Line2D([], [], color=_colour(c), marker="o", ls="", ms=7, label=f"cluster {c}")
        for c in clusters
    ]
    axes.legend(handles=[*marks, *more], loc=loc, bbox_to_anchor=anchor, handlelength=1.6)


def _frame_clusters(axes: Axes, clusters: Sequence[int]) -> None:
    """Frame each cluster's block on the diagonal and colour its stretch of both axes."""
    for cluster in sorted(set(clusters)):
        start, count = clusters.index(cluster), clusters.count(cluster)
        corner = start - 0.5
        axes.add_patch(
            Rectangle((corner, corner), count, count, fill=False, lw=1.8, ec=_colour(cluster),
                      clip_on=False)
        )  # fmt: skip
        for spot in ((0, corner), (corner, 0)):
            vertical = spot[0] == 0
            transform = axes.get_yaxis_transform() if vertical else axes.get_xaxis_transform()
            size = (-0.014, count) if vertical else (count, -0.014)
            axes.add_patch(
                Rectangle(spot, *size, color=_colour(cluster), lw=0, transform=transform,
                          clip_on=False)
            )  # fmt: skip
    for spine in axes.spines.values():
        spine.set_visible(False)


def _name_peers(axes: Axes, order: Sequence[int]) -> None:
    axes.tick_params(length=0, pad=6, labelsize=8)
    if len(order) <= MAX_TICKS:
        axes.set_xticks(range(len(order)), [str(index) for index in order])
        axes.set_yticks(range(len(order)), [str(index) for index in order])
    else:
        axes.set_xticks([])
        axes.set_yticks([])


def _write_counts(axes: Axes, counts: npt.NDArray[np.int64]) -> None:
    dark = 0.5 * counts.max()
    for (i, j), count in np.ndenumerate(counts):
        if i != j and count:
            colour = "white" if count > dark else INK
            axes.text(j, i, str(count), ha="center", va="center", fontsize=8, color=colour)


def _layout(clusters: Mapping[int, int]) -> dict[int, tuple[float, float]]:
    """Return positions: the true clusters apart on a ring, each a circle, or a disc if it is large.

    Not springs: those pull a peer with wrong neighbours away from its cluster and the members of a
    tight cluster over each other; here the edges alone say what was found.
    """
    groups: dict[int, list[int]] = {}
    for index, cluster in clusters.items():
        groups.setdefault(cluster, []).append(index)
    radius = 0.62 * np.sin(np.pi / max(len(groups), 2))
    position = {}
    for place, (_, members) in enumerate(sorted(groups.items())):
        angle = np.pi - 2 * np.pi * place / len(groups)
        centre = np.exp(1j * angle) * (len(groups) > 1)
        for rank, index in enumerate(members):
            if len(members) <= MAX_CIRCLE:
                spot = radius * np.exp(2j * np.pi * rank / len(members))
            else:
                # Vogel's sunflower: equal space for each, whatever their number.
                share = np.sqrt((rank + 0.5) / len(members))
                spot = radius * share * np.exp(1j * rank * np.pi * (3 - np.sqrt(5)))
            position[index] = (float((centre + spot).real), float((centre + spot).imag))
    return position
