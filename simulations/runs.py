"""A plan run on this machine into a run directory: by real processes, or in the laboratory."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from pydantic import ValidationError

from peer.display import FederationView
from peer.errors import FederationError, UserError
from peer.learning.names import CUSTOM, OWN
from peer.matching.registry import CENTRAL
from peer.plan import UNDEFENDED, CentralPlan, CflPlan, DefencePlan, MatchingPlan, Plan, describe
from peer.plan_check import check_plan
from peer.rundir import (
    COMPARISON,
    PLAN,
    MetricRow,
    RunWriter,
    TopologyRow,
    summarise,
    write_json,
)
from simulations.central import (
    CentralPopulation,
    Crew,
    EngineCrew,
    HostileCrew,
    LearnerCrew,
)
from simulations.population import Models, Row
from simulations.processes import Federation

if TYPE_CHECKING:
    from simulations.attacks import Threat
    from simulations.engine.workers import Engine

PROCESSES = "processes"
START_SECONDS = 120.0
ROUND_SECONDS = 60.0
"""A federation is given up after the time for its start and so much for each round."""

Progress = Callable[[str, int], None]
"""Told the method and the round that has just ended."""


def changed(plan: Plan, changes: Mapping[str, Any]) -> Plan:
    """Return `plan` with other values of dotted keys (matching.k), validated anew.

    A key whose value is None stays as it is. Raises UserError when the result is not a plan.
    """
    table = plan.model_dump(exclude_none=True)
    for key, value in changes.items():
        *path, last = key.split(".")
        part = table
        for name in path:
            part = part.setdefault(name, {})
            if not isinstance(part, dict):
                raise UserError(f"{key}: {name} is no table of the plan")
        if value is not None:
            part[last] = value
    try:
        return Plan.model_validate(table)
    except ValidationError as error:
        raise UserError(describe(error)) from None


def clear_run(out: Path) -> None:
    """Remove an earlier run from `out`. Raises UserError when it holds anything else."""
    if not out.exists():
        return
    plans = (out / PLAN, out / PROCESSES / PLAN)
    if not out.is_dir() or (not any(plan.is_file() for plan in plans) and any(out.iterdir())):
        raise UserError(f"{out} exists and is not a run directory", "name another with --out")
    shutil.rmtree(out)


def run_processes(plan: Plan, out: Path, *, peers: int | None = None) -> dict[str, Any]:
    """Run `plan` by real processes with a live table; return the summary of the run in `out`.

    Logs and the state of every process stay in `out`/processes, those of a failed run too; after
    Ctrl-C `out` holds the rounds until then. Raises FederationError when a process fails, UserError
    before any starts when none could run the plan.
    """
    check_plan(plan, central=True)
    if plan.data == OWN or plan.model == CUSTOM:
        raise UserError(
            "the processes have neither data nor a model of their own",
            "--data SPEC and --model MODULE:FUNCTION are for the laboratory",
        )
    clear_run(out)
    timeout = START_SECONDS + ROUND_SECONDS * plan.rounds
    federation = Federation(plan, out / PROCESSES, peers=peers)
    try:
        with federation, FederationView(plan) as view:
            federation.wait(timeout, on_row=lambda _, row: view.update(row))
    except KeyboardInterrupt:
        with suppress(FederationError):  # ended before anybody had finished a round
            federation.collect(out)
        raise
    return federation.collect(out)


@dataclass(frozen=True)
class Equipment:
    """What populations are computed with; nothing of it is in their plans.

    `reference`: one learner after another in this process. Else the engine works, on `device`;
    `exact`: it trains one peer at a time as a device does, so that the results are bit by bit those
    of live peers in lockstep. `data` is a spec of what is dealt to the peers instead of the plan's,
    `model` the import path of a factory for plans whose model is custom. `threat` says which peers
    attack and how; those of `local` cannot, as they exchange nothing. `precision` is that of the
    engine's products, float32 or bfloat16.
    """

    reference: bool = False
    exact: bool = False
    device: str = "cpu"
    data: str | None = None
    model: str | None = None
    threat: Threat | None = None
    precision: str = "float32"

    def check(self, plan: Plan) -> None:
        """Raise UserError when `plan` cannot be run with it, before anything is."""
        check_plan(plan, central=True, data=self.data)
        if plan.data == OWN and self.data is None:
            raise UserError("the plan wants each peer's own data", "name some to deal: --data SPEC")
        if self._mixed and (self.exact or self.reference):
            raise UserError(
                f"live peers train in float32, and so does what repeats them: not {self.precision}",
                "leave out --precision, or --exact and --backend one-process",
            )
        if threat := self.threat_to(plan):
            threat.attackers(plan)

    def threat_to(self, plan: Plan) -> Threat | None:
        """Return the threat to a run of `plan`, if there is one."""
        return None if plan.method == "local" else self.threat

    @property
    def _mixed(self) -> bool:
        return self.precision != "float32"

    def label(self, plan: Plan) -> str:
        """What tells results of a plan apart that other equipment computed; empty for the usual."""
        parts = {
            "exact": self.exact or self.reference,
            self.device: self.device != "cpu",
            self.precision: self._mixed,
        }
        names = [name for name, holds in parts.items() if holds]
        if local := f"{self.data or ''} {self.model or ''}".strip():
            names.append(hashlib.sha256(local.encode()).hexdigest()[:8])
        if threat := self.threat_to(plan):
            names.append(threat.label)
        return "-".join(names)


class Rounds(Protocol):
    """A population, whatever computes it."""

    @property
    def models(self) -> Models:
        """Every peer's model w_i^t [e]."""
        ...

    def run(self, *, evaluate_every: int = 1) -> Iterator[list[Row]]:
        """Yield the rows of every round, by index."""
        ...


