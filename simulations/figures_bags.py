"""The pictures of bags: who is in whose at the end, as they form, and how true they are.

Pure drawing, in the style of `simulations.figures`. A peer's colour is its true cluster. A line
from a peer halfway to another says that it has the other in its bag, so that two that are in each
other's are joined; lines between true clusters are dark, for those are mistakes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from PIL import Image

from peer.plan import Plan
from peer.rundir import MetricRow, TopologyRow, final_rows
from simulations.curves import Measure, over_rounds
from simulations.figures import (
    FAINT,
    INK,
    MAX_LABELS,
    MUTED,
    STYLE,
    by_cluster,
    cluster_legend,
    colour_of,
    single_figure,
    title,
)
from simulations.purity import share_pure
from simulations.theory import Theory

PANELS = 6
"""Rounds that the film strip shows."""
FRAMES = 80
"""Frames of an animation at most."""
FRAME_MS = 160
LAST_MS = 2000
COLOURS = 128
"""Colours of an animation's palette."""
MAX_CIRCLE = 12
THEORY: Any = (0, (4, 2))
"""Dashes of what theory expects."""

Places = Mapping[int, tuple[float, float]]


def topology_figure(plan: Plan, topology: Sequence[TopologyRow]) -> Figure:
    """Return every peer's last bag as a graph."""
    with mpl.rc_context(STYLE):
        figure, axes = single_figure(plan, "Final bags", (7.0, 6.2))
        last = {row.index: row for row in final_rows(topology)}
        places = layout(plan, topology)
        _draw_bags(axes, plan, last, places, labels=True)
        lines = [
            Line2D([], [], color=MUTED, lw=1.6, label="in each other's bag"),
            Line2D([0], [0], color=MUTED, lw=1.6, ls=(0, (4.5, 99)), label="in one bag only"),
            Line2D([], [], color=INK, lw=1.6, label="across clusters"),
        ]
        clusters = sorted({_cluster(plan, index, last) for index in places})
        cluster_legend(axes, clusters, "upper left", lines, (1.0, 1.0))
        return figure


