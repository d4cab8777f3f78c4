"""What one peer writes down: its rounds, its checkpoints, and what it ends with."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from safetensors.numpy import save

from peer.files import write_atomically
from peer.learning.budget import Budget
from peer.learning.learner import Manifest, Scores, Vector
from peer.merit import precision, recall
from peer.network.traffic import Traffic
from peer.plan import Plan
from peer.rundir import MODELS, MetricRow, RunWriter, Seconds, TopologyRow
from peer.state import Checkpoint, StateDirectory

OnRound = Callable[[Plan, MetricRow], None]


@dataclass
class Clock:
    """Seconds that the parts of a round take."""

    started: float = field(default_factory=time.monotonic)
    laps: dict[str, float] = field(default_factory=dict)

    def lap(self, part: str) -> None:
        """Book the time since the last lap under `part`."""
        self.laps[part] = time.monotonic() - self.started - sum(self.laps.values())

    def seconds(self) -> Seconds:
        """Return the laps and the whole round."""
        return Seconds(**self.laps, round=time.monotonic() - self.started)


class Journal:
    """Writes the run directory and the checkpoints of the peer of an index, in its state.

    `budget` is the epsilon of a plan with privacy.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        index: int,
        manifest: Manifest,
        state: StateDirectory,
        traffic: Traffic,
        budget: Budget | None,
        on_round: OnRound | None,
    ) -> None:
        self.plan = plan
        self.index = index
        self.clusters = tuple(plan.cluster_of(i) for i in range(plan.n))
        self._manifest = manifest
        self._state = state
        self._traffic = traffic
        self._budget = budget
        self._on_round = on_round
        self._writer = RunWriter(state.path, plan)
        self._before: Mapping[str, int] = {}
        self._last: tuple[MetricRow, TopologyRow] | None = None
        self._started = time.monotonic()

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on counting bytes where a checkpoint ended."""
        self._before = checkpoint.counters

    def _counters(self) -> dict[str, int]:
        """Return cumulative bytes, those before the last restart included."""
        now = self._traffic.totals()
        return {name: count + self._before.get(name, 0) for name, count in now.items()}

    def keep_spent(self) -> None:
        """Write what the last training has spent of epsilon, where the plan counts it."""
        if self._budget is not None:
            self._state.keep_spent(self._budget.spent)

    def save(self, t: int, model: Vector, matcher: dict[str, Any]) -> None:
        """Write the checkpoint of round t: the model w^t [e] and the matcher's state."""
        self._state.save(
            Checkpoint(
                plan=self.plan.digest,
                index=self.index,
                t=t,
                model=model,
                matcher=matcher,
                counters=self._counters(),
            )
        )

    def record(
        self,
        t: int,
        *,
        scores: Scores,
        neighbours: Sequence[int],
        bag: frozenset[int],
        clock: Clock,
        notes: dict[str, Any],
        exchanges: int = 0,
        late: int = 0,
        missing: int = 0,
    ) -> None:
        """Write the rows of round t and tell whoever watches."""
        # A method without a bag is judged by the neighbours it used.
        judged = bag or frozenset(neighbours)
        place = {"t": t, "index": self.index, "cluster": self.clusters[self.index]}
        row = MetricRow(
            **place,
            accuracy=scores.accuracy,
            loss=scores.loss,
            precision=precision(judged, self.index, self.clusters),
            recall=recall(judged, self.index, self.clusters),
            bag_size=len(bag),
            **self._counters(),
            exchanges=exchanges,
            late=late,
            missing=missing,
            epsilon=None if self._budget is None else self._budget.epsilon,
            seconds=clock.seconds(),
            time=time.time(),
            notes=notes,
        )
        choice = TopologyRow(**place, neighbours=list(neighbours), bag=sorted(bag))
        self._writer.append(row, choice)
        self._last = row, choice
        if self._on_round is not None:
            self._on_round(self.plan, row)

    def write_model(self, model: Vector) -> None:
        """Write the final model [e] by the names of its tensors."""
        arrays = self._manifest.unflatten(model)
        path = self._state.path / MODELS / f"peer-{self.index:03}.safetensors"
        write_atomically(path, save(arrays, metadata={"plan": self.plan.digest}))

    def write_account(self) -> None:
        """Write traffic and summary; what was sent since the last round's row belongs to it."""
        if self._last is not None:
            row, choice = self._last
            self._writer.append(row.model_copy(update=self._counters()), choice)
        self._writer.write_traffic(self._traffic.snapshot())
        self._writer.write_summary(wall_s=time.monotonic() - self._started)
