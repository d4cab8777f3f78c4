"""Tables of means and deviations, for a paper (LaTeX with booktabs) and for a page.

What is best among those that compete is bold. A table knows its figures at full precision; how many
decimals are shown is said by the column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal, NamedTuple

from peer.display import human_bytes
from peer.plan import Plan
from peer.rundir import MetricRow, final_rows, perplexity
from simulations.collection import Collection, Group, short_key

NO_CONTESTANT = "oracle"
"""Is told the clusters, so that no column's best is among its figures."""
DASH = "–"
_ESCAPES = str.maketrans(
    {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
        "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
        "<": r"\textless{}", ">": r"\textgreater{}", "±": r"$\pm$", DASH: "--", "·": r"$\cdot$",
    }
)  # fmt: skip


class Value(NamedTuple):
    """A mean, None where there is none, and its sample standard deviation, if there are several."""

    mean: float | None
    sd: float | None = None


@dataclass(frozen=True)
class Column:
    """A figure of every line: its heading, how it is written, whether the most or least is best."""

    heading: str
    values: Sequence[Value]
    write: Callable[[float], str]
    best: Literal["most", "least"] | None = None


@dataclass(frozen=True)
class Sheet:
    """A table: texts that say what each line is of, by heading, and columns of figures.

    `contests` [lines] says among which lines the best is sought: those of equal number; None for a
    line that does not compete.
    """

    caption: str
    labels: Mapping[str, Sequence[str]]
    columns: Sequence[Column]
    contests: Sequence[int | None]

    @property
    def headings(self) -> list[str]:
        """The headings of all columns."""
        return [*self.labels, *(column.heading for column in self.columns)]

    def lines(self) -> list[tuple[list[str], list[tuple[str, bool]]]]:
        """Return each line's texts, and its figures as they are shown, each with whether it is
        best."""
        columns = [[*zip(_written(own), self._best(own), strict=True)] for own in self.columns]
        return [
            ([texts[place] for texts in self.labels.values()], [own[place] for own in columns])
            for place in range(len(self.contests))
        ]

    def _best(self, column: Column) -> list[bool]:
        """Return which lines have the best of their contest, as far as the decimals shown tell."""
        pick = {"most": max, "least": min}.get(column.best or "")
        best: dict[int, float] = {}
        if pick is not None:
            for contest, value in zip(self.contests, column.values, strict=True):
                if contest is not None and value.mean is not None:
                    best[contest] = pick(value.mean, best.get(contest, value.mean))
        rivals = [contest for contest in self.contests if contest is not None]
        return [
            contest in best
            and rivals.count(contest) > 1
            and value.mean is not None
            and column.write(value.mean) == column.write(best[contest])
            for contest, value in zip(self.contests, column.values, strict=True)
        ]


