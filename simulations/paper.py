"""`simulate paper`: the tables and figures of the PANM paper, as lists of runs over plans, and one
of CFL.

Each is what varies, which methods are compared and what the paper claims of them; the machinery is
that of `simulations.study`. By default they are of a size for two cores and an hour at most; the
paper does not give its numbers of rounds, images and epochs, so those of `full` are [choice].
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from peer.errors import UserError
from peer.files import write_atomically
from peer.learning.sources import load_dataset
from peer.plan import Plan
from simulations.compare import make_console, parse_single
from simulations.figures import save
from simulations.purity import purity, purity_figure, purity_rows, purity_table
from simulations.runs import Equipment, changed
from simulations.separation import separation, separation_rows, separation_table
from simulations.study import Line, Setting, Study, Variant, note_of, run_study
from simulations.tables import study_figure, study_table, write_csv

FULL_SEEDS = (0, 1, 2)
SEARCH_ROUNDS = 6
LEAST = 0.002
"""[choice] By how much the one figure is above the other, at least, where a claim says above: that
+0.0 of one seed is none, nobody would dispute; 0.2 points of accuracy are small beside any gain."""


@dataclass(frozen=True)
class Claim:
    """What the paper says of two groups of lines: the figure of the one is above the other's.

    `better` and `worse` select lines by their labels, the variant's name under "method"; lines are
    compared that agree in every label that is in neither. The claim is seen where `better` is above
    `worse` by LEAST, or by the standard deviation of either over seeds if that is more; with a
    `margin`, where it is at most that much below it.
    """

    text: str
    better: Mapping[str, str]
    worse: Mapping[str, str]
    figure: str = "accuracy_mean"
    margin: float | None = None


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of the paper: its runs, and what the paper reads from them."""

    title: str
    settings: Callable[[bool], list[Setting]]
    variants: Sequence[Variant]
    claims: Sequence[Claim]
    changes: Mapping[str, Any] = field(default_factory=dict)
    baseline: bool = True


def paper_plan(full: bool) -> Plan:
    """Return what all tables start from: n = 100, l = 10, k = 5, images in four rotations."""
    return Plan.model_validate(
        {
            "name": "paper",
            "n": 100,
            "rounds": 100 if full else 40,
            "data": "fashion-mnist",
            **_model("lenet" if full else "mlp"),
            "matching": {"l": 10, "k": 5},
            "partition": {
                "kind": "rotation",
                "clusters": 4,
                "train_per_peer": 500 if full else 300,
            },
        }
    )


def _model(name: str) -> dict[str, Any]:
    return {"model": name, "training": {"lr": 0.05 if name == "mlp" else 0.02}}


def _variants(*names: str) -> tuple[Variant, ...]:
    return tuple(Variant(name, name) for name in names)


def _above(
    text: str, better: str, worse: Iterable[str], margin: float | None = None, **options: Any
) -> Iterator[Claim]:
    """Yield the claim that a method is above each of others, or with a margin not far below."""
    where = "above" if margin is None else f"at most {100 * margin:g} points below"
    for name in worse:
        said, other = f"{text}: {better} {where} {name}", {"method": name}
        yield Claim(said, {"method": better}, other, margin=margin, **options)


def _data_sets(full: bool) -> list[Setting]:
    return [
        Setting(
            {"data": name},
            {"data": name, "model": model, "training.lr": 0.05 if model == "mlp" else 0.02},
        )
        for name, model in (
            ("mnist", "lenet" if full else "mlp"),
            ("fashion-mnist", "lenet" if full else "mlp"),
            ("cifar10", "cnn" if full else "lenet"),
        )
    ]


def _heterogeneity(_full: bool) -> list[Setting]:
    return [
        _partition(kind, clusters) for kind in ("rotation", "label-swap") for clusters in (2, 4)
    ]


def _rotations(_full: bool) -> list[Setting]:
    return [_partition("rotation", clusters) for clusters in (2, 4)]


def _separable(_full: bool) -> list[Setting]:
    return [
        Setting(
            {"partition": kind if kind == "none" else f"{kind} K={clusters}", "peers": str(n)},
            {"partition.kind": kind, "partition.clusters": clusters, "n": n},
        )
        for kind, clusters in (("rotation", 4), ("label-swap", 4), ("none", 1))
        for n in (20, 100)
    ]


