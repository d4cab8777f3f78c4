"""What a study leaves for people: a table on the terminal, the same as CSV, and a picture."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from peer.display import CLUSTER_COLOURS, human_bytes, percent, ratio
from peer.files import write_atomically
from simulations.figures import METHOD_COLOURS, MUTED, STYLE
from simulations.study import Line

MARKERS = "osD^vP*X"


def study_table(lines: Sequence[Line], title: str = "") -> Table:
    """Return the lines of a study as a table for a terminal, a gap between its settings."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for label in lines[0].labels:
        table.add_column(label)
    table.add_column("method", no_wrap=True)
    text = any(line.perplexity is not None for line in lines)
    for heading in (
        *(("perplexity",) if text else ()),
        *("accuracy, %", "worst", "< local", "prec.", "recall", "payload", "seconds"),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    before: Mapping[str, str] = lines[0].labels
    for line in lines:
        if line.labels != before:
            table.add_section()
            before = line.labels
        table.add_row(
            *line.labels.values(),
            line.variant,
            *((f"{line.perplexity or math.nan:.1f}",) if text else ()),
            _accuracy(line),
            percent(line.accuracy_worst).removesuffix(" %"),
            "-" if line.below_local is None else f"{line.below_local:.3g}",
            ratio(line.precision),
            ratio(line.recall),
            human_bytes(line.bytes_moved),
            f"{line.seconds:.1f}",
        )
    return table


def _accuracy(line: Line) -> str:
    mean = percent(line.accuracy_mean).removesuffix(" %")
    return mean if line.accuracy_sd is None else f"{mean} ± {100 * line.accuracy_sd:.1f}"


def write_csv(lines: Sequence[Line], path: Path) -> Path:
    """Write the lines of a study as CSV, figures at full precision, and return `path`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*lines[0].labels, "method", *lines[0].figures])
    for line in lines:
        figures = ["" if value is None else value for value in line.figures.values()]
        writer.writerow([*line.labels.values(), line.variant, *figures])
    write_atomically(path, text.getvalue())
    return path


def study_figure(lines: Sequence[Line], title: str, note: str = "") -> Figure:
    """Return mean accuracy with its deviation over seeds.

    Settings that are the numbers of one key lie on a line each method has; other settings lie side
    by side, and a single one has its methods side by side.
    """
    variants = list(dict.fromkeys(line.variant for line in lines))
    names = list(dict.fromkeys(_name(line) for line in lines))
    numbers = _numbers(lines)
    shifts = [0.6 * ((place + 0.5) / len(variants) - 0.5) for place in range(len(variants))]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(6.4, 1.2 * len(names) + 3.4), 4.4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=24 if note else 8)
        axes.annotate(
            note, (0, 1), xytext=(0, 8), xycoords="axes fraction", textcoords="offset points",
            fontsize=9, color=MUTED,
        )  # fmt: skip
        for place, variant in enumerate(variants):
            own = [line for line in lines if line.variant == variant]
            if numbers:
                x = [numbers[_name(line)] for line in own]
            else:
                x = [names.index(_name(line)) + shifts[place] for line in own]
            _draw(axes, x, own, variant, place, joined=bool(numbers))
        if numbers:
            axes.set_xlabel(next(iter(lines[0].labels)))
            axes.set_xticks(sorted(numbers.values()))
        else:
            if len(names) == 1:
                axes.set_xticks(shifts, variants)
            else:
                axes.set_xticks(range(len(names)), names)
            axes.set_xlim(-0.5, len(names) - 0.5)
        axes.set_ylabel("accuracy, %")
        axes.grid(axis="y")
        if numbers or len(names) > 1:
            figure.legend(loc="outside right center")
        return figure


def _name(line: Line) -> str:
    return " ".join(line.labels.values())


def _numbers(lines: Sequence[Line]) -> dict[str, float]:
    """Return {text: number} of the settings' only label, {} if they are no numbers or but one."""
    if len(lines[0].labels) != 1:
        return {}
    texts = {text for line in lines for text in line.labels.values()}
    try:
        found = {text: float(text) for text in texts}
    except ValueError:
        return {}
    return found if len(found) > 1 else {}


def _draw(
    axes: Axes, x: Sequence[float], lines: Sequence[Line], label: str, place: int, *, joined: bool
) -> None:
    means = np.array(
        [np.nan if line.accuracy_mean is None else line.accuracy_mean for line in lines]
    )
    deviations = None
    if any(line.accuracy_sd is not None for line in lines):
        deviations = [100 * (line.accuracy_sd or 0.0) for line in lines]
    usual = CLUSTER_COLOURS[place % len(CLUSTER_COLOURS)]
    axes.errorbar(
        x, 100 * means, yerr=deviations, label=label, ms=6, capsize=2.5, elinewidth=1,
        color=METHOD_COLOURS.get(label, usual), marker=MARKERS[place % len(MARKERS)],
        ls="-" if joined else "", lw=1.4,
    )  # fmt: skip
