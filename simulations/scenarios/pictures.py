"""The pictures of a scenario: what it will be, and what came of it over time and bytes.

Pure drawing, in the style of `simulations.figures`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import networkx as nx
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from peer.display import CLUSTER_COLOURS, human_bytes
from peer.plan import Plan
from peer.rundir import MetricRow, TopologyRow
from simulations.figures import FAINT, INK, MAX_LABELS, MUTED, STYLE, title
from simulations.scenarios.devices import USUAL
from simulations.scenarios.scenario import Scenario
from simulations.scenarios.script import Happening, Heal, Kill, Leave, Partition, Restart
from simulations.scenarios.tables import select
from simulations.scenarios.topology import describe_graph

SHAPES = "os^Dv*Ph"
"""Marks of the device classes, the usual one first."""
MAX_EDGES = 4000
"""Links that are drawn; of more, each so many-th."""
FRAMES = 80
"""Frames of an animation at most."""

Points = list[tuple[float, float]]


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
            node_color=[_colour(people.clusters[i]) for i in members],
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
    for place in order:
        if isinstance(events[place], Heal | Restart):
            axes.axvline(times[place], color=MUTED, lw=1, ls=(0, (3, 2)))
            axes.annotate(
                tell(events[place]), (times[place], 1), xycoords=("data", "axes fraction"),
                xytext=(3, -10), textcoords="offset points", fontsize=8, color=MUTED,
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


def time_figure(scenario: Scenario, rows: Sequence[MetricRow]) -> Figure:
    """Return the mean accuracy, and the band from the worst to the best peer, against the virtual
    seconds and against the payload that a peer has received on average."""
    times, accuracies, payload = curves(scenario.plan.n, rows)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.0, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, 2, sharey=True)
        title(panels[0], scenario.plan, "Accuracy against time")
        panels[1].set_title("and bytes", loc="left", fontsize=13, fontweight="bold", pad=24)
        for axes, x in zip(panels, (times, payload), strict=True):
            _draw_band(axes, x, accuracies)
        _name_axes(panels)
        for event, second in moments(scenario, rows):
            panels[0].axvline(second, color=MUTED, lw=0.9, ls=(0, (3, 2)), zorder=1)
            panels[0].annotate(
                str(getattr(event, "do", "")), (second, 1), xycoords=("data", "axes fraction"),
                xytext=(3, -10), textcoords="offset points", fontsize=8, color=MUTED,
            )  # fmt: skip
        return figure


def sweep_figure(
    heading: str, keys: str, n: int, runs: Mapping[str, Sequence[MetricRow]]
) -> Figure:
    """Return the mean accuracy of several runs, by what sets them apart (values of `keys`), against
    virtual seconds and bytes."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, 2, sharey=True)
        panels[0].set_title(heading, loc="left", fontsize=13, fontweight="bold")
        for place, (name, rows) in enumerate(runs.items()):
            times, accuracies, payload = curves(n, rows)
            mean = np.nanmean(accuracies, axis=1)
            colour = CLUSTER_COLOURS[place % len(CLUSTER_COLOURS)]
            for axes, x in zip(panels, (times, payload), strict=True):
                axes.step(x, mean, where="post", color=colour, lw=1.8, label=name)
        _name_axes(panels)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, title=keys, loc="outside right center")
        return figure


def _name_axes(panels: Sequence[Axes]) -> None:
    for axes in panels:
        axes.grid(axis="y")
    panels[0].set_ylabel("accuracy, %")
    panels[0].set_xlabel("virtual seconds")
    panels[0].yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}")
    panels[1].set_xlabel("payload received by a peer")
    panels[1].xaxis.set_major_formatter(lambda value, _: human_bytes(value))
    panels[1].xaxis.set_major_locator(MaxNLocator(5))


def _draw_band(axes: Axes, x: npt.NDArray[np.float64], accuracies: npt.NDArray[np.float64]) -> None:
    low, mean, high = (pick(accuracies, axis=1) for pick in (np.nanmin, np.nanmean, np.nanmax))
    axes.fill_between(x, low, high, step="post", color=CLUSTER_COLOURS[0], alpha=0.15, lw=0)
    axes.step(x, mean, where="post", color=INK, lw=2.4)