def _partition(kind: str, clusters: int) -> Setting:
    return Setting(
        {"partition": f"{kind} K={clusters}"},
        {"partition.kind": kind, "partition.clusters": clusters},
    )


def _grid(_full: bool) -> list[Setting]:
    return [
        Setting({"l": str(l), "k": str(k)}, {"matching.l": l, "matching.k": k})
        for l in (10, 20)  # noqa: E741
        for k in (3, 5, 8)
    ]


def _one_key(label: str, key: str, small: Sequence[Any], full: Sequence[Any]) -> Any:
    """Return the settings of one key: some values, and those of the paper's size."""
    return lambda whole: [Setting({label: str(v)}, {key: v}) for v in (full if whole else small)]


EVERYBODY = _variants("local", "fixed", "random", "oracle", "pens", "panm-loss", "panm-grad")
BLIND = ("local", "fixed", "random")
PANM = ("panm-loss", "panm-grad")

TABLES: dict[str, PaperTable] = {
    "iii": PaperTable(
        "Table III: probability that all neighbours are true, theory and runs",
        lambda _: [Setting({"clusters": str(k)}, {"partition.clusters": k}) for k in (4, 2)],
        _variants("pens", "panm-loss", "panm-grad"),
        (),
        {"rounds": SEARCH_ROUNDS, "matching.t1": SEARCH_ROUNDS},
        baseline=False,
    ),
    "iv": PaperTable(
        "Table IV: three data sets, two rotations",
        _data_sets,
        EVERYBODY,
        (
            Claim(
                "FixTopology improves on local training", {"method": "fixed"}, {"method": "local"}
            ),
            Claim("Random improves on local training", {"method": "random"}, {"method": "local"}),
            *_above("wrong neighbours impede", "oracle", ("fixed", "random")),
            *(c for m in PANM for c in _above("PANM", m, ("pens", "random", "fixed"))),
            *(c for m in PANM for c in _above("PANM surpasses Oracle", m, ("oracle",))),
        ),
        {"partition.clusters": 2},
    ),
    "v": PaperTable(
        "Table V: rotation and label swap, two and four clusters",
        _heterogeneity,
        EVERYBODY,
        (
            *(c for m in PANM for c in _above("PANM is robust", m, ("pens", "random", "fixed"))),
            *(c for m in PANM for c in _above("PANM outperforms Oracle in some", m, ("oracle",))),
            *(
                claim
                for m in PANM
                for figure in ("precision", "recall")
                for claim in _above(f"stage 2, {figure}", m, ("pens",), figure=figure)
            ),
        ),
    ),
    "vi": PaperTable(
        "Table VI: candidates l and neighbours k",
        _grid,
        _variants("oracle", "pens", "panm-loss", "panm-grad"),
        (
            *(
                Claim(
                    f"{method} gains with k: k=8 above k=3",
                    {"method": method, "k": "8"},
                    {"method": method, "k": "3"},
                )
                for method in ("oracle", "panm-loss")
            ),
            *_above("PANM-Loss surpasses Oracle in most", "panm-loss", ("oracle",)),
            Claim(
                "PENS needs small k/l: k=3 above k=8",
                {"method": "pens", "k": "3"},
                {"method": "pens", "k": "8"},
            ),
        ),
    ),
    "vii": PaperTable(
        "Table VII: peers among themselves, and central methods",
        _rotations,
        (
            *_variants("fedavg"),
            *(Variant(f"ifca c={c}", "ifca", {"central.clusters": c}) for c in (2, 4)),
            Variant("ifca c=4, 10 %", "ifca", {"central.clusters": 4, "central.fraction": 0.1}),
            *_variants("panm-loss", "panm-grad"),
        ),
        (
            Claim(
                "a tenth of the peers a round is too few for IFCA",
                {"method": "ifca c=4"},
                {"method": "ifca c=4, 10 %"},
            ),
            *(
                Claim(
                    f"IFCA is poor with a wrong c (2 models, 4 clusters): {method} above it",
                    {"method": method, "partition": "rotation K=4"},
                    {"method": "ifca c=2", "partition": "rotation K=4"},
                )
                for method in PANM
            ),
            *(
                claim
                for m in PANM
                for claim in _above("on par with full IFCA", m, ("ifca c=4",), margin=0.01)
            ),
            *(c for m in PANM for c in _above("PANM", m, ("fedavg",))),
        ),
    ),
    "train-size": PaperTable(
        "Figure 7, left: training images of a peer",
        _one_key("images", "partition.train_per_peer", (100, 200, 400), (100, 250, 500, 1000)),
        EVERYBODY,
        (
            *(c for m in PANM for c in _above("PANM", m, (*BLIND, "pens"))),
            *(c for m in PANM for c in _above("comparable", m, ("oracle",), margin=0.01)),
        ),
    ),
    "peers": PaperTable(
        "Figure 7, right: number of peers",
        _one_key("peers", "n", (40, 60, 80), (40, 60, 100, 200)),
        EVERYBODY,
        (
            *(c for m in PANM for c in _above("PANM", m, (*BLIND, "pens"))),
            *(c for m in PANM for c in _above("comparable", m, ("oracle",), margin=0.01)),
        ),
    ),
    "cosines": PaperTable(
        "Figure 2: the two cosines of PANM-Grad, alone and together",
        _one_key("alpha", "matching.alpha", (0.0, 0.5, 1.0), (0.0, 0.25, 0.5, 0.75, 1.0)),
        _variants("panm-grad"),
        tuple(
            Claim(f"both cosines above {name} alone", {"alpha": "0.5"}, {"alpha": alpha})
            for name, alpha in (("that of h (alpha = 0)", "0.0"), ("that of g (alpha = 1)", "1.0"))
        ),
        {"matching.fade": 0.0},  # the paper's own sum, whatever converges
    ),
    "cfl": PaperTable(
        "CFL: the true clusters come apart, and then nothing more",
        _separable,
        _variants("cfl"),
        (),
        {"rounds": 100, "partition.train_per_peer": 300, "model": "mlp", "training.lr": 0.05},
        baseline=False,
    ),
}


