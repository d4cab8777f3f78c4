"""The rows that a coordinator leaves: its state directory is a run directory, too."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bootstrap.coordination.cfl import Attempt
from peer.merit import precision, recall
from peer.network.traffic import Traffic
from peer.plan import Plan
from peer.rundir import MetricRow, RunWriter, TopologyRow, read_metrics
from peer.standing import Standing


class RoundRows:
    """Writes the rows of one round after the other: each peer's when it has closed the round.

    An attempt to split a cluster is told in the row of its first member, as by the laboratory; that
    row is there before the round is finished, and written again with the peer's accuracy.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        """Go on with the directory. Raises StateError when it holds a run of another plan."""
        self._path = path
        self._plan = plan
        self._writer = RunWriter(path, plan)
        self._clusters = [plan.cluster_of(i) for i in range(plan.n)]
        self._started = time.monotonic()
        self._t = 0
        self._standing = Standing({})
        self._attempts: dict[int, dict[str, Any]] = {}
        self._told: set[int] = set()

    def begin(self, t: int, standing: Standing, attempts: Sequence[Attempt]) -> None:
        """Begin with the rows of a round. Raises StateError when they cannot be written."""
        self._t, self._standing, self._told = t, standing, set()
        self._attempts = {attempt.members[0]: attempt.to_json() for attempt in attempts}
        for index in self._attempts:
            self._write(index, None)

    def resume(self, t: int, standing: Standing) -> None:
        """Go on with the rows of a round that are there. Raises UserError when one is damaged."""
        self.begin(t, standing, ())
        rows = [row for row in read_metrics(self._path) if row.t == t]
        self._told = {row.index for row in rows if row.accuracy is not None}
        self._attempts = {r.index: r.notes["attempt"] for r in rows if "attempt" in r.notes}

    def add(self, t: int, index: int, accuracy: float | None) -> None:
        """Write the row of a peer that has closed round t, once, if these are that round's rows."""
        if t == self._t and index not in self._told and index in self._standing.places:
            self._told.add(index)
            self._write(index, accuracy)

    def sum_up(self, traffic: Traffic) -> None:
        """Write the summary, and what this node has sent and received since it was started."""
        if self._told:
            totals = traffic.totals()
            own = {name.replace("payload", "bytes"): count for name, count in totals.items()}
            self._writer.write_traffic(traffic.snapshot())
            self._writer.write_summary(wall_s=time.monotonic() - self._started, extra=own)

    def _write(self, index: int, accuracy: float | None) -> None:
        standing, method = self._standing, self._plan.method
        bag = standing.bag(index)
        place = {"t": self._t, "index": index, "cluster": self._clusters[index]}
        notes: dict[str, Any] = {
            "node" if method == "cfl" else "model": standing.places[index],
            "took_part": index in standing.trained,
        }
        if index in self._attempts:
            notes["attempt"] = self._attempts[index]
        metric = MetricRow(
            **place,
            accuracy=accuracy,
            precision=precision(bag, index, self._clusters),
            recall=recall(bag, index, self._clusters),
            bag_size=len(bag),
            time=time.time(),
            notes=notes,
        )
        neighbours = standing.neighbours(index, method)
        self._writer.append(metric, TopologyRow(**place, neighbours=neighbours, bag=sorted(bag)))
