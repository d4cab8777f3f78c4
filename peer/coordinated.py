"""The rounds of one peer that a central coordinator leads: FedAvg, IFCA and CFL.

The peer asks for a task again and again, does it, and says so; what it made is fetched from it. It
never starts a round by itself and never gives up: without a coordinator it waits for one. A task
that it did already (the coordinator was started again, and asks anew) it does not do twice.

By CFL a model is w_0 + u_v, u_v the cumulated updates of node v. Where the plan permutes, the peer
sends P(d) and adds the u_v that comes back, P undone: nothing that leaves it is in order.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from peer.cluster_models import best_model, initial_model
from peer.errors import (
    NotAdmittedError,
    ProtocolError,
    RefusedError,
    StateError,
    UnreachableError,
    UserError,
)
from peer.exchange import PATIENCE
from peer.journal import Clock, Journal, OnRound
from peer.learning.budget import Budget
from peer.learning.learner import Learner, Scores, Vector
from peer.network.address import HostPort, key_of, parse_address, with_key
from peer.network.limits import Allowance
from peer.network.messages import (
    Assignment,
    Fetch,
    Parcel,
    Reason,
    Reply,
    Report,
    Request,
    Status,
    Task,
    Work,
)
from peer.network.swarm import Swarm
from peer.network.traffic import Fault, Traffic
from peer.network.transport import Buffer, Transport
from peer.network.vectors import WIDTH, decode_vector, encode_vector, is_finite, split
from peer.permutation import Permutation
from peer.plan import MAX_PEERS, Plan
from peer.randomness import Purpose, generator
from peer.rounds import Result
from peer.standing import Standing
from peer.state import Checkpoint, StateDirectory

log = logging.getLogger(__name__)

QUICK, SLOWEST, GROWTH = 0.1, 5.0, 1.6
"""Seconds between two attempts at a coordinator that does not answer: at first, at most, and by
what they grow."""
IDLE = 0.3
"""Seconds until a peer that was told at once that there is nothing to do asks again."""


@dataclass(frozen=True)
class _Deed:
    """A task that is done: the choice that was made, or the vector that was, in the wire's form;
    neither for one that failed."""

    task: Task
    choice: int | None = None
    vector: memoryview | None = None


class Coordinated:
    """The rounds of one peer whose sockets, plan and learner are ready.

    `coordinator` is its address, tcp://HOST:PORT, and `coordinator_peer` its id in a federation
    with keys: nobody else gets this peer's updates. `permutation` is P where the plan permutes.
    """

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
        coordinator: str,
        coordinator_peer: str | None,
        permutation: Permutation | None,
        budget: Budget | None = None,
    ) -> None:
        self.plan = plan
        self.index = index
        self.learner = learner
        self.state = state
        self.swarm = swarm
        self.status = Status()
        self._transport = transport
        self._in_worker = in_worker
        self._coordinator = coordinator
        self._coordinator_peer = coordinator_peer
        self._data = ""
        self._p = permutation
        self._budget = budget
        self._c = plan.c if plan.method == "ifca" else 1
        self._initial = learner.initial()
        self._journal = Journal(
            plan=plan,
            index=index,
            manifest=learner.manifest,
            state=state,
            traffic=traffic,
            budget=budget,
            on_round=on_round,
        )
        size = self._initial.size * WIDTH[plan.network.precision]
        transport.allow(Allowance.of_snapshots(size, 1))
        self._model = self._initial
        self._scores = Scores(0.0, math.inf)
        self._standing = Standing({})
        self._deed: _Deed | None = None
        self._models: dict[int, Vector] = {}
        self._models_of: tuple[int, int] | None = None
        self._clock = Clock()
        self._accepted = self._lost = False
        self._pause = QUICK
        self._rng = generator(plan.seed, Purpose.TOPOLOGY, index=index)

    async def handle(self, request: Request) -> tuple[Reply, Sequence[Buffer]]:
        """Answer one request. Raises RefusedError."""
        if not isinstance(request, Fetch):
            return await self.swarm.handle(request)
        if request.plan != self.plan.digest:
            raise RefusedError(Reason.PLAN_MISMATCH, f"this is {self.plan.digest}")
        if self._coordinator_peer not in (None, request.sender):
            raise RefusedError(Reason.BAD_REQUEST, "only the coordinator may fetch")
        deed = self._deed
        if (
            deed is None
            or deed.vector is None
            or (deed.task.round, deed.task.model) != (request.round, request.number)
        ):
            raise RefusedError(Reason.GONE, f"nothing of round {request.round}")
        parcel = Parcel(round=request.round, number=request.number, size=len(deed.vector))
        return parcel, list(split(deed.vector))

    async def run(self, checkpoint: Checkpoint | None) -> Result:
        """Do what the coordinator asks until the plan's last round is closed."""
        if checkpoint is not None:
            self._restore(checkpoint)
        patience = self.plan.network.linger
        if self.status.finished >= self.plan.rounds:
            self._scores = await self._in_worker(self.learner.evaluate, self._model)
            patience = min(patience, self.plan.network.request_timeout)
        while self.status.finished < self.plan.rounds:
            task = await self._next_task()
            if task is None:
                continue
            try:
                await self._do(task)
            except ProtocolError as error:
                await self._blame(error)
            except RefusedError as refusal:  # of another version by now
                log.debug("the coordinator refuses: %s", refusal)
                await self._rest()
            except UnreachableError as error:
                await self._miss(error)
        await self._finish(patience)
        return Result(
            index=self.index,
            rounds=self.status.finished,
            model=self._model,
            scores=self._scores,
            bag=self._standing.bag(self.index),
            state=self.state.path,
        )

    def _restore(self, checkpoint: Checkpoint) -> None:
        standing = checkpoint.matcher.get("standing")
        try:
            content = bytes.fromhex(standing if isinstance(standing, str) else "")
            self._standing = Standing.decode([content], self.plan.n)
        except (ValueError, ProtocolError):
            raise StateError(f"the checkpoint in {self.state.path} is of no use") from None
        self._journal.resume(checkpoint)
        self._model = checkpoint.model
        self._advance(checkpoint.t, None)
        log.info("going on after round %d", checkpoint.t)

    def _advance(self, t: int, accuracy: float | None) -> None:
        done = t >= self.plan.rounds
        if self.plan.privacy.acts:
            accuracy = None  # it tells of the samples
        self.status = Status(published=t, finished=t, done=done, accuracy=accuracy)
        self.swarm.set_status(self.status)

    # Asking.

    async def _next_task(self) -> Task | None:
        """Report, and return what is to be done and has not been; None when there is nothing.

        Raises UserError when this peer is not wanted.
        """
        loop = asyncio.get_running_loop()
        asked = loop.time()
        try:
            task = await self._report(min(PATIENCE, self.plan.network.request_timeout / 2))
        except UnreachableError as error:
            await self._miss(error)
            return None
        except ProtocolError as error:
            await self._blame(error)
            return None
        except RefusedError as refusal:
            await self._refused(refusal)
            return None
        if self._lost:
            log.info("the coordinator %s is back", self._coordinator)
        self._accepted, self._lost, self._pause = True, False, QUICK
        if task is None or (self._deed is not None and task == self._deed.task):
            if loop.time() < asked + IDLE:
                await asyncio.sleep(IDLE)
            return None
        return task

    async def _report(self, wait: float) -> Task | None:
        """Report to the coordinator and return the task that it gives. Raises what a request
        does."""
        deed, manifest = self._deed, self.learner.manifest
        reply, chunks = await self._transport.request(
            self._coordinator,
            Report(
                update=self.swarm.own,
                size=manifest.size,
                trainable=manifest.trainable,
                samples=self.learner.samples,
                fingerprint=self._p.fingerprint if self._p is not None else "",
                done=deed.task if deed is not None else None,
                choice=deed.choice if deed is not None else None,
                failed=deed is not None and deed.choice is None and deed.vector is None,
                wait=wait,
            ),
            timeout=self.plan.network.request_timeout,
            max_payload=8 * self.plan.n,
        )
        if not isinstance(reply, Assignment):
            raise ProtocolError("not an assignment")
        data = HostPort(parse_address(self._coordinator).host, reply.data_port)
        self._data = with_key(data.url, key_of(self._coordinator))
        if reply.task is not None:
            self._check(reply.task)
            if reply.task.work is Work.CLOSE:
                standing = Standing.decode(chunks, self.plan.n)
                if standing.places.get(self.index) != reply.task.model:
                    raise ProtocolError("a standing that contradicts the task")
                self._standing = standing
        return reply.task

    def _check(self, task: Task) -> None:
        """Raise ProtocolError for a task that no honest coordinator gives."""
        models = 2 * MAX_PEERS if self.plan.method == "cfl" else self._c
        choosing = task.work in (Work.DRAW, Work.CHOOSE)
        if not self.status.finished < task.round <= self.plan.rounds or task.version > task.round:
            raise ProtocolError(f"a task of round {task.round} and version {task.version}")
        if choosing != (task.model is None) or (choosing and self._c == 1):
            raise ProtocolError(f"a task to {task.work} that names model {task.model}")
        if task.model is not None and task.model >= models:
            raise ProtocolError(f"model {task.model} of {models}")
        if task.work is Work.CLOSE and task.version != task.round:
            raise ProtocolError("a round that is closed before it is finished")
        if task.draw > self.plan.central.redraws:
            raise ProtocolError(f"draw {task.draw}")

    async def _miss(self, error: UnreachableError) -> None:
        if not self._lost:
            level = logging.ERROR if isinstance(error, NotAdmittedError) else logging.WARNING
            log.log(level, "the coordinator %s is lost (%s); waiting", self._coordinator, error)
        self._lost = True
        await self._rest()

    async def _blame(self, error: ProtocolError) -> None:
        """Count what the coordinator sent and is of no use, and ask again later."""
        self._transport.blame(Fault.CONTENT, "coordinator", f"the coordinator: {error}")
        await self._rest()

    async def _refused(self, refusal: RefusedError) -> None:
        """Wait after a refusal. Raises UserError when a person must act."""
        if refusal.reason == Reason.PERMUTATION_MISMATCH and not self._accepted:
            raise UserError(
                f"the coordinator refuses this peer's secret: {refusal.detail}",
                "give every peer the same secret: --secret FILE",
            )
        if refusal.reason == Reason.MODEL_MISMATCH and not self._accepted:
            raise UserError(
                f"the coordinator refuses this peer's model: {refusal.detail}",
                "model, input shape and number of classes must be the same at every peer",
            )
        if refusal.reason == Reason.BEHIND:
            detail = (
                f"the coordinator does not know of round {self.status.finished}, which this peer "
                f"has finished ({refusal.detail}): start it with the --state it had; waiting"
            )
        else:
            detail = f"the coordinator refuses: {refusal}; waiting"
        if refusal.reason not in (Reason.BUSY, Reason.NOT_YET):
            self._transport.blame(Fault.CONTENT, ("refusal", refusal.reason), detail)
        await self._rest()

    async def _rest(self) -> None:
        """Sleep before the coordinator is asked again, for longer every time in vain."""
        await asyncio.sleep(self._pause * self._rng.uniform(0.5, 1.5))
        self._pause = min(SLOWEST, self._pause * GROWTH)

    # Doing.

    async def _do(self, task: Task) -> None:
        """Do a task. Raises UnreachableError, RefusedError or ProtocolError when it cannot be."""
        match task.work:
            case Work.DRAW:
                models = [await self._initial_model(task.draw, j) for j in range(self._c)]
                self._deed = _Deed(task, choice=await self._choose(models, task.round))
            case Work.CHOOSE:
                models = [await self._model_of(task, j) for j in range(self._c)]
                self._deed = _Deed(task, choice=await self._choose(models, task.round))
            case Work.TRAIN:
                vector = await self._train(task)
                self._deed = _Deed(task, vector=vector)
            case Work.CLOSE:
                await self._close(task)

    async def _choose(self, models: list[Vector], t: int) -> int:
        return best_model(await self._in_worker(self.learner.train_losses, models, t))

    async def _train(self, task: Task) -> memoryview | None:
        """Return what the coordinator is to have of this round; None when training diverged, or
        would cost more epsilon than is left."""
        before = await self._model_of(task, task.model)
        trained: Vector = await self._in_worker(self.learner.fit, before, task.round)
        self._clock.lap("train")
        await self._in_worker(self._journal.keep_spent)
        if self._budget is not None and self._budget.exhausted:
            return None
        sent = trained
        if self.plan.method == "cfl":
            sent = trained - before
            if self._p is not None:
                sent = self._p.apply(sent)
        if not is_finite(sent):
            log.warning("training diverged in round %d; it is left out", task.round)
            return None
        return encode_vector(sent, self.plan.network.precision)

    async def _close(self, task: Task) -> None:
        """Take over the model of this peer's cluster after a round, and write the round down."""
        t = task.round
        self._model = await self._model_of(task, task.model)
        self._clock.lap("match")
        self._scores = await self._in_worker(self.learner.evaluate, self._model)
        self._clock.lap("evaluate")
        standing, method = self._standing, self.plan.method
        self._journal.record(
            t,
            scores=self._scores,
            neighbours=standing.neighbours(self.index, method),
            bag=standing.bag(self.index),
            clock=self._clock,
            notes=standing.notes(self.index, self.plan),
        )
        kept = {"standing": standing.encode(self.plan.n).hex()}
        await self._in_worker(self._journal.save, t, self._model, kept)
        self._advance(t, self._scores.accuracy)
        self._clock = Clock()

    async def _finish(self, patience: float) -> None:
        """Write what the peer ends with, and tell the coordinator, if it is found in so many
        seconds."""
        self._journal.write_model(self._model)
        self._journal.write_account()
        try:
            async with asyncio.timeout(patience):
                while True:
                    try:
                        await self._report(0.0)
                    except (UnreachableError, ProtocolError):
                        await self._rest()
                    else:
                        break
        except (TimeoutError, RefusedError):
            log.info("the coordinator was not told of the end; leaving")
        self._journal.write_account()

    # Models.

    async def _model_of(self, task: Task, number: int | None) -> Vector:
        """Return a model [e] as it is after the task's version; asked for once. Raises what
        `_fetch` does."""
        assert number is not None
        if self._models_of != (task.version, task.draw):
            self._models_of, self._models = (task.version, task.draw), {}
        if number not in self._models:
            self._models[number] = await self._load(task, number)
        return self._models[number]

    async def _load(self, task: Task, number: int) -> Vector:
        fetched = await self._fetch(task.version, number)
        if self.plan.method != "cfl":
            return await self._initial_model(task.draw, number) if fetched is None else fetched
        if fetched is None:
            raise ProtocolError("a node without an update")
        return self._initial + (fetched if self._p is None else self._p.undo(fetched))

    async def _initial_model(self, draw: int, j: int) -> Vector:
        """Return an initial model [e] as it would arrive: in the wire's precision."""
        drawn: Vector = await self._in_worker(
            initial_model, self._initial, self.learner.manifest, self.plan.seed, j, draw
        )
        precision = self.plan.network.precision
        return decode_vector([encode_vector(drawn, precision)], drawn.size, precision, math.inf)

    async def _fetch(self, version: int, number: int) -> Vector | None:
        """Return a vector [e] of the coordinator's; None for a model that is still the initial
        one. Raises UnreachableError, RefusedError or ProtocolError."""
        network, size = self.plan.network, self._initial.size
        expected = size * WIDTH[network.precision]
        reply, chunks = await self._transport.request(
            self._data,
            Fetch(round=version, number=number),
            timeout=network.request_timeout,
            max_payload=expected,
        )
        if not isinstance(reply, Parcel) or (reply.round, reply.number) != (version, number):
            raise ProtocolError("not the model that was asked for")
        if reply.size == 0 and not chunks:
            return None
        if reply.size != expected:
            raise ProtocolError(f"a model of {reply.size} bytes, not {expected}")
        # An update of CFL is the sum of one mean a round, each below the limit.
        limit = network.norm_limit * max(1, version)
        return decode_vector(chunks, size, network.precision, limit)