class PopulationMaker:
    """Makes populations of plans, one at a time, and keeps the engine for the next if it fits.

    An engine takes seconds to start and to load its data; plans that differ in nothing but their
    method and its numbers share one. Close it, or use it in a `with`.
    """

    def __init__(self, equipment: Equipment = Equipment()) -> None:
        self.equipment = equipment
        self._engine: Engine | None = None
        self._serves = ""

    def make(self, plan: Plan) -> Rounds:
        """Return the population of a plan; that of an earlier call is of no use any more.

        Raises UserError for a method, model, data or device that cannot be used.
        """
        threat = self.equipment.threat_to(plan)
        if self.equipment.reference:
            from simulations.population import Population, make_learners

            learners = make_learners(
                plan, data=self.equipment.data, model=self.equipment.model, threat=threat
            )
            if plan.method in CENTRAL:
                return _coordinated(plan, LearnerCrew(learners), threat)
            return Population(plan, plan.method, learners=learners, threat=threat)
        from simulations.engine.laboratory import Laboratory

        engine = self._engine_for(plan, threat)
        if plan.method in CENTRAL:
            return _coordinated(plan, EngineCrew(engine), threat)
        return Laboratory(
            plan, plan.method, exact=self.equipment.exact, engine=engine, threat=threat
        )

    def close(self) -> None:
        """End the engine, if there is one."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _engine_for(self, plan: Plan, threat: Threat | None) -> Engine:
        from peer.learning.build import check_model
        from simulations.engine.laboratory import poisoned_holdings
        from simulations.engine.workers import Engine

        check_model(plan, self.equipment.model)
        matching = {
            "loss_samples": plan.matching.loss_samples,
            "sketch_buckets": plan.matching.sketch_buckets,
        }
        gate = {"gate": plan.defence.gate, "gate_samples": plan.defence.gate_samples}
        common = plan.model_copy(
            update={
                # `local` stands for all that hold out no samples, `random` for those that do.
                "method": "random" if plan.held_out(4) else "local",
                "rounds": 1,
                "defence": DefencePlan.model_validate(gate) if plan.held_out(4) else UNDEFENDED,
                "matching": MatchingPlan.model_validate(matching),
                "central": CentralPlan(),
                "cfl": CflPlan(),
            }
        )
        holdings = poisoned_holdings(plan, threat)
        serves = common.digest
        if holdings is not None and threat is not None:
            serves += threat.label
        if self._engine is None or self._serves != serves:
            self.close()
            self._engine = Engine(
                common,
                data=self.equipment.data,
                model=self.equipment.model,
                exact=self.equipment.exact,
                device=self.equipment.device,
                precision=self.equipment.precision,
                holdings=holdings,
            )
            self._serves = serves
        return self._engine


def run_population(
    plan: Plan,
    out: Path,
    *,
    maker: PopulationMaker | None = None,
    evaluate_every: int = 1,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run `plan` by the engine, or by what `maker` makes; return the summary of the run in `out`.

    An earlier run in `out` is replaced; a `maker` that is given stays open.
    The summary says in `bytes_moved` how much of models and evidence was carried, each byte once,
    and in `products` in which precision they were computed.
    """
    own = PopulationMaker() if maker is None else nullcontext(maker)
    equipment = Equipment() if maker is None else maker.equipment
    equipment.check(plan)
    threat = equipment.threat_to(plan)
    attackers = [] if threat is None else threat.attackers(plan)
    clear_run(out)
    began = time.monotonic()
    with own as making, RunWriter(out, plan) as writer:
        last: list[MetricRow] = []
        chosen = Chosen(attackers)
        population = making.make(plan)
        rounds = population.run(evaluate_every=evaluate_every)
        for rows in _metric_rows(rounds, plan.n, attackers):
            for metric, topology in rows:
                writer.append(metric, topology)
                chosen.count(topology)
            last = [metric for metric, _ in rows]
            if progress is not None:
                progress(plan.method, last[0].t)
        if plan.method == "cfl":
            _keep_tree(population, out)
        extra: dict[str, Any] = {**_traffic(plan, last), "products": equipment.precision}
        if threat is not None:
            extra |= {"attack": threat.label, "attackers": attackers, "chosen": chosen.share}
            extra |= _harm(plan, threat, population.models, equipment)
        return writer.write_summary(wall_s=time.monotonic() - began, extra=extra)