def run_paper(
    name: str,
    out: Path,
    *,
    full: bool = False,
    seeds: Sequence[int] | None = None,
    overrides: Sequence[str] = (),
    equipment: Equipment,
) -> None:
    """Run what is not finished of a table, print it, and write CSV, picture and reading to `out`.

    `overrides` are texts KEY=VALUE that hold in every run, whatever the table says. Settings whose
    data are not on this machine are left out, with a message. Raises UserError.
    """
    if name not in TABLES:
        raise UserError(f"there is no table {name}", f"choose of {', '.join(TABLES)}")
    table, console = TABLES[name], make_console()
    study = _study(table, full=full, seeds=seeds, overrides=overrides)
    study = _with_data(study, equipment, console)
    if not study.settings:
        raise UserError(f"none of the data of table {name} are on this machine")
    lines = run_study(study, out, equipment=equipment, console=console)
    out.mkdir(parents=True, exist_ok=True)
    report = {"iii": _report_purity, "cfl": _report_separation}.get(name, _report)
    report(table, study, lines, out, console)


def table_names() -> list[tuple[str, str, int]]:
    """Return (name, title, number of runs by default) of every table."""
    return [
        (name, table.title, len(_study(table, full=False, seeds=None, overrides=()).cells))
        for name, table in TABLES.items()
    ]


def reading(claims: Sequence[Claim], lines: Sequence[Line]) -> list[str]:
    """Return a line for each claim that can be judged: what the paper says, and what was seen."""
    return [text for claim in claims if (text := _judge(claim, lines))]


def _judge(claim: Claim, lines: Sequence[Line]) -> str:
    compared = list(_compared(claim, lines))
    if not compared:
        return ""
    points = claim.figure == "accuracy_mean"
    parts = (
        f"{place} {100 * d:+.1f}" if points else f"{place} {d:+.2f}" for place, d, _ in compared
    )
    differences = ", ".join(part.strip() for part in parts) + (" points" if points else "")
    return f"{claim.text}: {_verdict([seen for *_, seen in compared])} ({differences})"


def _verdict(seen: Sequence[bool]) -> str:
    """Return in words in how many comparisons a claim was seen."""
    if len(seen) == 1:
        return "seen" if seen[0] else "not seen"
    if not any(seen):
        return f"not seen in any of {len(seen)}"
    return f"seen in {'all' if all(seen) else f'{sum(seen)} of'} {len(seen)}"


