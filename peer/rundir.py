"""The files a run leaves: who writes them, who reads them, and what the summary says.

A run directory holds `plan.toml`, `metrics.jsonl` (a row a peer and round), `topology.jsonl` (who
averaged with whom), `summary.json`, `traffic.json` (bytes by message kind) and `models/`. A peer's
state directory is the run directory of that one peer; `merge` makes a federation's of several.

Rows are appended and flushed, never rewritten. A process killed while it writes leaves a torn last
line: readers drop it and the next writer cuts it off. A round that is run again after a restart
appends its row again: the last row of each (peer, round) counts.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from peer.errors import StateError, UserError
from peer.files import write_atomically
from peer.learning.names import TEXT_MODELS
from peer.merit import clusters_found
from peer.plan import Plan, describe

METRICS = "metrics.jsonl"
TOPOLOGY = "topology.jsonl"
PLAN = "plan.toml"
SUMMARY = "summary.json"
TRAFFIC = "traffic.json"
HEALTH = "health.json"
COMPARISON = "comparison.json"
MODELS = "models"


class _Row(BaseModel):
    """A line of a run's files. Keys of later versions are ignored; NaN and Inf become null."""

    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="null")

    t: int = Field(ge=0, description="round, 1-based")
    index: int = Field(ge=0, description="the peer")
    cluster: int | None = Field(default=None, description="its true cluster, where one is known")


class Seconds(BaseModel):
    """Wall time of the parts of one round, in seconds."""

    model_config = ConfigDict(frozen=True)

    train: float = 0.0
    match: float = 0.0
    aggregate: float = 0.0
    evaluate: float = 0.0
    round: float = 0.0


class MetricRow(_Row):
    """What one peer measured in one round.

    `accuracy` (in [0, 1]) and `loss` (nats) are of w_i^t on the peer's own test set; `precision`
    and `recall` of the bag against the true cluster, null where there is no bag or no true cluster.
    The four byte counts are cumulative: payload is models and evidence, wire is everything.
    """

    accuracy: float | None = None
    loss: float | None = None
    precision: float | None = None
    recall: float | None = None
    bag_size: int | None = None
    payload_sent: int = 0
    payload_received: int = 0
    wire_sent: int = 0
    wire_received: int = 0
    exchanges: int = Field(default=0, description="probes and pulls of the round")
    late: int = Field(default=0, description="peers whose answer came late")
    missing: int = Field(default=0, description="peers left out of the round")
    epsilon: float | None = Field(
        default=None, description="spent so far of the peer's samples, with DP-SGD"
    )
    seconds: Seconds = Seconds()
    time: float = Field(default=0.0, description="when the round ended, Unix seconds")
    notes: dict[str, Any] = Field(default_factory=dict, description="what the matcher has to say")
    attacker: bool = Field(
        default=False, description="whether an experiment has it attack; no figure counts it then"
    )

    def impersonal(self) -> MetricRow:
        """Return the row without what tells of the peer's samples, for those who may not know."""
        return self.model_copy(update={"accuracy": None, "loss": None})


class TopologyRow(_Row):
    """Whom one peer averaged with in one round, and whom it takes for its own cluster."""

    neighbours: list[int] = Field(default_factory=list)
    bag: list[int] = Field(default_factory=list)


RowT = TypeVar("RowT", MetricRow, TopologyRow)

Revision = Callable[[MetricRow, TopologyRow], tuple[MetricRow, TopologyRow]]
"""The rows of a round -> those that take their place."""


def panmesh_version() -> str:
    """Return the installed version of panmesh, or "unknown" in a tree that is not installed."""
    try:
        return version("panmesh")
    except PackageNotFoundError:
        return "unknown"