@dataclass
class Chosen:
    """How often honest peers average with attackers."""

    attackers: Sequence[int]
    _neighbours: int = 0
    _hostile: int = 0

    def count(self, row: TopologyRow) -> None:
        """Count one peer's neighbours of one round."""
        if row.index not in self.attackers:
            self._neighbours += len(row.neighbours)
            self._hostile += sum(j in self.attackers for j in row.neighbours)

    @property
    def share(self) -> float | None:
        """The share of attackers among the neighbours of honest peers, over all rounds."""
        return self._hostile / self._neighbours if self._neighbours else None


def _harm(plan: Plan, threat: Threat, models: Models, equipment: Equipment) -> dict[str, float]:
    """Return what an attack did beside costing accuracy: the success of a backdoor."""
    if threat.attack != "backdoor":
        return {}
    from simulations.attacks import backdoor_success

    attackers = threat.attackers(plan)
    honest = [i for i in range(plan.n) if i not in attackers]
    rate = backdoor_success(plan, models, honest, data=equipment.data, model=equipment.model)
    return {"backdoor": rate}


def _coordinated(plan: Plan, crew: Crew, threat: Threat | None) -> Rounds:
    """Return the population of a method that a coordinator runs."""
    if threat is not None:
        crew = HostileCrew(crew, plan, threat)
    if plan.method != "cfl":
        return CentralPopulation(plan, plan.method, crew)
    from simulations.clustered import ClusteredPopulation

    return ClusteredPopulation(plan, crew)


def _keep_tree(population: Rounds, out: Path) -> None:
    """Write the parameter tree that CFL has grown to the run directory."""
    from bootstrap.coordination.tree_store import TREE, TreeStore
    from simulations.clustered import ClusteredPopulation

    if isinstance(population, ClusteredPopulation):
        TreeStore(out / TREE, population.plan.digest).save(population.server.tree, population.t)


def compare(
    plan: Plan, methods: Sequence[str], out: Path, *, progress: Progress | None = None
) -> dict[str, dict[str, Any]]:
    """Run `plan` with other methods on the same data, by the reference; write comparison.json.

    Returns {method: its summary, with `curve`: [t, mean accuracy] of every round}.
    """
    from simulations.population import Population, make_learners

    learners = make_learners(plan)
    comparison = {}
    for method in methods:
        began = time.monotonic()
        metrics: list[MetricRow] = []
        choices: list[TopologyRow] = []
        curve: list[tuple[int, float]] = []
        variant = changed(plan, {"method": method})
        same = variant.held_out(4) == plan.held_out(4)  # whether both train on the same samples
        population = Population(variant, method, learners=learners if same else None)
        for rows in _metric_rows(population.run(), plan.n):
            metrics += [metric for metric, _ in rows]
            choices = [topology for _, topology in rows]
            t = rows[0][0].t
            curve.append((t, fmean(metric.accuracy or 0.0 for metric, _ in rows)))
            if progress is not None:
                progress(method, t)
        extra = _traffic(variant, [metric for metric, _ in rows])
        summary = summarise(variant, metrics, choices, wall_s=time.monotonic() - began, extra=extra)
        comparison[method] = {**summary, "curve": curve}
    write_json(out / COMPARISON, comparison)
    return comparison


def _metric_rows(
    rounds: Iterable[list[Row]], n: int, attackers: Sequence[int] = ()
) -> Iterator[list[tuple[MetricRow, TopologyRow]]]:
    """Yield the rows of every round of a population, by index, their bytes summed up."""
    received, sent = [0] * n, [0] * n
    for rows in rounds:
        pairs = []
        for row in rows:
            index = row["index"]
            received[index] += row["payload_received"]
            sent[index] += row.get("payload_sent", 0)
            metric = MetricRow.model_validate(
                {
                    **row,
                    "bag_size": len(row["bag"]),
                    "payload_received": received[index],
                    "payload_sent": sent[index],
                    "time": time.time(),
                    "attacker": index in attackers,
                }
            )
            pairs.append((metric, TopologyRow.model_validate(row)))
        yield pairs


def _traffic(plan: Plan, last: Sequence[MetricRow]) -> dict[str, int]:
    """Return the byte counts that a population's rows do not sum up to by themselves.

    Peers among themselves tell of what they received only: nothing is lost, so as much was sent.
    """
    received = sum(metric.payload_received for metric in last)
    if plan.method not in CENTRAL:
        return {"bytes_sent": received, "bytes_moved": received}
    sent = sum(metric.payload_sent for metric in last)
    return {"bytes_sent": sent, "bytes_moved": sent + received}