def evolution_figure(
    plan: Plan, rows: Sequence[MetricRow], topology: Sequence[TopologyRow]
) -> Figure:
    """Return the bags of some rounds beside each other, closer together where more changes."""
    by_round = _by_round(topology)
    chosen = _spread(sorted(by_round), PANELS)
    places = layout(plan, topology)
    told = _told(rows)
    with mpl.rc_context(STYLE):
        columns = min(3, len(chosen))
        lines = -(-len(chosen) // columns)
        height = lines * (3.3 * _steepness(places) + 0.5) + 0.5
        figure = Figure(figsize=(3.3 * columns, height), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(lines, columns, squeeze=False).ravel().tolist()
        for axes in panels:
            axes.set_axis_off()
        for axes, t in zip(panels, chosen, strict=False):
            _draw_bags(axes, plan, by_round[t], places)
            axes.set_title(f"round {t}", loc="left", fontsize=10, fontweight="bold", pad=14)
            _note(axes, told.get(t, ""))
        figure.suptitle(
            f"How the bags formed: {plan.method}", x=0.01, ha="left", fontsize=13,
            fontweight="bold",
        )  # fmt: skip
        return figure


def animate_bags(
    plan: Plan, rows: Sequence[MetricRow], topology: Sequence[TopologyRow], path: Path
) -> Path:
    """Write a GIF of the bags forming, a frame a round (or every few), and return its path."""
    by_round = _by_round(topology)
    rounds = sorted(by_round)
    step = -(-len(rounds) // FRAMES)
    chosen = sorted({*rounds[::step], rounds[-1]})
    places = layout(plan, topology)
    told = _told(rows)
    frames = []
    with mpl.rc_context({**STYLE, "savefig.bbox": None}):
        figure = Figure(figsize=(5.2, height := 4.9 * _steepness(places) + 0.7))
        FigureCanvasAgg(figure)
        for t in chosen:
            figure.clear()
            axes = figure.add_axes((0.03, 0.02, 0.94, 0.96 - 0.7 / height))
            _draw_bags(axes, plan, by_round[t], places, labels=plan.n <= MAX_LABELS // 2)
            figure.text(
                0.04, 1 - 0.3 / height, f"{plan.method}, round {t}", fontsize=13, fontweight="bold"
            )
            figure.text(
                0.04, 1 - 0.52 / height, _stage(plan, t) + told.get(t, ""), fontsize=9, color=MUTED
            )
            shown = io.BytesIO()
            figure.savefig(shown, format="png", dpi=96)
            picture = Image.open(shown).convert("RGB")
            frames.append(picture.quantize(COLOURS, dither=Image.Dither.NONE))
    durations = [FRAME_MS] * (len(frames) - 1) + [LAST_MS]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0)
    return path


def matching_figure(
    plan: Plan,
    rows: Sequence[MetricRow],
    topology: Sequence[TopologyRow],
    theory: Theory | None = None,
) -> Figure:
    """Return precision and recall of the bags over rounds, and the share of peers whose neighbours
    are all true: the mean thick, that of each true cluster thin, and where there is one the theory
    broken."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.0, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, 3, sharey=True)
        title(panels[0], plan, "Precision of the bags")
        for note in panels[0].texts:
            note.set_in_layout(False)  # it may reach over the next panel's column
        panels[1].set_title("Recall", loc="left", fontsize=13, fontweight="bold", pad=24)
        panels[2].set_title("All k neighbours true", loc="left", fontsize=13, fontweight="bold",
                            pad=24)  # fmt: skip
        draw_matching(panels[0], rows, "precision")
        draw_matching(panels[1], rows, "recall")
        pure = share_pure(plan, topology)
        panels[2].plot(*zip(*pure.items(), strict=True), color=INK, lw=2.4)
        if theory is not None:
            expected = (theory.precision, theory.recall, theory.purity)
            for axes, values in zip(panels, expected, strict=True):
                draw_theory(axes, values)
        clusters = sorted(by_cluster(rows, "precision"))
        mean = Line2D([], [], color=INK, lw=2.4, label="all peers")
        told = [] if theory is None else [theory_mark(f"{theory.name} in theory")]
        cluster_legend(panels[0], clusters, "lower right", [mean, *told], lines=True)
        for axes in panels:
            axes.set_xlabel("round")
            axes.set_ylim(-0.02, 1.04)
            axes.set_xlim(min(1, plan.rounds - 1), plan.rounds)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(axis="y")
        return figure


def draw_matching(axes: Axes, rows: Sequence[MetricRow], measure: Measure) -> None:
    """Draw the mean of precision or recall over rounds, thick, over that of each true cluster."""
    for cluster in sorted({row.cluster or 0 for row in rows}):
        own = over_rounds([row for row in rows if (row.cluster or 0) == cluster], measure)
        axes.plot(own.x, own.y, color=colour_of(cluster), lw=1.2, alpha=0.8)
    mean = over_rounds(rows, measure)
    axes.plot(mean.x, mean.y, color=INK, lw=2.4)


def draw_theory(axes: Axes, values: Sequence[float]) -> None:
    """Draw what theory expects in rounds 1, 2, ... of stage 1."""
    axes.plot(range(1, len(values) + 1), values, color=MUTED, lw=1.6, ls=THEORY, zorder=5)


def theory_mark(label: str) -> Line2D:
    """Return what explains the theory's lines in a legend."""
    return Line2D([], [], color=MUTED, lw=1.6, ls=THEORY, label=label)


def layout(plan: Plan, topology: Sequence[TopologyRow]) -> dict[int, tuple[float, float]]:
    """Return the places of all peers that `topology` tells of: the true clusters apart on a ring,
    each a circle, or a disc if it is large.

    Not springs: those pull a peer with wrong neighbours away from its cluster and the members of a
    tight cluster over each other; here the lines alone say what was found.
    """
    named = {row.index for row in topology} | {j for row in topology for j in row.bag}
    groups: dict[int, list[int]] = {}
    for index in sorted(named):
        groups.setdefault(plan.cluster_of(index), []).append(index)
    radius = 0.62 * np.sin(np.pi / max(len(groups), 2))
    places = {}
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
            places[index] = (float((centre + spot).real), float((centre + spot).imag))
    return places


def _steepness(places: Places) -> float:
    """Return height by width of what the places take up, with the dots around them."""
    x, y = np.array([*places.values()]).T
    return float((np.ptp(y) + 0.6) / (np.ptp(x) + 0.6))


def _draw_bags(
    axes: Axes,
    plan: Plan,
    rows: Mapping[int, TopologyRow],
    places: Places,
    *,
    labels: bool = False,
) -> None:
    """Draw the bags of one moment; peers that have none then are faint."""
    n = len(places)
    lines, colours = [], []
    for i, row in rows.items():
        own = _cluster(plan, i, rows)
        start = np.array(places[i])
        for j in row.bag:
            lines.append([start, (start + places[j]) / 2])
            colours.append(colour_of(own) if _cluster(plan, j, rows) == own else INK)
    width, alpha = float(np.clip(30 / n, 0.4, 1.8)), float(np.clip(12 / n, 0.3, 0.85))
    axes.add_collection(LineCollection(lines, colors=colours, linewidths=width, alpha=alpha))
    size = float(np.clip(9000 / n, 30, 520)) * float(axes.get_position().width)
    x, y = zip(*places.values(), strict=True)
    shades = [colour_of(_cluster(plan, i, rows)) if i in rows else FAINT for i in places]
    axes.scatter(
        x, y, s=size, c=shades, edgecolors="white", linewidths=1.0, zorder=3, clip_on=False
    )
    if labels and n <= MAX_LABELS:
        points = float(np.clip(np.sqrt(size) * 0.45, 5, 10))
        for i, spot in places.items():
            axes.text(*spot, str(i), ha="center", va="center", fontsize=points, color="white",
                      fontweight="bold", zorder=4)  # fmt: skip
    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.margins(0.08)


def _cluster(plan: Plan, index: int, rows: Mapping[int, TopologyRow]) -> int:
    """Return the true cluster of a peer then: data may drift to another than it was dealt."""
    told = rows[index].cluster if index in rows else None
    return plan.cluster_of(index) if told is None else told


def _by_round(topology: Sequence[TopologyRow]) -> dict[int, dict[int, TopologyRow]]:
    by_round: dict[int, dict[int, TopologyRow]] = {}
    for row in topology:
        by_round.setdefault(row.t, {})[row.index] = row
    return by_round


def _spread(rounds: Sequence[int], count: int) -> list[int]:
    """Return at most `count` of the rounds, the first and the last too, by equal factors."""
    if len(rounds) <= count:
        return [*rounds]
    places = np.geomspace(1, len(rounds), count).round().astype(int) - 1
    # Equal factors name the first rounds twice when there are few: each takes the next one then.
    for k in range(1, count):
        places[k] = max(places[k], places[k - 1] + 1)
    return [rounds[place] for place in places]


def _told(rows: Sequence[MetricRow]) -> dict[int, str]:
    """Return what is said of each round: the means of precision and recall, where there are any."""
    measures: tuple[Measure, ...] = ("precision", "recall")
    texts: dict[int, list[str]] = {}
    for measure in measures:
        curve = over_rounds(rows, measure)
        for t, value in zip(curve.x, curve.y, strict=True):
            texts.setdefault(int(t), []).append(f"{measure} {value:.2f}")
    return {t: " · ".join(parts) for t, parts in texts.items()}


def _stage(plan: Plan, t: int) -> str:
    if not plan.method.startswith(("panm", "pens")):
        return ""
    return f"stage {1 if t <= plan.t1 else 2} · "


def _note(axes: Axes, text: str) -> None:
    axes.annotate(
        text, (0, 1), xytext=(0, 3), xycoords="axes fraction", textcoords="offset points",
        fontsize=8, color=MUTED,
    )  # fmt: skip
