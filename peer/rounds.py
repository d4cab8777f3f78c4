"""The rounds of one peer: train, publish, match, aggregate (PANM, Algorithm 1).

From the waiting for the start, or the catching up with a federation that has started, to the
serving on after the last round.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from peer.aggregation import average
from peer.errors import RefusedError, StateError
from peer.exchange import Exchange, Received, Shelf
from peer.files import write_atomically
from peer.learning.learner import Learner, Scores, Vector
from peer.matching.base import Evidence, Matcher, MatcherSettings
from peer.matching.registry import create_matcher
from peer.matching.similarity import GradientEvidence, gradient_similarity, loss_similarity
from peer.merit import precision, recall
from peer.network.messages import Await, Probe, Pull, Reason, Reply, Request, Status
from peer.network.swarm import Swarm
from peer.network.traffic import Traffic
from peer.network.transport import Buffer, Transport
from peer.plan import Plan
from peer.randomness import Purpose, generator
from peer.rundir import MODELS, MetricRow, RunWriter, Seconds, TopologyRow
from peer.state import Checkpoint, StateDirectory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """What a peer ends with: its index, the rounds it finished, its model w^T [e], the model's
    scores on its own test set, its bag, and the directory where all of it is kept."""

    index: int
    rounds: int
    model: Vector
    scores: Scores
    bag: frozenset[int]
    state: Path

    def predict(self, inputs: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the class [m] of each input [m, *shape], scaled as the training inputs were."""
        from peer.export import load_model

        return load_model(self.state).predict(inputs)

    def export(self, out: Path | str, form: str | None = None) -> None:
        """Write the model for use elsewhere: .safetensors, .pt2 (torch.export) or .onnx."""
        from peer.export import export_model

        export_model(self.state, Path(out), form)


@dataclass
class _Clock:
    """Seconds that the parts of a round take."""

    started: float = field(default_factory=time.monotonic)
    laps: dict[str, float] = field(default_factory=dict)

    def lap(self, part: str) -> None:
        """Book the time since the last lap under `part`."""
        self.laps[part] = time.monotonic() - self.started - sum(self.laps.values())

    def seconds(self) -> Seconds:
        """Return the laps and the whole round."""
        return Seconds(**self.laps, round=time.monotonic() - self.started)


