"""The rounds of one peer: train, publish, match, aggregate (PANM, Algorithm 1).

From the waiting for the start, or the catching up with a federation that has started, to the
serving on after the last round.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.aggregation import with_own_statistics
from peer.defence import Mixed, mix, refusals
from peer.errors import RefusedError, StateError, UserError
from peer.exchange import Exchange, Probed, Received, Shelf
from peer.journal import Clock, Journal, OnRound
from peer.learning.budget import Budget
from peer.learning.learner import Learner, Scores, Vector
from peer.matching.base import Evidence, Matcher, MatcherSettings
from peer.matching.local import Local
from peer.matching.registry import create_matcher
from peer.matching.selection import draw
from peer.matching.similarity import GradientEvidence, gradient_similarity, loss_similarity
from peer.network.messages import Await, Probe, Pull, Reason, Reply, Request, Status
from peer.network.swarm import Swarm
from peer.network.traffic import Traffic
from peer.network.transport import Buffer, Transport
from peer.network.vectors import is_finite
from peer.plan import Plan
from peer.randomness import Purpose, generator
from peer.state import Checkpoint, StateDirectory
from peer.surroundings import Surroundings

log = logging.getLogger(__name__)

ACQUAINTANCE = 3.0
"""Seconds in which a peer that comes to a running federation surely hears of all its members."""


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
        on_round: OnRound | None,
        surroundings: Surroundings | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.plan = plan
        self.index = index
        self.learner = learner
        self.state = state
        self.swarm = swarm
        self._in_worker = in_worker
        self._initial = learner.initial()
        self._trainable = learner.manifest.trainable
        self._quorum = plan.quorum if surroundings is None else surroundings.quorum
        self._forge = None if surroundings is None else surroundings.forge
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
        self._matcher: Matcher = create_matcher(
            plan.method,
            MatcherSettings.from_plan(plan, index),
        )
        self._journal = Journal(
            plan=plan,
            index=index,
            manifest=learner.manifest,
            state=state,
            traffic=traffic,
            budget=budget,
            on_round=on_round,
        )
        self._model = self._trained = self._initial
        self._scores = Scores(0.0, float("inf"))
        self._notes: dict[str, Any] = {}

    @property
    def status(self) -> Status:
        """How far this peer is."""
        return self.shelf.status

    async def handle(self, request: Request) -> tuple[Reply, Sequence[Buffer]]:
        """Answer one request. Raises RefusedError."""
        if isinstance(request, Probe | Pull | Await):
            if request.plan != self.plan.digest:
                raise RefusedError(Reason.PLAN_MISMATCH, f"this is {self.plan.digest}")
            return await self.exchange.serve(request)
        return await self.swarm.handle(request)

    async def run(self, checkpoint: Checkpoint | None) -> Result:
        """Run from the first or the next round to the plan's last, then serve the others on."""
        t = await self._begin(checkpoint)
        while t <= self.plan.rounds:
            await self._round(t)
            # Asynchronous peers may be any number of rounds apart.
            t = t + 1 if self.plan.network.staleness == "async" else await self._keep_up(t + 1)
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
        """Take up the checkpoint, wait until the federation has begun, and return the round to run:
        one after the last when all are done."""
        finished = 0
        if checkpoint is not None:
            finished = checkpoint.t
            self._model = checkpoint.model
            self._journal.resume(checkpoint)
            self._restore(checkpoint)
            self.shelf.first = finished + 1
            await self._advance(Status(finished=finished))
        if finished >= self.plan.rounds:
            self._scores = await self._in_worker(self.learner.evaluate, self._model)
            return finished + 1
        await self._gather_quorum(restarted=checkpoint is not None)
        return await self._keep_up(finished + 1)

    def _restore(self, checkpoint: Checkpoint) -> None:
        try:
            self._matcher.restore(checkpoint.matcher)
        except ValueError as error:
            raise StateError(f"the checkpoint in {self.state.path} is of no use: {error}") from None
        log.info("going on after round %d", checkpoint.t)

    def _living(self) -> list[Status]:
        """Return how far those are that are there."""
        members = map(self.swarm.member, self.swarm.known(self.plan.rounds))
        return [member.status for member in members if member is not None]

    async def _gather_quorum(self, *, restarted: bool) -> None:
        """Return once the federation has begun.

        It begins when the quorum is present, and has begun when anyone has published a snapshot
        since that one was started: what was finished before tells nothing, all may have been
        restarted at once. A peer that finds it begun first hears of the others, so that it chooses
        among the same peers as they do. A peer that has run before does not wait for ever: the
        others may be gone for good. Raises UserError at a new peer when they have finished and
        gone.
        """
        loop = asyncio.get_running_loop()
        noted = started = loop.time()
        begun = math.inf
        while True:
            living, now = self._living(), loop.time()
            if len(living) + 1 >= self._quorum:
                return
            if any(status.published or status.done for status in living):
                begun = min(begun, now)
            if now >= begun + ACQUAINTANCE or (
                now >= begun and len(self.swarm.members()) + 1 >= self._quorum
            ):
                return
            over = not living and any(member.status.done for member in self.swarm.members())
            if over and self._alone:
                return
            if over and not restarted:
                raise UserError(
                    f"the federation {self.plan.name} has finished: its peers are done and gone",
                    "start it anew, every node with a new --state",
                )
            if restarted and now >= started + 3 * self.plan.network.request_timeout:
                log.warning("the others of this federation are not to be found; going on without")
                return
            if now >= noted:
                log.info("waiting for the start: %d of %d present", len(living) + 1, self._quorum)
                noted = now + 15
            await self.swarm.changed(1.0)

    async def _keep_up(self, t: int) -> int:
        """Return the round to run next: `t`, or a later one if this peer has fallen behind.

        A peer whose next round is still on the others' shelves goes on as if it had only been slow.
        One that was away for longer (late, restarted, stopped, cut off) finds nothing there, while
        the others wait for it: it goes on where they are. One that learns alone has nothing to
        catch up with. Where gossip has others far ahead, each of them is asked: it may lie of all.
        """
        if self._alone:
            return t
        staleness = self.plan.network.staleness
        slack = max(self.plan.network.history, 1 + (staleness if staleness != "async" else 0))
        if t > self.plan.rounds or typical(status.reached for status in self._living()) - t < slack:
            return t
        front = confirmed(status.reached for status in await self.exchange.progress())
        if front - t < slack:
            return t
        t = await self._catch_up(min(front, self.plan.rounds - 1))
        log.info("caught up with the federation: next is round %d", t)
        return t

    async def _catch_up(self, front: int) -> int:
        """Go on from the model that suits this peer best, of those it can get and its own, and
        return the round after theirs.

        [choice] Asked for models are the bag, or else l peers drawn at random: they hold the newest
        ones, and the loss on the peer's training data tells which of them suits. How far the
        federation is by now all are asked: one adviser may be alone, and lie.
        """
        models = {self.index: self._model} if self.shelf.status.finished else {}
        # From here on nobody needs to wait for this peer's earlier rounds.
        await self._skip_to(front + 1)
        async with asyncio.TaskGroup() as group:
            progress = group.create_task(self.exchange.progress(), name="ask-progress")
            received = await self.exchange.gather(
                self._advisers(front), lambda index: self.exchange.pull(index, front, newest=True)
            )
        t = max(front, confirmed(status.reached for status in progress.result())) + 1
        t = min(t, self.plan.rounds)
        await self._skip_to(t)
        self.swarm.set_first_round(t)
        models |= {index: item.model for index, item in received.items()}
        if not models:
            log.warning("no peer had a model to begin with; starting from the initial one")
            return t
        chosen = await self._most_suitable(models, t)
        self._model = models[chosen]
        self._notes = {"caught_up_with": chosen}
        return t

    async def _most_suitable(self, models: dict[int, Vector], t: int) -> int:
        """Return whose of these models to go on from.

        [choice] With privacy, anyone's: losses would tell of the samples what epsilon does not
        count.
        """
        if self.plan.privacy.acts:
            rng = generator(self.plan.seed, Purpose.LATE_JOIN, index=self.index, t=t)
            return draw(sorted(models), 1, rng)[0]
        losses = await self._in_worker(self.learner.train_losses, list(models.values()), t)
        return min(zip(losses, models, strict=True))[1]

    async def _skip_to(self, t: int) -> None:
        """Say that this peer has nothing to give before round `t`."""
        self.shelf.first = t
        await self._advance(self.shelf.status.model_copy(update={"finished": t - 1}))

    def _advisers(self, t: int) -> list[int]:
        known = self.swarm.trusted(self.plan.rounds)
        bag = [index for index in known if index in self._matcher.bag]
        if bag:
            return bag
        rng = generator(self.plan.seed, Purpose.LATE_JOIN, index=self.index, t=t)
        return draw(known, self.plan.matching.l, rng)

    async def _round(self, t: int) -> None:
        """Round t of Algorithm 1: train, publish, match, aggregate."""
        clock = Clock()
        known = self.swarm.trusted(t)
        if left_out := self.swarm.left_out():
            self._notes["left_out"] = left_out
        rng = generator(self.plan.seed, Purpose.CANDIDATES, index=self.index, t=t)
        candidates = self._matcher.candidates(t, known, rng)
        trained = await self._train(t)
        clock.lap("train")
        if self.plan.lockstep and not self._alone and t > self.plan.network.history:
            # The snapshot that falls off the shelf must not be one that somebody still needs.
            await self.exchange.wait_for_stragglers(t - self.plan.network.history)
        self.exchange.begin_round()
        evidence = self._matcher.evidence
        shown = trained if self._forge is None else self._forge(t, self._model, trained)
        snapshot, own = self.exchange.snapshot(t, self._model, shown, evidence)
        await self.shelf.publish(snapshot)
        self.swarm.set_status(self.shelf.status)
        similarities, probed, models = await self._hear(t, candidates, own)
        rng = generator(self.plan.seed, Purpose.SETTLE, index=self.index, t=t)
        neighbours = self._matcher.settle(t, known, similarities, rng)
        models |= await self.exchange.gather(
            [index for index in neighbours if index not in models],
            lambda index: self.exchange.pull(index, t, probed=probed.get(index)),
        )
        used = [index for index in neighbours if index in models]
        clock.lap("match")
        mixed = await self._mix(trained, {index: models[index] for index in used})
        self._model = mixed.model
        clock.lap("aggregate")
        self._scores = await self._in_worker(self.learner.evaluate, self._model)
        clock.lap("evaluate")
        # The row first: a round whose row was not written is run again after a crash.
        self._journal.record(
            t,
            scores=self._scores,
            neighbours=mixed.used,
            bag=self._matcher.bag,
            clock=clock,
            notes=self._matcher.notes | refusals(mixed.refused) | self._notes,
            exchanges=self.exchange.tally.exchanges,
            late=self.exchange.tally.late,
            missing=self.exchange.tally.missing,
        )
        self._notes = {}
        await self._in_worker(self._journal.save, t, self._model, self._matcher.state())
        await self._advance(
            Status(
                published=t,
                finished=t,
                done=t == self.plan.rounds,
                accuracy=self._told_accuracy,
            )
        )

    async def _train(self, t: int) -> Vector:
        """Return w^{t-1/2}: the model [e] after local training, its values finite.

        [choice] Where training diverges, most likely from what others mixed in, this peer goes back
        to the last model of its own training and trains that instead.
        """
        for _ in range(2):
            trained: Vector = await self._in_worker(self.learner.fit, self._model, t)
            await self._in_worker(self._journal.keep_spent)
            if is_finite(trained):
                self._trained = trained
                break
            log.warning("training diverged in round %d; going back to this peer's own model", t)
            self._model = self._trained
        return self._trained

    @property
    def _alone(self) -> bool:
        """Whether by its method no peer needs another."""
        return isinstance(self._matcher, Local)

    @property
    def _sketched(self) -> bool:
        return self.plan.matching.evidence == "sketch"

    async def _hear(
        self, t: int, candidates: list[int], own: GradientEvidence | None
    ) -> tuple[dict[int, float], dict[int, Probed], dict[int, Received]]:
        """Return the similarities of the candidates that were heard, and what came with them."""
        exchange = self.exchange
        match self._matcher.evidence:
            case Evidence.GRADIENT if self._sketched:
                probed = await exchange.gather(candidates, lambda j: exchange.probe(j, t))
                sketches = {j: item.sketches for j, item in probed.items()}
                return self._gradient_similarities(own, sketches), probed, {}
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
        alpha, fade = self.plan.matching.alpha, self.plan.matching.fade
        return {j: gradient_similarity(own, other, alpha, fade) for j, other in others.items()}

    async def _mix(self, trained: Vector, received: dict[int, Received]) -> Mixed:
        """Return w^t [e] from w^{t-1/2} and the neighbours' models, as the plan defends it."""
        mixed: Mixed = await self._in_worker(
            partial(
                mix,
                self.plan.defence,
                trained,
                self._model,
                {index: item.model for index, item in received.items()},
                weights=self._weights(list(received.values())),
                judge=self.learner.held_losses,
            )
        )
        if self.plan.training.statistics == "local":
            mixed = mixed._replace(model=with_own_statistics(mixed.model, trained, self._trainable))
        return mixed

    def _weights(self, received: list[Received]) -> list[float] | None:
        """Return the weights of [own, *received], None for equal ones."""
        if self.plan.matching.weighting == "uniform":
            return None
        return [float(self.learner.samples), *(float(item.samples) for item in received)]

    @property
    def _told_accuracy(self) -> float | None:
        """What others hear of the accuracy: nothing where the samples are private."""
        return None if self.plan.privacy.acts else self._scores.accuracy

    async def _advance(self, status: Status) -> None:
        await self.shelf.advance(status)
        self.swarm.set_status(status)

    async def _finish(self) -> None:
        """Write what the peer ends with, and serve on until the others are done."""
        await self._advance(
            Status(
                published=self.shelf.status.published,
                finished=self.plan.rounds,
                done=True,
                accuracy=self._told_accuracy,
            )
        )
        self._journal.write_model(self._model)
        self._journal.write_account()
        linger = self.plan.network.linger
        if not await self.exchange.wait_for_all(self.plan.rounds, linger):
            log.info("others are not done after %g s; leaving", linger)
        self._journal.write_account()


def typical(rounds: Iterable[int]) -> int:
    """Return the round that most have reached, of those that have reached any; else 0.

    [choice] The lower median: no half of them that lies about how far it is sends anybody ahead.
    """
    reached = sorted(t for t in rounds if t > 0)
    return reached[(len(reached) - 1) // 2] if reached else 0


def confirmed(rounds: Iterable[int]) -> int:
    """Return the `typical` round of those that peers themselves say they have reached; 0 where one
    alone says that the federation has begun.

    [choice] Those who have not begun may all be newcomers, and so have no say in `typical`. A
    single liar must not send a whole federation to its end before it has begun for all that.
    """
    reached = list(rounds)
    return 0 if sum(t > 0 for t in reached) == 1 < len(reached) else typical(reached)
