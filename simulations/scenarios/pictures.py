"""The pictures of a scenario: what it will be, and what came of it over time and bytes.

Pure drawing, in the style of `simulations.figures`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib as mpl
import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from peer.display import CLUSTER_COLOURS
from peer.rundir import MetricRow
from simulations.curves import start_of
from simulations.figures import FAINT, INK, MAX_LABELS, MUTED, STYLE, colour_of, legible
from simulations.scenarios.devices import USUAL
from simulations.scenarios.scenario import Scenario
from simulations.scenarios.script import Happening, Heal, Kill, Leave, Partition, Restart
from simulations.scenarios.tables import select
from simulations.scenarios.topology import describe_graph

SHAPES = "os^Dv*Ph"
"""Marks of the device classes, the usual one first."""
MAX_EDGES = 4000
"""Links that are drawn; of more, each so many-th."""


def scenario_figure(scenario: Scenario) -> Figure:
    """Return the topology, colours being true clusters and shapes device classes, beside the script
    as a timeline."""
    rounds = [event for event in scenario.script if event.round is not None]
    seconds = [event for event in scenario.script if event.round is None]
    lines = [events for events in (rounds, seconds) if events] or [[]]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 5.6), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(len(lines), 2, width_ratios=(1, 1.25))
        _draw_topology(figure.add_subplot(grid[:, 0]), scenario)
        for place, events in enumerate(lines):
            _draw_timeline(figure.add_subplot(grid[place, 1]), scenario, events)
        figure.suptitle(scenario.name, x=0.01, ha="left", fontsize=14, fontweight="bold")
        return figure


def _draw_topology(axes: Axes, scenario: Scenario) -> None:
    graph, people = scenario.graph, scenario.people
    places = nx.get_node_attributes(graph, "pos") or _arranged(graph)
    edges = sorted(graph.edges)
    shown = edges[:: max(1, math.ceil(len(edges) / MAX_EDGES))]
    faint = 0.7 if len(shown) < 150 else 0.25
    nx.draw_networkx_edges(graph, places, edgelist=shown, edge_color=MUTED, alpha=faint, ax=axes)
    names = [USUAL, *(own.name for own in scenario.peers.classes)]
    size = float(np.clip(7000 / len(graph), 25, 380))
    for name, shape in zip(names, SHAPES * len(names), strict=False):
        members = [i for i in graph if people.classes[i] == name]
        nx.draw_networkx_nodes(
            graph, places, nodelist=members, node_shape=shape, node_size=size, ax=axes,
            node_color=[colour_of(people.clusters[i]) for i in members],
            edgecolors=[INK if i in scenario.absent else "white" for i in members],
        )  # fmt: skip
    if len(graph) <= MAX_LABELS:
        points = float(np.clip(np.sqrt(size) * 0.42, 5, 9))
        nx.draw_networkx_labels(graph, places, ax=axes, font_size=points, font_color="white")
    if len(names) > 1:
        marks = [
            Line2D([], [], color=MUTED, marker=shape, ls="", label=name)
            for name, shape in zip(names, SHAPES * len(names), strict=False)
        ]
        axes.legend(handles=marks, loc="lower left", bbox_to_anchor=(0, -0.12), ncols=4)
    axes.set_title(
        f"{scenario.topology.kind}: {describe_graph(graph)}", loc="left", fontsize=9, color=MUTED
    )
    axes.set_axis_off()
    axes.set_aspect("equal")


def _arranged(graph: nx.Graph[int]) -> dict[int, tuple[float, float]]:
    """Return places of the peers: by springs where links say something, else on a circle."""
    n = len(graph)
    if n <= 300 and graph.number_of_edges() < n * (n - 1) / 4:
        # Kamada and Kawai's needs no random start, and shows rings as rings.
        start = nx.circular_layout(graph)
        layout = nx.kamada_kawai_layout if nx.is_connected(graph) and n <= 120 else nx.spring_layout
        options = {"pos": start} if n <= 120 else {"pos": start, "seed": 0}
        found = layout(graph, **options)
    else:
        found = nx.circular_layout(graph)
    return {int(i): (float(x), float(y)) for i, (x, y) in found.items()}


def _draw_timeline(axes: Axes, scenario: Scenario, events: Sequence[Happening]) -> None:
    """Draw events as bars from their beginning to what ends them, if anything does."""
    in_rounds = not events or events[0].round is not None
    times = [float(event.round or event.second or 0.0) for event in events]
    first = 1.0 if in_rounds else 0.0
    last = float(scenario.plan.rounds) if in_rounds else 1.15 * max(times, default=1.0) + 1
    order = sorted(range(len(events)), key=lambda place: times[place])
    drawn = [place for place in order if not isinstance(events[place], Heal | Restart)]
    for row, place in enumerate(drawn):
        event, start = events[place], times[place]
        end = next((times[p] for p in order if times[p] > start and ends(events[p], event)), last)
        colour = CLUSTER_COLOURS[row % len(CLUSTER_COLOURS)]
        axes.barh(row, end - start, left=start, height=0.42, color=colour, alpha=0.35)
        axes.plot(start, row, marker="|", ms=14, mew=2.4, color=colour)
        late = start > first + 0.6 * (last - first)
        axes.annotate(
            tell(event), (start, row), xytext=(-6 if late else 6, 0), textcoords="offset points",
            va="center", ha="right" if late else "left", fontsize=9,
        )  # fmt: skip
    restored = [
        (tell(events[place]), times[place])
        for place in order
        if isinstance(events[place], Heal | Restart)
    ]
    for _, at in restored:
        axes.axvline(at, color=MUTED, lw=1, ls=(0, (3, 2)))
    for text, at in legible(restored, 0.2 * (last - first)):
        axes.annotate(
            text, (at, 1), xycoords=("data", "axes fraction"), xytext=(3, -10),
            textcoords="offset points", fontsize=8, color=MUTED,
        )  # fmt: skip
    if not events:
        axes.annotate("nothing happens", (0.5, 0.5), xycoords="axes fraction", color=MUTED,
                      ha="center")  # fmt: skip
    axes.set_xlim(first, last)
    axes.set_ylim(max(len(drawn), 4) - 0.4, -0.9)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("round" if in_rounds else "seconds")
    if in_rounds:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="x", color=FAINT)
    axes.set_title("the script", loc="left", fontsize=9, color=MUTED)


def ends(later: Happening, event: Happening) -> bool:
    """Tell whether a later event undoes an earlier one."""
    match event:
        case Partition():
            return isinstance(later, Heal | Partition)
        case Kill() | Leave():
            return isinstance(later, Restart) and bool(set(later.peers) & set(event.peers))
    same = type(later) is type(event)
    return same and getattr(later, "peers", None) == getattr(event, "peers", ())


def tell(event: Happening) -> str:
    """Return an event in words: slow class phone: factor 4."""
    if isinstance(event, Partition):
        sides = [", ".join(map(str, group)) for group in event.groups]
        return f"partition: {' | '.join(sides)}" + (" | the others" if len(sides) == 1 else "")
    skipped = {"round", "second", "do", "peers"}
    more = ", ".join(
        f"{key} {value}"
        for key, value in event.model_dump(exclude_defaults=True).items()
        if key not in skipped
    )
    whom = ", ".join(map(str, getattr(event, "peers", ())))
    return f"{getattr(event, 'do', '')} {whom}".strip() + (f": {more}" if more else "")


def moments(scenario: Scenario, rows: Sequence[MetricRow]) -> list[tuple[Happening, float]]:
    """Return each event with the second since the beginning at which it happened, as far as
    the rows tell: those of a round as its first (or first concerned) peer began it."""
    beginning = start_of(rows)
    began: dict[int, list[MetricRow]] = {}
    for row in rows:
        began.setdefault(row.t, []).append(row)
    found: list[tuple[Happening, float]] = []
    for event in scenario.script:
        second = event.second
        if event.round is not None:
            own = began.get(event.round, [])
            if event.individual:
                whom = set(select(getattr(event, "peers", ()), scenario.people, ()))
                own = [row for row in own if row.index in whom] or own
            second = min((row.time - row.seconds.round - beginning for row in own), default=None)
        if second is not None:
            found.append((event, second))
    return found