class RunWriter:
    """Writes a run directory, row by row; one writer a directory at a time.

    Opens or goes on with the directory `path` of `plan`. Raises StateError when it holds a run of
    another plan or cannot be written, UserError when a row in it is damaged.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path = path
        self.plan = plan
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._keep_plan()  # first: a run that is killed here is still known for one
            (path / MODELS).mkdir(exist_ok=True)
            for name, read in ((METRICS, read_metrics), (TOPOLOGY, read_topology)):
                _cut_torn_line(path / name)
                if (path / name).exists():  # now, rather than when all is summed up
                    read(path)
            self._metrics = (path / METRICS).open("a", encoding="utf-8")
            self._topology = (path / TOPOLOGY).open("a", encoding="utf-8")
        except OSError as error:
            raise StateError(f"cannot write the run directory {path}: {error}") from None

    def _keep_plan(self) -> None:
        file = self.path / PLAN
        if file.exists() and Plan.load(file).digest == self.plan.digest:
            return
        # A plan that was refused before its first round does not stand in another's way.
        rows = [path for name in (METRICS, TOPOLOGY) if (path := self.path / name).exists()]
        if file.exists() and any(path.stat().st_size for path in rows):
            raise StateError(f"{self.path} holds a run of another plan")
        write_atomically(file, _provenance() + self.plan.to_toml())

    def append(self, metric: MetricRow, topology: TopologyRow) -> None:
        """Add a finished round of one peer. Raises StateError when the disk does not take it."""
        try:
            # Topology first: a metrics row says that the round is complete.
            for file, row in ((self._topology, topology), (self._metrics, metric)):
                file.write(row.model_dump_json() + "\n")
                file.flush()
        except OSError as error:
            raise StateError(f"cannot write to {self.path}: {error}") from None

    def write_traffic(self, traffic: Mapping[str, Any]) -> None:
        """Replace traffic.json: nested mappings of byte counts, by direction and message kind."""
        write_json(self.path / TRAFFIC, traffic)

    def write_summary(
        self, *, wall_s: float, extra: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Replace summary.json by the summary of the rows so far, and return it."""
        return write_summary(self.path, self.plan, wall_s=wall_s, extra=extra)

    def close(self) -> None:
        """Close the files; closing twice is harmless."""
        self._metrics.close()
        self._topology.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class RowReader:
    """Follows a metrics.jsonl while it grows: every call of `poll` returns the new whole rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def poll(self) -> list[MetricRow]:
        """Return the rows since the last call; none while the file does not exist."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                block = file.read()
        except FileNotFoundError:
            return []
        # Only whole lines are taken, so the cut of a torn line lies behind the offset.
        whole = block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [MetricRow.model_validate_json(line) for line in whole.splitlines()]


def holds_rows(run: Path) -> bool:
    """Return whether a run has left rows of metrics in a directory."""
    rows = run / METRICS
    return rows.exists() and rows.stat().st_size > 0


def read_metrics(run: Path) -> list[MetricRow]:
    """Return the metrics of a run directory, by round and index.

    Raises UserError when there are none or a line is not a row of metrics.
    """
    return _read(run / METRICS, MetricRow)


def read_topology(run: Path) -> list[TopologyRow]:
    """Return the topology of a run directory, by round and index. Raises as `read_metrics`."""
    return _read(run / TOPOLOGY, TopologyRow)


def read_plan(run: Path) -> Plan:
    """Return the plan of a run directory. Raises UserError when it has none."""
    return Plan.load(run / PLAN)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file, {} if there is no such file. Raises UserError otherwise."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(table, dict):
        raise UserError(f"{path} does not hold a JSON object")
    return table


def final_rows(rows: Iterable[RowT]) -> list[RowT]:
    """Return each peer's row of its last round, by index."""
    last: dict[int, RowT] = {}
    for row in rows:
        if row.index not in last or row.t >= last[row.index].t:
            last[row.index] = row
    return [last[index] for index in sorted(last)]


