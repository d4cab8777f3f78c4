"""The pictures of many runs: what methods learn over rounds, bytes and time, and from whom.

Pure drawing, in the style of `simulations.figures`. A line is the mean of the runs that differ in
their seed, its band one sample standard deviation to either side. A method has the same colour in
every picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from peer.display import CLUSTER_COLOURS, human_bytes
from simulations.collection import Collection, Group, Run, setting_name
from simulations.curves import Band, Curve, Measure, band, has_time, over_rounds
from simulations.figures import COUNTS, METHOD_COLOURS, MUTED, STYLE, draw_counts, label_ends
from simulations.figures_bags import draw_theory, theory_mark
from simulations.theory import stage_one

BROKEN = {"local": (0, (1, 1.5)), "oracle": (0, (5, 2))}
"""Dashes of those that are no contestants: who learns alone, and who is told the clusters."""
DASHES: Sequence[Any] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
MOST_SETTINGS = 6
"""Settings that one picture shows."""

Axis = Callable[[Run], Curve]


def learning_figure(collection: Collection) -> Figure:
    """Return accuracy over rounds, over payload, and over time where rounds took time of their own;
    a row for each setting."""
    axes: dict[str, Axis] = {"round": lambda run: over_rounds(run.rows)}
    if any(row.payload_received for run in collection.runs for row in run.rows):
        axes["payload received by a peer"] = over_payload
    if all(has_time(run.rows) for run in collection.runs):
        axes["seconds"] = lambda run: run.timed[0]
    settings = _shown(collection)
    with mpl.rc_context(STYLE):
        width, height = 3.6 * len(axes) + 2.2, 3.3 * len(settings) + 0.7
        note = _over_seeds(collection)
        figure, panels = _grid(
            collection, "Accuracy", note, settings, columns=len(axes), size=(width, height)
        )
        for line, groups in zip(panels, settings.values(), strict=True):
            for panel, (name, curve_of) in zip(line, axes.items(), strict=True):
                bands = {_name(g, groups): _band(g, curve_of) for g in groups}
                ends = _draw(panel, groups, {k: own for k, own in bands.items() if own}, 100)
                if panel is line[-1]:
                    label_ends(panel, ends)
                if name.startswith("payload"):
                    panel.xaxis.set_major_formatter(lambda value, _: human_bytes(value))
                    panel.xaxis.set_major_locator(MaxNLocator(4))
                elif name == "round":
                    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
            line[0].set_ylabel("accuracy, %")
        for panel, name in zip(panels[-1], axes, strict=True):
            panel.set_xlabel(name)
        return figure


def bags_figure(collection: Collection) -> Figure:
    """Return precision and recall over rounds, with the theory of NSMC and PENS where there is one;
    a row for each setting. Raises ValueError when no run has bags."""
    settings = _shown(collection)
    measures: tuple[Measure, ...] = ("precision", "recall")
    with mpl.rc_context(STYLE):
        size = (10.4, 3.3 * len(settings) + 0.7)
        note = _over_seeds(collection)
        figure, panels = _grid(collection, "Bags", note, settings, columns=2, size=size)
        drawn = False
        for line, groups in zip(panels, settings.values(), strict=True):
            for panel, measure in zip(line, measures, strict=True):
                bands = {_name(g, groups): _band(g, _measured(measure)) for g in groups}
                own = {name: found for name, found in bands.items() if found}
                drawn |= bool(own)
                ends = _draw(panel, groups, own, 1)
                _draw_theories(panel, groups, measure)
                panel.set_ylabel(measure)
                panel.set_ylim(-0.02, 1.04)
                panel.xaxis.set_major_locator(MaxNLocator(integer=True))
                label_ends(panel, ends)
        for panel in panels[-1]:
            panel.set_xlabel("round")
        if not drawn:
            raise ValueError("no run has bags whose precision is known")
        return figure


def averaging_figure(collection: Collection) -> Figure:
    """Return who averaged with whom in the first run of each group, a panel a group and a row a
    setting, peers by true cluster. Raises ValueError when nobody averaged with anybody."""
    settings = {
        name: [g for g in groups if any(row.neighbours for row in g.runs[0].topology)]
        for name, groups in _shown(collection).items()
    }
    settings = {name: groups for name, groups in settings.items() if groups}
    if not settings:
        raise ValueError("nobody averaged with anybody")
    columns = max(len(groups) for groups in settings.values())
    with mpl.rc_context(STYLE):
        size = (2.5 * columns + 0.6, 2.75 * len(settings) + 0.9)
        text, note = "Who averaged with whom", f"seed {collection.runs[0].plan.seed}"
        figure, panels = _grid(collection, text, note, settings, columns=columns, size=size)
        for line, groups in zip(panels, settings.values(), strict=True):
            for panel in line[len(groups) :]:
                panel.set_axis_off()
            for panel, group in zip(line, groups, strict=False):
                draw_counts(panel, group.runs[0].plan, group.runs[0].topology)
                panel.set_xlabel(_name(group, groups), fontsize=9)
        shades = mpl.cm.ScalarMappable(mpl.colors.Normalize(0, 1), COUNTS)
        bar = figure.colorbar(shades, ax=panels.ravel().tolist(), shrink=0.6, aspect=24)
        bar.set_label("rounds, of a run's most")
        bar.set_ticks([0, 1], labels=["0", "most"])
        bar.outline.set_visible(False)
        return figure


def over_payload(run: Run) -> Curve:
    """Return a run's accuracy over the payload that a peer has received on average."""
    if has_time(run.rows):
        return run.timed[1]
    accuracy = over_rounds(run.rows)
    received: dict[int, list[int]] = {}
    for row in run.rows:
        received.setdefault(row.t, []).append(row.payload_received)
    payload = [float(np.mean(received[int(t)])) for t in accuracy.x]
    return Curve(np.array(payload), accuracy.y)


