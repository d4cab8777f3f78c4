"""A picture of a parameter tree: which cluster came apart when, and who is where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from bootstrap.coordination.tree import ROOT
from bootstrap.coordination.tree_store import TreeRecord
from peer.display import CLUSTER_COLOURS

INK, MUTED = "#1F2430", "#6B7280"
MAX_MARKS = 25
"""Members of a leaf that are drawn one by one; of more, only their number is said."""
ROW = 5


def tree_figure(tree: TreeRecord, true_clusters: Sequence[int] | None = None) -> Figure:
    """Return the tree over the rounds, the root at the top, its leaves at the last round.

    Every member of a leaf is a square, in the colour of its true cluster where these are given, by
    peer.
    """
    places = _columns(tree)
    ends = [_end(tree, v) for v in range(len(tree.nodes))]
    leaves = [v for v, node in enumerate(tree.nodes) if node.children is None]
    figure = Figure(figsize=(max(4.0, 1.6 * len(leaves) + 1.5), 4.8), facecolor="white", dpi=160)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for v, node in enumerate(tree.nodes):
        axes.plot([places[v]] * 2, [node.t, ends[v]], color=INK, lw=1.6, solid_capstyle="round")
        if node.children is not None:
            first, second = (places[child] for child in node.children)
            axes.plot([first, second], [ends[v]] * 2, color=INK, lw=1.6)
            axes.annotate(
                f"after round {ends[v]}", (places[v], ends[v]), (0, 5), color=MUTED, fontsize=8,
                textcoords="offset points", ha="center",
                bbox={"fc": "white", "ec": "none", "pad": 1},
            )  # fmt: skip
    for v in leaves:
        members = sorted(peer for peer, place in tree.places.items() if place == v)
        _draw_members(axes, places[v], ends[v], members, true_clusters)
    _finish(axes, tree, len(leaves), true_clusters)
    return figure


def _columns(tree: TreeRecord) -> list[float]:
    """Return the horizontal place of every node: leaves side by side, others between children."""
    places = [0.0] * len(tree.nodes)
    taken, pending = 0, [ROOT]
    while pending:  # depth first: the leaves in order from left to right
        v = pending.pop()
        if (children := tree.nodes[v].children) is not None:
            pending += reversed(children)
        else:
            places[v] = float(taken)
            taken += 1
    for v in reversed(range(len(places))):  # children come after their parents
        if (children := tree.nodes[v].children) is not None:
            places[v] = sum(places[child] for child in children) / 2
    return places


def _end(tree: TreeRecord, v: int) -> int:
    """Return the round after which node v was split, or that of the tree."""
    children = tree.nodes[v].children
    return tree.t if children is None else tree.nodes[children[0]].t


def _draw_members(
    axes: Axes, x: float, y: int, members: Sequence[int], true_clusters: Sequence[int] | None
) -> None:
    """Draw a leaf's members below its end, in rows, and write how many they are."""
    colours = [MUTED] * len(members)
    if true_clusters is not None:
        members = sorted(members, key=lambda peer: (true_clusters[peer], peer))
        colours = [CLUSTER_COLOURS[true_clusters[i] % len(CLUSTER_COLOURS)] for i in members]
    rows = 0
    if len(members) <= MAX_MARKS:
        rows = -(-len(members) // ROW)
        for place, colour in enumerate(colours):
            width = min(ROW, len(members))
            offset = (12 * (place % ROW - (width - 1) / 2), -10 - 12 * (place // ROW))
            axes.annotate(
                "\N{BLACK SQUARE}", (x, y), offset, color=colour, fontsize=11, ha="center",
                va="center", textcoords="offset points", annotation_clip=False,
            )  # fmt: skip
    told = f"{len(members)} peers"
    if true_clusters is not None and len(members) > MAX_MARKS:
        counts = Counter(true_clusters[peer] for peer in members)
        told += "".join(f"\n{count} of cluster {k}" for k, count in sorted(counts.items()))
    axes.annotate(
        told, (x, y), (0, -12 - 12 * rows), color=INK, fontsize=8, ha="center", va="top",
        textcoords="offset points", annotation_clip=False,
    )  # fmt: skip


def _finish(axes: Axes, tree: TreeRecord, leaves: int, true_clusters: Sequence[int] | None) -> None:
    axes.set_xlim(-0.7, leaves - 0.3)
    axes.set_ylim(max(tree.t, 1), -0.04 * max(tree.t, 1))
    axes.set_ylabel("round", color=INK)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(colors=MUTED)
    axes.set_xticks([])
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(MUTED)
    axes.set_title("Parameter tree", loc="left", color=INK, fontsize=11)
    if true_clusters is not None:
        known = sorted({true_clusters[peer] for peer in tree.places})
        marks = [
            Line2D([], [], marker="s", ls="", color=CLUSTER_COLOURS[k % len(CLUSTER_COLOURS)])
            for k in known
        ]
        axes.legend(
            marks, [f"cluster {k}" for k in known], loc="upper right", frameon=False, fontsize=8
        )