class Rounds:
    """The rounds of one peer whose sockets, plan and learner are ready."""

    def __init__(
        self,
        *,
        plan: Plan,
        index: int,
        learner: Learner,
        state: StateDirectory,
        swarm: Swarm,
        transport: Transport,
        traffic: Traffic,
        in_worker: Callable[..., Any],
        on_round: Callable[[Plan, MetricRow], None] | None,
    ) -> None:
        self.plan = plan
        self.index = index
        self.learner = learner
        self.state = state
        self.swarm = swarm
        self.traffic = traffic
        self._in_worker = in_worker
        self._on_round = on_round
        self._initial = learner.initial()
        self._trainable = learner.manifest.trainable
        self.shelf = Shelf(plan.network.history)
        self.exchange = Exchange(
            plan=plan,
            transport=transport,
            swarm=swarm,
            shelf=self.shelf,
            initial=self._initial,
            trainable=self._trainable,
            samples=learner.samples,
        )
        clusters = tuple(plan.cluster_of(i) for i in range(plan.n))
        self._clusters = clusters
        self._matcher: Matcher = create_matcher(
            plan.method,
            MatcherSettings.from_plan(plan, index),
        )
        self._writer = RunWriter(state.path, plan)
        self._model = self._initial
        self._scores = Scores(0.0, float("inf"))
        self._before: dict[str, int] = {}
        self._last: tuple[MetricRow, TopologyRow] | None = None
        self._started = time.monotonic()

    async def handle(self, request: Request) -> tuple[Reply, Sequence[Buffer]]:
        """Answer one request. Raises RefusedError."""
        if isinstance(request, Probe | Pull | Await):
            if request.plan != self.plan.digest:
                raise RefusedError(Reason.PLAN_MISMATCH, f"this is {self.plan.digest}")
            return await self.exchange.serve(request)
        return await self.swarm.handle(request)

    async def run(self, checkpoint: Checkpoint | None) -> Result:
        """Run from the first or the next round to the plan's last, then serve the others on."""
        first = await self._begin(checkpoint)
        for t in range(first, self.plan.rounds + 1):
            await self._round(t)
        await self._finish()
        return Result(
            index=self.index,
            rounds=self.shelf.status.finished,
            model=self._model,
            scores=self._scores,
            bag=self._matcher.bag,
            state=self.state.path,
        )

    async def _begin(self, checkpoint: Checkpoint | None) -> int:
        """Wait for the start, or catch up with a federation that has started; return the round."""
        finished = 0
        if checkpoint is not None:
            finished = checkpoint.t
            self._model = checkpoint.model
            self._before = checkpoint.counters
            self._restore(checkpoint)
            await self._advance(Status(finished=finished))
        front = await self._gather_quorum(restarted=checkpoint is not None)
        first = finished + 1
        # A peer whose next round is still on the others' shelves goes on as if it had only been
        # slow: after a restart, or when the others noticed the start a little earlier.
        if front - first >= self.plan.network.history:
            first = min(front + 1, self.plan.rounds)
            self._model = await self._catch_up(first, checkpoint)
            self.swarm.set_first_round(first)
            log.info("caught up with the federation: next is round %d", first)
        if finished >= self.plan.rounds:
            first = self.plan.rounds + 1
            self._scores = await self._in_worker(self.learner.evaluate, self._model)
        self.shelf.first = first
        return first

    def _restore(self, checkpoint: Checkpoint) -> None:
        try:
            self._matcher.restore(checkpoint.matcher)
        except ValueError as error:
            raise StateError(f"the checkpoint in {self.state.path} is of no use: {error}") from None
        log.info("going on after round %d", checkpoint.t)

    async def _gather_quorum(self, *, restarted: bool) -> int:
        """Return the furthest round that anyone has reached, once the federation has begun.

        It has begun when the quorum is present or somebody has trained. A peer that has run before
        does not wait for ever: the others may be gone for good.
        """
        loop = asyncio.get_running_loop()
        patience = loop.time() + 3 * self.plan.network.request_timeout
        noted = loop.time()
        while True:
            members = self.swarm.members()
            front = max((max(m.status.published, m.status.finished) for m in members), default=0)
            present = len(self.swarm.known(self.plan.rounds)) + 1
            if front > 0 or present >= self.plan.quorum:
                return front
            if restarted and loop.time() > patience:
                log.warning("nobody of this federation is to be found; going on alone")
                return 0
            if loop.time() >= noted:
                log.info("waiting for the start: %d of %d present", present, self.plan.quorum)
                noted = loop.time() + 15
            await self.swarm.changed(1.0)

    async def _catch_up(self, t: int, checkpoint: Checkpoint | None) -> Vector:
        """Return the model to go on with: of those this peer can get and its own, the one with the
        least loss on its training data.

        [choice] Asked are the bag of the checkpoint, or else l peers drawn at random: they hold the
        newest models, and the loss tells which of them suits.
        """
        known = self.swarm.known(self.plan.rounds)
        asked = [index for index in sorted(self._matcher.bag) if index in known]
        if not asked and known:
            rng = generator(self.plan.seed, Purpose.LATE_JOIN, index=self.index, t=t)
            size = min(self.plan.matching.l, len(known))
            asked = [known[i] for i in rng.choice(len(known), size=size, replace=False)]
        received = await self.exchange.gather(
            asked, lambda index: self.exchange.pull(index, t, newest=True)
        )
        models = [self._model] if checkpoint is not None else []
        models += [item.model for item in received.values()]
        if not models:
            log.warning("no peer had a model to begin with; starting from the initial one")
            return self._initial
        losses = await self._in_worker(self.learner.train_losses, models, t)
        return models[min(range(len(models)), key=losses.__getitem__)]

    async def _round(self, t: int) -> None:
        """Round t of Algorithm 1: train, publish, match, aggregate."""
        clock = _Clock()
        self.exchange.tally.late = self.exchange.tally.missing = 0
        known = self.swarm.known(t)
        rng = generator(self.plan.seed, Purpose.CANDIDATES, index=self.index, t=t)
        candidates = self._matcher.candidates(t, known, rng)
        trained = await self._in_worker(self.learner.fit, self._model, t)
        clock.lap("train")
        if self.plan.lockstep and t > self.plan.network.history:
            # The snapshot that falls off the shelf must not be one that somebody still needs.
            await self.exchange.wait_for_all(
                t - self.plan.network.history, self.plan.network.round_timeout
            )
        evidence = self._matcher.evidence
        snapshot, own = self.exchange.snapshot(t, self._model, trained, evidence)
        await self.shelf.publish(snapshot)
        self.swarm.set_status(self.shelf.status)
        similarities, sketches, models = await self._hear(t, candidates, own)
        rng = generator(self.plan.seed, Purpose.SETTLE, index=self.index, t=t)
        neighbours = self._matcher.settle(t, known, similarities, rng)
        models |= await self.exchange.gather(
            [index for index in neighbours if index not in models],
            lambda index: self.exchange.pull(index, t, sketches=sketches.get(index)),
        )
        used = [index for index in neighbours if index in models]
        clock.lap("match")
        self._model = average(
            trained,
            [models[index].model for index in used],
            self._weights([models[index] for index in used]),
        )
        clock.lap("aggregate")
        self._scores = await self._in_worker(self.learner.evaluate, self._model)
        clock.lap("evaluate")
        await self._in_worker(self._save, t)
        self._record(t, used, clock)
        await self._advance(
            Status(
                published=t,
                finished=t,
                done=t == self.plan.rounds,
                accuracy=self._scores.accuracy,
            )
        )

    @property
    def _sketched(self) -> bool:
        return self.plan.matching.evidence == "sketch"

    async def _hear(
        self, t: int, candidates: list[int], own: GradientEvidence | None
    ) -> tuple[dict[int, float], dict[int, GradientEvidence], dict[int, Received]]:
        """Return the similarities of the candidates that were heard, and what came with them."""
        exchange = self.exchange
        match self._matcher.evidence:
            case Evidence.GRADIENT if self._sketched:
                sketches = await exchange.gather(candidates, lambda j: exchange.probe(j, t))
                return self._gradient_similarities(own, sketches), sketches, {}
            case Evidence.GRADIENT:
                models = await exchange.gather(
                    candidates, lambda j: exchange.pull(j, t, gradient=True)
                )
                evidence = {
                    j: GradientEvidence(item.gradient, exchange.drift(item.model))
                    for j, item in models.items()
                    if item.gradient is not None
                }
                return self._gradient_similarities(own, evidence), {}, models
            case Evidence.LOSS:
                models = await exchange.gather(candidates, lambda j: exchange.pull(j, t))
                losses = await self._in_worker(
                    self.learner.train_losses, [item.model for item in models.values()], t
                )
                similar = map(loss_similarity, losses)
                return dict(zip(models, similar, strict=True)), {}, models
        return {}, {}, {}

    def _gradient_similarities(
        self, own: GradientEvidence | None, others: dict[int, GradientEvidence]
    ) -> dict[int, float]:
        assert own is not None, "gradient-based similarity has an own side"
        alpha = self.plan.matching.alpha
        return {j: gradient_similarity(own, other, alpha) for j, other in others.items()}

    def _weights(self, received: list[Received]) -> list[float] | None:
        """Return the weights of [own, *received], None for equal ones."""
        if self.plan.matching.weighting == "uniform":
            return None
        return [float(self.learner.samples), *(float(item.samples) for item in received)]

    def _save(self, t: int) -> None:
        self.state.save(
            Checkpoint(
                plan=self.plan.digest,
                index=self.index,
                t=t,
                model=self._model,
                matcher=self._matcher.state(),
                counters=self._counters(),
            )
        )
        self.state.remember([member.record for member in self.swarm.members()])

    def _counters(self) -> dict[str, int]:
        """Return cumulative bytes, those before the last restart included."""
        now = self.traffic.totals()
        return {name: count + self._before.get(name, 0) for name, count in now.items()}

    async def _advance(self, status: Status) -> None:
        await self.shelf.advance(status)
        self.swarm.set_status(status)

    def _record(self, t: int, neighbours: list[int], clock: _Clock) -> None:
        """Write the round's rows and tell whoever watches."""
        bag = self._matcher.bag
        # A method without a bag is judged by the neighbours it used.
        judged = bag or frozenset(neighbours)
        place = {"t": t, "index": self.index, "cluster": self._clusters[self.index]}
        row = MetricRow(
            **place,
            accuracy=self._scores.accuracy,
            loss=self._scores.loss,
            precision=precision(judged, self.index, self._clusters),
            recall=recall(judged, self.index, self._clusters),
            bag_size=len(bag),
            **self._counters(),
            late=self.exchange.tally.late,
            missing=self.exchange.tally.missing,
            seconds=clock.seconds(),
            time=time.time(),
            notes=self._matcher.notes,
        )
        choice = TopologyRow(**place, neighbours=neighbours, bag=sorted(bag))
        self._writer.append(row, choice)
        self._last = row, choice
        if self._on_round is not None:
            self._on_round(self.plan, row)

    async def _finish(self) -> None:
        """Write what the peer ends with, and serve on until the others are done."""
        await self._advance(
            Status(
                published=self.shelf.status.published,
                finished=self.plan.rounds,
                done=True,
                accuracy=self._scores.accuracy,
            )
        )
        self._write_model()
        self._write_account()
        linger = self.plan.network.linger
        if not await self.exchange.wait_for_all(self.plan.rounds, linger):
            log.info("others are not done after %g s; leaving", linger)
        self._write_account()

    def _write_model(self) -> None:
        """Write the final model by name."""
        arrays = self.learner.manifest.unflatten(self._model)
        path = self.state.path / MODELS / f"peer-{self.index:03}.safetensors"
        write_atomically(path, save(arrays, metadata={"plan": self.plan.digest}))

    def _write_account(self) -> None:
        """Write traffic and summary; what was sent since the last round's row belongs to it."""
        if self._last is not None:
            row, choice = self._last
            self._writer.append(row.model_copy(update=self._counters()), choice)
        self._writer.write_traffic(self.traffic.snapshot())
        self._writer.write_summary(wall_s=time.monotonic() - self._started)
