"""What there is to see of a run, or of many: the pictures, and what a reader is told of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from peer.plan import Plan
from peer.rundir import COMPARISON, MetricRow, TopologyRow, perplexity, read_json
from simulations.collection import Collection
from simulations.figures import (
    accuracy_figure,
    cost_figure,
    heatmap_figure,
    perplexity_figure,
    similarity_figure,
)
from simulations.figures_bags import evolution_figure, matching_figure, topology_figure
from simulations.figures_cfl import attempts_of, clustering_figure
from simulations.figures_study import averaging_figure, bags_figure, learning_figure
from simulations.model_cosines import model_cosines
from simulations.scenarios.pictures import moments, scenario_figure
from simulations.scenarios.runs import SCENARIO
from simulations.scenarios.scenario import load
from simulations.tables import study_figure
from simulations.theory import stage_one

REFERENCES = ("local", "random")
"""Methods whose mean is drawn beside the run's own, where its comparison has them."""


@dataclass(frozen=True)
class Drawn:
    """A picture that is not written yet."""

    name: str
    heading: str
    caption: str
    figure: Figure


def pictures_of_run(
    run: Path,
    plan: Plan,
    rows: Sequence[MetricRow],
    topology: Sequence[TopologyRow],
) -> Iterator[Drawn]:
    """Yield what there is to see of the run in a directory, whose plan and rows are given."""
    scenario = load(run / SCENARIO) if (run / SCENARIO).exists() else None
    references = {
        method: [(float(t), float(mean)) for t, mean in summary["curve"]]
        for method, summary in read_json(run / COMPARISON).items()
        if method in REFERENCES and method != plan.method
    }
    honest = [row for row in rows if not row.attacker]
    judged = [row for row in honest if row.accuracy is not None]
    if scenario is not None:
        yield Drawn(
            "scenario", "The scenario",
            "Who reaches whom, and what was to happen when.", scenario_figure(scenario),
        )  # fmt: skip
    if judged:
        yield Drawn(
            "accuracy", "Accuracy over rounds",
            "Each thin line is a peer on its own test set, in the colour of its true cluster; the "
            "thick one is the mean.", accuracy_figure(plan, honest, references),
        )  # fmt: skip
    if perplexity(plan, 0.0) is not None:
        yield Drawn(
            "perplexity", "Perplexity over rounds",
            "Thin: each peer on its own test words; thick: of all their words together.",
            perplexity_figure(plan, honest),
        )  # fmt: skip
    if judged and any(row.payload_received for row in judged):
        events = [] if scenario is None else moments(scenario, rows)
        happened = [(str(getattr(event, "do", "")), second) for event, second in events]
        yield Drawn(
            "cost", "What accuracy costs",
            "The mean over peers, and the band from the worst to the best, against what a peer has "
            "received in models and evidence, and against time where rounds took time of their "
            "own.", cost_figure(plan, honest, happened),
        )  # fmt: skip
    if any(row.precision is not None for row in rows):
        everybody = scenario is None or (
            scenario.topology.kind == "complete" and not scenario.script
        )
        yield Drawn(
            "matching", "How true the bags are",
            "Precision: the share of a bag that is of the own cluster; recall: the share of the "
            "own cluster that is in the bag; right: the share of peers whose neighbours are all of "
            "their cluster. Broken: what the theory expects of stage 1 if peers of the own cluster "
            "are always the more similar.",
            matching_figure(plan, honest, topology, stage_one(plan) if everybody else None),
        )  # fmt: skip
    if any(row.neighbours for row in topology):
        yield Drawn(
            "heatmap", "Who averaged with whom",
            "In how many rounds the peer of a row took the model of the peer of a column. Peers "
            "are ordered by true cluster, which the frames show.", heatmap_figure(plan, topology),
        )  # fmt: skip
    if (cosines := model_cosines(run)) is not None:
        yield Drawn(
            "similarity", "How alike the final models are",
            "Cosines between the ways that the final models lie off their mean; the frames are the "
            "true clusters.", similarity_figure(plan, *cosines),
        )  # fmt: skip
    if any(row.bag for row in topology):
        lines = (
            "Colours are true clusters. A line from a peer halfway to another: it has it in its "
            "bag; a whole line: both have. Dark lines lead to strangers."
        )
        yield Drawn("topology", "The final bags", lines, topology_figure(plan, topology))
        yield Drawn(
            "evolution", "The bags as they formed",
            lines.replace("Colours", "Some rounds, closer together at the beginning. Colours", 1),
            evolution_figure(plan, rows, topology),
        )  # fmt: skip
    if attempts_of(rows):
        yield Drawn(
            "clustering", "How the clusters came apart",
            "Accuracy by true cluster; the two norms of updates against their thresholds; the "
            "cosines of each node's best cut. Upright lines are splits.",
            clustering_figure(plan, rows),
        )  # fmt: skip


def pictures_of_collection(collection: Collection) -> Iterator[Drawn]:
    """Yield what there is to see of many runs."""
    runs = collection.runs
    yield Drawn(
        "learning", "What the methods learn",
        "The mean over peers and seeds, and a band of one standard deviation over seeds: against "
        "rounds, what a peer has received in models and evidence, and time where rounds took time "
        "of their own. Who receives nothing is a level line there.", learning_figure(collection),
    )  # fmt: skip
    yield Drawn(
        "final", "How it ends",
        "Accuracy at the last round: the mean over seeds and one standard deviation.",
        study_figure([group.line for group in collection.groups], collection.path.resolve().name),
    )  # fmt: skip
    if any(row.precision is not None for run in runs for row in run.rows):
        yield Drawn(
            "bags", "How true the bags are",
            "Precision: the share of a bag that is of the own cluster; recall: the share of the "
            "own cluster that is in the bag. Broken: what the theory expects of stage 1 if peers "
            "of the own cluster are always the more similar.", bags_figure(collection),
        )  # fmt: skip
    if any(row.neighbours for run in runs for row in run.topology):
        yield Drawn(
            "averaging", "Who averaged with whom",
            "Of the first seed of each method: in how many rounds the peer of a row took the model "
            "of the peer of a column, by true cluster.", averaging_figure(collection),
        )  # fmt: skip