def latex(sheet: Sheet) -> str:
    r"""Return a table environment; it needs \usepackage{booktabs}."""
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{escape(sheet.caption)}}}",
        rf"  \begin{{tabular}}{{{'l' * len(sheet.labels)}{'r' * len(sheet.columns)}}}",
        r"    \toprule",
        f"    {' & '.join(map(escape, sheet.headings))} \\\\",
        r"    \midrule",
    ]
    before: Sequence[str] = ()
    for texts, figures in sheet.lines():
        if before and texts[:-1] != before:
            lines.append(r"    \addlinespace")
        before = texts[:-1]
        written = [
            rf"\textbf{{{escape(text)}}}" if best else escape(text) for text, best in figures
        ]
        lines.append(f"    {' & '.join([*map(escape, texts), *written])} \\\\")
    lines += [r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Return a text in which LaTeX sees nothing special."""
    return text.translate(_ESCAPES)


def study_sheet(collection: Collection) -> Sheet:
    """Return what the groups of a collection come to: means and deviations over seeds."""
    groups = collection.groups
    lines = [group.line for group in groups]
    labels = {
        short_key(key, lines[0].labels): [line.labels[key] for line in lines]
        for key in lines[0].labels
    }
    seeds = max(line.seeds for line in lines)
    text = any(line.perplexity is not None for line in lines)
    columns = [
        Column("perplexity", [Value(own.perplexity, own.perplexity_sd) for own in lines], _one,
               "least"),
        Column("accuracy, %", [Value(own.accuracy_mean, own.accuracy_sd) for own in lines],
               _percent, "most"),
        Column("worst peer, %", [Value(own.accuracy_worst) for own in lines], _percent, "most"),
        Column("peers below local", [Value(own.below_local) for own in lines], "{:.3g}".format),
        Column("precision", [Value(own.precision, own.precision_sd) for own in lines], _two,
               "most"),
        Column("recall", [Value(own.recall, own.recall_sd) for own in lines], _two, "most"),
        Column("payload", [Value(own.bytes_moved) for own in lines], human_bytes),
        Column("seconds", [Value(own.seconds) for own in lines], _one),
    ]  # fmt: skip
    over = f"means of {seeds} seeds ± standard deviation" if seeds > 1 else "one seed"
    return Sheet(
        f"{collection.path.resolve().name}: {over}.",
        {**labels, "method": [group.name for group in groups]},
        _present(columns[0 if text else 1 :]),
        _contests(groups),
    )


def run_sheet(plan: Plan, rows: Sequence[MetricRow]) -> Sheet:
    """Return what a run came to for each true cluster and for all peers: means and deviations over
    peers, each at its own last round."""
    last = [row for row in final_rows(rows) if not row.attacker]
    clusters = sorted({row.cluster for row in last if row.cluster is not None})
    parts = [("all", last)]
    if len(clusters) > 1:
        own = [(str(c), [row for row in last if row.cluster == c]) for c in clusters]
        parts = [*own, *parts]
    names, groups = zip(*parts, strict=True)
    perplexities = [Value(perplexity(plan, _over(group, "loss").mean)) for group in groups]
    columns = [
        Column("peers", [Value(float(len(group))) for group in groups], "{:.0f}".format),
        Column("perplexity", perplexities, _one),
        Column("accuracy, %", [_over(group, "accuracy") for group in groups], _percent),
        Column("worst peer, %", [_least(group) for group in groups], _percent),
        Column("precision", [_over(group, "precision") for group in groups], _two),
        Column("recall", [_over(group, "recall") for group in groups], _two),
        Column("received by a peer", [_over(group, "payload_received") for group in groups],
               human_bytes),
    ]  # fmt: skip
    caption = f"{plan.name}, {plan.method}: means over peers ± standard deviation."
    return Sheet(caption, {"cluster": names}, _present(columns), [None] * len(groups))


def _contests(groups: Sequence[Group]) -> list[int | None]:
    """Return in which setting each group competes."""
    numbers: dict[tuple[str, ...], int] = {}
    return [
        None
        if group.runs[0].plan.method == NO_CONTESTANT
        else numbers.setdefault(tuple(group.labels.values()), len(numbers))
        for group in groups
    ]


def _present(columns: Sequence[Column]) -> list[Column]:
    """Return the columns in which any line has a figure."""
    return [own for own in columns if any(value.mean is not None for value in own.values)]


def _over(rows: Sequence[MetricRow], name: str) -> Value:
    values = [float(value) for row in rows if (value := getattr(row, name)) is not None]
    if not values:
        return Value(None)
    return Value(fmean(values), stdev(values) if len(values) > 1 else None)


def _least(rows: Sequence[MetricRow]) -> Value:
    return Value(min((row.accuracy for row in rows if row.accuracy is not None), default=None))


def _written(column: Column) -> list[str]:
    texts = []
    for mean, sd in column.values:
        if mean is None or not math.isfinite(mean):
            texts.append(DASH)
        else:
            texts.append(column.write(mean) + ("" if sd is None else f" ± {column.write(sd)}"))
    return texts


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _one(value: float) -> str:
    return f"{value:.1f}"


def _two(value: float) -> str:
    return f"{value:.2f}"