def curves(
    n: int, rows: Sequence[MetricRow], points: int = 400
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return at most `points` times [m], every peer's accuracy then [m, n] (NaN before its first),
    and the payload bytes received by then, the mean over all n peers [m].

    A peer's accuracy holds until its next round ends.
    """
    judged = sorted((row for row in rows if row.accuracy is not None), key=lambda row: row.time)
    ends_ = np.array([row.time for row in judged])
    times = np.unique(ends_)
    if len(times) > points:
        times = np.linspace(times[0], times[-1], points)
    accuracy = np.full((len(times), n), np.nan)
    payload = np.zeros(len(times))
    for i in range(n):
        own = [row for row in judged if row.index == i]
        if not own:
            continue
        place = np.searchsorted([row.time for row in own], times, side="right") - 1
        there = place >= 0
        values = np.array([row.accuracy for row in own], dtype=np.float64)
        received = np.array([row.payload_received for row in own], dtype=np.float64)
        accuracy[there, i] = values[place[there]]
        payload[there] += received[place[there]] / n
    return times, accuracy, payload


def moments(scenario: Scenario, rows: Sequence[MetricRow]) -> list[tuple[Happening, float]]:
    """Return each event with the second at which it happened, as far as the rows tell: those of a
    round as its first (or first concerned) peer began it."""
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
            second = min((row.time - row.seconds.round for row in own), default=None)
        if second is not None:
            found.append((event, second))
    return found


def animate_bags(plan: Plan, topology: Sequence[TopologyRow], path: Path) -> Path:
    """Write a GIF of the bags forming, a frame a round (or every few), and return its path.

    Peers stand on a circle by true cluster; a line joins two that are in each other's bag.
    """
    from matplotlib.animation import FuncAnimation, PillowWriter

    by_round: dict[int, dict[int, TopologyRow]] = {}
    for row in topology:
        by_round.setdefault(row.t, {})[row.index] = row
    rounds = sorted(by_round)
    rounds = rounds[:: max(1, math.ceil(len(rounds) / FRAMES))]
    order = sorted(range(plan.n), key=lambda i: (plan.cluster_of(i), i))
    turn = {i: 2 * math.pi * place / plan.n for place, i in enumerate(order)}
    with mpl.rc_context({**STYLE, "savefig.bbox": None}):
        figure = Figure(figsize=(5.2, 5.4))
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0.02, 0.02, 0.96, 0.9))

        def draw(t: int) -> list[Line2D]:
            axes.clear()
            axes.set_axis_off()
            axes.set_title(f"{plan.method}, round {t}", loc="left", fontsize=12, fontweight="bold")
            rows = by_round[t]
            lines = []
            for i, row in rows.items():
                for j in row.bag:
                    if i < j and j in rows and i in rows[j].bag:
                        same = row.cluster == rows[j].cluster
                        lines += axes.plot(
                            [math.cos(turn[i]), math.cos(turn[j])],
                            [math.sin(turn[i]), math.sin(turn[j])],
                            color=_colour(row.cluster) if same else INK,
                            lw=0.8, alpha=0.5 if same else 0.9, zorder=1 if same else 2,
                        )  # fmt: skip
            for i in order:
                cluster = rows[i].cluster if i in rows else plan.cluster_of(i)
                axes.plot(
                    math.cos(turn[i]), math.sin(turn[i]), "o", ms=9 if plan.n <= 60 else 5,
                    color=_colour(cluster) if i in rows else FAINT, mec="white", zorder=3,
                )  # fmt: skip
            axes.set_xlim(-1.12, 1.12)
            axes.set_ylim(-1.12, 1.12)
            return lines

        animation = FuncAnimation(figure, draw, frames=rounds, interval=160)
        animation.save(path, writer=PillowWriter(fps=6), dpi=90)
    return path


def _colour(cluster: int | None) -> str:
    return MUTED if cluster is None else CLUSTER_COLOURS[cluster % len(CLUSTER_COLOURS)]