def _compared(claim: Claim, lines: Sequence[Line]) -> Iterator[tuple[str, float, bool]]:
    """Yield (where, better - worse, whether the claim is seen) of all pairs that it compares."""
    chosen = claim.better.keys() | claim.worse.keys()

    def of(group: Mapping[str, str]) -> dict[tuple[str, ...], Line]:
        found = {}
        for line in lines:
            labels = {**line.labels, "method": line.variant}
            if all(labels.get(key) == text for key, text in group.items()):
                found[tuple(text for key, text in labels.items() if key not in chosen)] = line
        return found

    better, worse = of(claim.better), of(claim.worse)
    for place in better:
        if place in worse:
            pair = better[place].figures, worse[place].figures
            above, below = (figures[claim.figure] for figures in pair)
            if above is not None and below is not None:
                difference = above - below
                yield " ".join(place), difference, difference >= _least(claim, pair)


def _least(claim: Claim, pair: Iterable[Mapping[str, float | int | None]]) -> float:
    """Return the least difference of two lines' figures with which a claim is seen."""
    if claim.margin is not None:
        return -claim.margin
    deviation = f"{claim.figure.removesuffix('_mean')}_sd"
    return max(LEAST, *(figures[deviation] or 0.0 for figures in pair))


def _study(
    table: PaperTable, *, full: bool, seeds: Sequence[int] | None, overrides: Sequence[str]
) -> Study:
    forced = dict(parse_single(text) for text in overrides)
    own = table.settings(full)
    for key in forced:
        if len({setting.changes.get(key) for setting in own}) > 1:
            raise UserError(f"{key} is what this table varies", "leave it out of --set")
    settings = [
        Setting(setting.labels, {**table.changes, **setting.changes, **forced}) for setting in own
    ]
    return Study(
        base=paper_plan(full),
        settings=settings,
        variants=table.variants,
        seeds=seeds or (FULL_SEEDS if full else (0,)),
        baseline=table.baseline,
    )


def _with_data(study: Study, equipment: Equipment, console: Console) -> Study:
    """Return the study without the settings whose data are not there, and say which."""
    if equipment.data is not None:
        return study
    there = []
    for setting in study.settings:
        plan = changed(study.base, setting.changes)
        try:
            load_dataset(plan.data, seed=plan.seed)
        except UserError as error:
            hint = f" ({error.hint})" if error.hint else ""
            console.print(f"left out {' '.join(setting.labels.values())}: {error.message}{hint}")
        else:
            there.append(setting)
    return replace(study, settings=there)


def _report(
    table: PaperTable, study: Study, lines: Sequence[Line], out: Path, console: Console
) -> None:
    console.print(study_table(lines, table.title))
    text = reading(table.claims, lines)
    console.print("What the paper says, and what was seen here (differences of the two):")
    for line in text:
        console.print(f"  {line}", soft_wrap=True)
    write_atomically(out / "reading.txt", "".join(f"{line}\n" for line in text))
    seeds = ", ".join(map(str, study.seeds))
    note = f"{note_of(study)} · seeds {seeds}"
    pictures = save(study_figure(lines, table.title, note), out / "table")
    console.print(f"{write_csv(lines, out / 'table.csv')}  {pictures[0]}")


def _report_purity(
    table: PaperTable, study: Study, lines: Sequence[Line], out: Path, console: Console
) -> None:
    purities = []
    for setting in study.settings:
        runs = {line.variant: line.runs for line in lines if line.labels == setting.labels}
        plan = changed(study.base, setting.changes)
        purities.append(purity(setting.labels["clusters"], plan, runs))
    console.print(purity_table(purities, table.title))
    file = _write_rows(purity_rows(purities), out)
    pictures = save(purity_figure(purities, table.title), out / "table")
    console.print(f"{file}  {pictures[0]}")


def _report_separation(
    table: PaperTable, _study: Study, lines: Sequence[Line], out: Path, console: Console
) -> None:
    rows = separation_rows([separation(line.labels, run) for line in lines for run in line.runs])
    console.print(separation_table(rows, table.title))
    console.print(_write_rows(rows, out))


def _write_rows(rows: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Write a table's rows as CSV, and return its path."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(out / "table.csv", text.getvalue())
    return out / "table.csv"