def _measured(measure: Measure) -> Axis:
    return lambda run: over_rounds(run.rows, measure)


def _band(group: Group, curve_of: Axis) -> Band | None:
    """Return the band of a group's runs, None where they have nothing of it."""
    curves = [curve for run in group.runs if len((curve := curve_of(run)).x)]
    return band(curves) if curves else None


def _over_seeds(collection: Collection) -> str:
    seeds = max(len(group.runs) for group in collection.groups)
    if seeds == 1:
        return f"seed {collection.runs[0].plan.seed}"
    return f"mean of {seeds} seeds ± one standard deviation"


def _shown(collection: Collection) -> dict[str, list[Group]]:
    return dict([*collection.settings().items()][:MOST_SETTINGS])


def _name(group: Group, beside: Sequence[Group]) -> str:
    """Return what tells a group apart from those drawn beside it."""
    alike = sum(own.name == group.name for own in beside) > 1
    return setting_name(group.labels) if alike else group.name


def _style(group: Group, groups: Sequence[Group]) -> dict[str, Any]:
    """Return a line's colour and dashes: those of its method, where the methods are unlike."""
    same = [own for own in groups if own.runs[0].plan.method == group.runs[0].plan.method]
    method = group.runs[0].plan.method
    if len(same) == len(groups) or method not in METHOD_COLOURS:
        place = groups.index(group)
        colour = CLUSTER_COLOURS[place % len(CLUSTER_COLOURS)]
        return {"color": colour, "ls": DASHES[place // len(CLUSTER_COLOURS) % len(DASHES)]}
    dashes = BROKEN.get(method, DASHES[same.index(group) % len(DASHES)])
    return {"color": METHOD_COLOURS[method], "ls": dashes}


def _draw(
    axes: Axes, groups: Sequence[Group], bands: Mapping[str, Band], scale: float
) -> list[tuple[float, str, Any]]:
    """Draw the groups' bands, values times `scale`, and return the ends that can be labelled."""
    ends = []
    for group in groups:
        own = bands.get(name := _name(group, groups))
        if own is None:
            continue
        style = _style(group, groups)
        mean = scale * own.mean
        if own.x[-1] > 0:
            axes.plot(own.x, mean, lw=1.8, **style)
        else:  # who receives nothing has no way to go on this axis, but a height
            axes.axhline(mean[-1], lw=1.2, **style)
        if own.sd is not None and own.x[-1] > 0:
            sd = scale * own.sd
            axes.fill_between(own.x, mean - sd, mean + sd, color=style["color"], alpha=0.16, lw=0)
        value = f"{mean[-1]:.1f}" if scale > 1 else f"{mean[-1]:.2f}"
        ends.append((float(mean[-1]), f"{name} {value}", style["color"]))
    axes.grid(axis="y")
    return ends


def _draw_theories(axes: Axes, groups: Sequence[Group], measure: Measure) -> None:
    found = {
        theory.name: theory
        for group in groups
        if group.runs[0].everybody and (theory := stage_one(group.runs[0].plan)) is not None
    }
    for theory in found.values():
        draw_theory(axes, getattr(theory, measure))
    if found:
        mark = theory_mark(f"{' and '.join(sorted(found))} in theory")
        axes.legend(handles=[mark], loc="best", handlelength=1.8)


def _grid(
    collection: Collection,
    text: str,
    note: str,
    settings: Mapping[str, Sequence[Group]],
    *,
    columns: int,
    size: tuple[float, float],
) -> tuple[Figure, Any]:
    """Return a figure of a row of panels for each setting, and the panels [settings, columns]."""
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(settings), columns, squeeze=False, sharey="row")
    figure.suptitle(
        f"{text}: {collection.path.resolve().name}", x=0.01, ha="left", fontsize=13,
        fontweight="bold",
    )  # fmt: skip
    figure.text(0.99, 0.995, note, ha="right", va="top", fontsize=9, color=MUTED)
    for line, name in zip(panels, settings, strict=True):
        line[0].set_title(name, loc="left", fontsize=10, color=MUTED)
    return figure, panels