def summarise(
    plan: Plan,
    rows: Iterable[MetricRow],
    topology: Iterable[TopologyRow],
    *,
    wall_s: float,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the summary of a run: what was run, and its figures of merit at the last round.

    Figures are means over the peers that `rows` tells of, each at its own last round (`finished`
    counts those that reached the plan's last); null where no peer has the figure. `bytes_sent` and
    `bytes_received` are payload (models and evidence), `wire_sent` and `wire_received` everything;
    all in bytes, summed over peers, attackers' too; all other figures are of honest peers;
    `epsilon_most` is the most that any has spent, null without privacy. `extra` is added as it is.
    """
    last = final_rows(rows)
    honest = [row for row in last if not row.attacker]
    accuracies = _present(row.accuracy for row in honest)
    loss = _mean(_present(row.loss for row in honest))
    bags = {row.index: frozenset(row.bag) for row in final_rows(topology)}
    return {
        "method": plan.method,
        "dataset": plan.data,
        "partition": plan.partition.label,
        "n": plan.n,
        "seed": plan.seed,
        "rounds": plan.rounds,
        "accuracy_mean": _mean(accuracies),
        "accuracy_worst": min(accuracies, default=None),
        "precision": _mean(_present(row.precision for row in honest)),
        "recall": _mean(_present(row.recall for row in honest)),
        "clusters_found": clusters_found(bags) if len(bags) > 1 and any(bags.values()) else None,
        "bytes_sent": sum(row.payload_sent for row in last),
        "bytes_received": sum(row.payload_received for row in last),
        "wire_sent": sum(row.wire_sent for row in last),
        "wire_received": sum(row.wire_received for row in last),
        "loss_mean": loss,
        "perplexity": perplexity(plan, loss),
        "epsilon_most": max(_present(row.epsilon for row in honest), default=None),
        "peers": len(last),
        "finished": sum(row.t >= plan.rounds for row in last),
        "late": sum(row.late for row in rows),
        "missing": sum(row.missing for row in rows),
        "wall_s": round(wall_s, 3),
        "version": panmesh_version(),
        **(extra or {}),
    }


def perplexity(plan: Plan, loss: float | None) -> float | None:
    """Return exp(loss), where the plan's model is one of text: else it means nothing.

    [choice] Of several peers, exp of their mean loss: that of all their test words together, where
    they are equally many.
    """
    return None if loss is None or plan.model not in TEXT_MODELS else math.exp(min(loss, 700.0))


def write_summary(
    run: Path, plan: Plan, *, wall_s: float, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write summary.json of a run directory from its rows, and return it."""
    summary = summarise(plan, read_metrics(run), read_topology(run), wall_s=wall_s, extra=extra)
    write_json(run / SUMMARY, summary)
    return summary


def find_runs(path: Path) -> list[Path]:
    """Return the run directories at `path`: itself, or else those directly below it, by name.

    Raises UserError when there is none.
    """
    if (path / METRICS).exists():
        return [path]
    runs = sorted(file.parent for file in path.glob(f"*/{METRICS}"))
    if not runs:
        raise UserError(
            f"{path} is not a run directory: no {METRICS} in it",
            "give the --out directory of a run, or the --state directories of its peers",
        )
    return runs


def merge(
    sources: Sequence[Path],
    target: Path,
    *,
    wall_s: float | None = None,
    extra: Mapping[str, Any] | None = None,
    attempts: Sequence[Mapping[str, Any]] = (),
    revise: Revision | None = None,
) -> dict[str, Any]:
    """Make the run directory `target` of a federation from its peers' directories.

    Returns the summary, to which `extra` is added. `attempts` are a coordinator's, to split
    clusters: each is told in the row of the first of its members that has one of that round.
    `wall_s` is the federation's wall time; from the first to the last row of metrics when not
    given. `revise` is what is known of rows now and was not when they were written. An earlier run
    in `target` is replaced. Raises UserError when the sources ran different
    plans or two of them are the same peer.
    """
    plan = read_plan(sources[0])
    metrics: list[MetricRow] = []
    topology: list[TopologyRow] = []
    traffic: dict[str, Any] = {}
    owner: dict[int, Path] = {}
    for source in sources:
        if read_plan(source).digest != plan.digest:
            raise UserError(f"{source} ran another plan than {sources[0]}")
        rows = read_metrics(source)
        for index in {row.index for row in rows}:
            if owner.setdefault(index, source) != source:
                raise UserError(f"{source} and {owner[index]} are both peer {index}")
        metrics += rows
        topology += read_topology(source)
        traffic = _add(traffic, read_json(source / TRAFFIC))
    _tell_attempts(metrics, attempts)
    _replace_rows(target, plan, metrics, topology, revise)
    for source in sources:
        for model in (source / MODELS).glob("*.safetensors"):
            shutil.copyfile(model, target / MODELS / model.name)
    write_json(target / TRAFFIC, traffic)
    if wall_s is None:
        wall_s = _span(metrics)
    return write_summary(target, plan, wall_s=wall_s, extra=extra)


def write_json(path: Path, value: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Replace `path` by a JSON object, or a list of them; after a crash the old or the new file is
    there, whole."""
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def _tell_attempts(rows: Sequence[MetricRow], attempts: Sequence[Mapping[str, Any]]) -> None:
    by_place = {(row.t, row.index): row for row in rows}
    for attempt in attempts:
        told = (by_place.get((attempt["t"], index)) for index in attempt["members"])
        if (row := next(filter(None, told), None)) is not None:
            row.notes["attempt"] = dict(attempt)


def _replace_rows(
    target: Path,
    plan: Plan,
    metrics: list[MetricRow],
    topology: list[TopologyRow],
    revise: Revision | None,
) -> None:
    for name in (PLAN, METRICS, TOPOLOGY, SUMMARY, TRAFFIC):
        (target / name).unlink(missing_ok=True)
    if (target / MODELS).exists():
        shutil.rmtree(target / MODELS)
    choices = {(row.t, row.index): row for row in topology}
    with RunWriter(target, plan) as writer:
        for row in sorted(metrics, key=lambda row: (row.t, row.index)):
            silent = TopologyRow(t=row.t, index=row.index, cluster=row.cluster)
            choice = choices.get((row.t, row.index), silent)
            writer.append(*((row, choice) if revise is None else revise(row, choice)))


def _provenance() -> str:
    """Return the comment lines that say what a run was made with."""
    made_with = {"panmesh": panmesh_version(), "python": platform.python_version()}
    for package in ("torch", "numpy", "scikit-learn", "pyzmq"):
        try:
            made_with[package] = version(package)
        except PackageNotFoundError:
            continue
    return "".join(f"# {name} {number}\n" for name, number in made_with.items())


def _cut_torn_line(path: Path) -> None:
    """Cut off what follows the last line end: the rest of a row that was being written."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _read(path: Path, kind: type[RowT]) -> list[RowT]:
    try:
        block = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}") from None
    rows: dict[tuple[int, int], RowT] = {}
    for number, line in enumerate(block[: block.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            row = kind.model_validate_json(line)
        except ValidationError as error:
            raise UserError(
                f"{path} line {number}: {describe(error)}",
                "remove that line: nothing but the figures of its round is lost",
            ) from None
        rows[row.t, row.index] = row
    return [rows[key] for key in sorted(rows)]


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _span(rows: Sequence[MetricRow]) -> float:
    """Return the seconds from the start of the first round to the end of the last."""
    if not rows:
        return 0.0
    return max(row.time for row in rows) - min(row.time - row.seconds.round for row in rows)


def _add(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sum of two nested mappings of numbers, key by key."""
    total = dict(left)
    for key, value in right.items():
        nested = isinstance(value, dict)
        total[key] = _add(total.get(key, {}), value) if nested else total.get(key, 0) + value
    return total
