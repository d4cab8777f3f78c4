"""Snapshots: keeping one's own for others, and getting theirs by probe and pull.

Pull, not push: after its training of round t a peer publishes a snapshot on its `Shelf`; others ask
for the evidence their similarity needs (`Exchange.probe`) and for the models they will use
(`Exchange.pull`). `staleness` says how old an answer may be; in lockstep (0) the answer is exactly
round t, however long that takes, and only those that membership calls dead are left out.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from peer.errors import ForgedError, ProtocolError, RefusedError, UnreachableError
from peer.learning.learner import Vector
from peer.matching.base import Evidence
from peer.matching.similarity import GradientEvidence
from peer.matching.sketch import CountSketch
from peer.network.limits import Allowance
from peer.network.messages import (
    Await,
    Model,
    Probe,
    Pull,
    Reached,
    Reason,
    Reply,
    Request,
    Sketches,
    State,
    Status,
)
from peer.network.score import Offence
from peer.network.swarm import Swarm
from peer.network.transport import Buffer, Transport
from peer.network.vectors import WIDTH, decode_vector, encode_vector, split
from peer.plan import Plan

PATIENCE = 5.0
"""Longest wait, in seconds, that a request asks of the other side before it asks again."""

MAX_WAITERS = 128
"""Requests that may wait at one peer for its next round; further ones are answered at once, so that
those who wait without end leave room for others."""

PULLS_AT_ONCE = 4
"""Models in flight towards one peer: more only compete for its link and memory."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Snapshot:
    """A peer's model after the local training of round `t`, as others may ask for it.

    `model` is w^{t-1/2} [e] in the wire's precision. Of its local update g and its accumulated
    update h a snapshot keeps what the plan's evidence needs: `gradient` is g [trainable] in the
    wire's precision for exact evidence, else empty; `sketches` are those of g and h for sketched
    evidence, else None.
    """

    t: int
    model: memoryview
    gradient: memoryview
    sketches: GradientEvidence | None


class Shelf:
    """A peer's last few snapshots, and who waits for the next.

    `first` is the round from which this shelf is filled: a peer that caught up or was restarted has
    none before. `progress` is notified whenever a snapshot is published or a round is finished.
    """

    def __init__(self, history: int) -> None:
        self._history = history
        self.first = 1
        self._snapshots: OrderedDict[int, Snapshot] = OrderedDict()
        self.status = Status()
        self.progress = asyncio.Condition()
        self._waiters = 0

    async def publish(self, snapshot: Snapshot) -> None:
        """Put a snapshot on the shelf; the oldest falls off when there are more than `history`."""
        self._snapshots[snapshot.t] = snapshot
        while len(self._snapshots) > self._history:
            self._snapshots.popitem(last=False)
        await self.advance(self.status.model_copy(update={"published": snapshot.t}))

    async def advance(self, status: Status) -> None:
        """Say how far this peer is."""
        self.status = status
        async with self.progress:
            self.progress.notify_all()

    async def wait_until(self, reached: Callable[[], bool], seconds: float) -> bool:
        """Return whether `reached` came true within `seconds`, or `PATIENCE` if that is shorter."""
        if reached() or seconds <= 0 or self._waiters >= MAX_WAITERS:
            return reached()
        self._waiters += 1
        try:
            async with asyncio.timeout(min(seconds, PATIENCE)), self.progress:
                await self.progress.wait_for(reached)
        except TimeoutError:
            return False
        finally:
            self._waiters -= 1
        return True

    async def get(self, t: int, staleness: int | None, wait: float) -> Snapshot:
        """Return the snapshot that satisfies a request for round `t`.

        Lockstep (staleness 0) gets exactly round t; else the newest, if it is no older than
        t - staleness. Raises RefusedError NOT_YET after `wait` seconds without one, GONE when it
        has fallen off the shelf.
        """
        oldest = {None: 1, 0: t}.get(staleness, t - (staleness or 0))
        if staleness == 0 and t < self.first:
            raise RefusedError(Reason.GONE, f"round {t}")
        # Asynchronous peers never wait: what is there now is what they get.
        await self.wait_until(
            lambda: self.status.published >= oldest, wait if staleness is not None else 0.0
        )
        if not self._snapshots or self.status.published < oldest:
            raise RefusedError(Reason.NOT_YET, f"at round {self.status.published}")
        snapshot = self._snapshots.get(t) if staleness == 0 else self.newest
        if snapshot is None:
            raise RefusedError(Reason.GONE, f"round {t}")
        return snapshot

    @property
    def newest(self) -> Snapshot | None:
        """The newest snapshot, None before the first."""
        return next(reversed(self._snapshots.values()), None)


@dataclass(frozen=True)
class Probed:
    """What a probe brought: the sketches of g and h [buckets] each, and the round of the snapshot
    that they are of."""

    sketches: GradientEvidence
    round: int


@dataclass(frozen=True)
class Received:
    """What a pull brought: the model w_j [e], g_j [trainable] when it was asked for, the number of
    j's samples, and the round of the snapshot."""

    model: Vector
    gradient: Vector | None
    samples: int
    round: int


@dataclass
class Tally:
    """How one round's exchanges went: how many there were, how many had to be waited for beyond one
    patience, and how many were left out for good."""

    exchanges: int = 0
    late: int = 0
    missing: int = 0


class Exchange:
    """Probe and pull for one peer, both sides."""

    def __init__(
        self,
        *,
        plan: Plan,
        transport: Transport,
        swarm: Swarm,
        shelf: Shelf,
        initial: Vector,
        trainable: int,
        samples: int,
    ) -> None:
        self._plan = plan
        self._transport = transport
        self._swarm = swarm
        self._shelf = shelf
        self._initial = initial
        self._trainable = trainable
        self._samples = samples
        self._buckets = plan.sketch_buckets(trainable)
        self._sketch = CountSketch(trainable, self._buckets, plan.seed)
        staleness = plan.network.staleness
        self._staleness = None if staleness == "async" else staleness
        self._pulls = asyncio.Semaphore(PULLS_AT_ONCE)
        self._deadline = 0.0
        self._overdue: set[tuple[int, str]] = set()
        values = initial.size + (trainable if plan.matching.evidence == "exact" else 0)
        size = values * WIDTH[plan.network.precision]
        transport.allow(Allowance.of_snapshots(size, plan.network.history))
        self.tally = Tally()

    def begin_round(self) -> None:
        """Count anew, and give all exchanges from now on one `round_timeout` together."""
        self.tally = Tally()
        self._deadline = asyncio.get_running_loop().time() + self._plan.network.round_timeout

    def snapshot(
        self, t: int, before: Vector, after: Vector, evidence: Evidence
    ) -> tuple[Snapshot, GradientEvidence | None]:
        """Return the snapshot of round `t` from w^{t-1} and w^{t-1/2}, both [e], and this peer's
        own side of gradient-based similarity, if the matcher asks for that."""
        precision = self._plan.network.precision
        model = encode_vector(after, precision)
        if evidence is not Evidence.GRADIENT:
            return Snapshot(t, model, memoryview(b""), None), None
        g = (after - before)[: self._trainable]
        h = self.drift(after)
        if self._plan.matching.evidence == "exact":
            return Snapshot(t, model, encode_vector(g, precision), None), GradientEvidence(g, h)
        sketches = GradientEvidence(self._sketch.apply(g), self._sketch.apply(h))
        return Snapshot(t, model, memoryview(b""), sketches), sketches

    def drift(self, model: Vector) -> Vector:
        """Return h = w - w_0 [trainable] of a model [e]."""
        return (model - self._initial)[: self._trainable]

    async def serve(self, request: Request) -> tuple[Reply, Sequence[Buffer]]:
        """Answer a probe, a pull or an await. Raises RefusedError."""
        match request:
            case Probe():
                snapshot = await self._shelf.get(request.round, request.staleness, request.wait)
                if snapshot.sketches is None:
                    raise RefusedError(Reason.BAD_REQUEST, "this plan has no sketches")
                g, h = snapshot.sketches
                reply = Sketches(round=snapshot.t, buckets=self._buckets)
                return reply, [encode_vector(g, "float32"), encode_vector(h, "float32")]
            case Pull():
                snapshot = await self._shelf.get(request.round, request.staleness, request.wait)
                parts = [snapshot.model]
                if request.gradient:
                    if not snapshot.gradient:
                        raise RefusedError(Reason.BAD_REQUEST, "this plan sends no gradients")
                    parts.append(snapshot.gradient)
                sizes = [len(part) for part in parts]
                model = Model(
                    round=snapshot.t,
                    model_bytes=sizes[0],
                    gradient_bytes=sum(sizes[1:]),
                    samples=self._samples,
                )
                return model, [chunk for part in parts for chunk in split(part)]
            case Await():
                await self._shelf.wait_until(
                    lambda: self._shelf.status.finished >= request.round, request.wait
                )
                return Reached(status=self._shelf.status), []
        raise RefusedError(Reason.BAD_REQUEST, request.kind)

    async def gather(
        self, indices: Iterable[int], fetch: Callable[[int], Awaitable[Item | None]]
    ) -> dict[int, Item]:
        """Return {index: what `fetch` brought} of those that could be heard, in index order."""
        ordered = sorted(indices)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_run(fetch(index)), name=f"fetch-{index}") for index in ordered
            ]
        self.tally.exchanges += len(ordered)
        found = {index: task.result() for index, task in zip(ordered, tasks, strict=True)}
        self.tally.missing += sum(item is None for item in found.values())
        return {index: item for index, item in found.items() if item is not None}

    async def probe(self, index: int, t: int) -> Probed | None:
        """Return the sketches of g and h of peer `index` in round `t`, or None."""

        async def ask() -> Probed:
            reply, chunks = await self._ask(
                index,
                "control",
                Probe(round=t, staleness=self._staleness, wait=self._wait),
                8 * self._buckets,
            )
            if not isinstance(reply, Sketches) or reply.buckets != self._buckets:
                raise ProtocolError("not the sketches that were asked for")
            self._check_round(reply.round, t)
            both = decode_vector(
                chunks, 2 * self._buckets, "float32", self._plan.network.norm_limit * 2
            )
            sketches = GradientEvidence(both[: self._buckets], both[self._buckets :])
            return Probed(sketches, reply.round)

        return await self._persist(index, "probe", ask)

    async def pull(
        self,
        index: int,
        t: int,
        *,
        gradient: bool = False,
        probed: Probed | None = None,
        newest: bool = False,
    ) -> Received | None:
        """Return the model of peer `index` in round `t` (with g if asked for), or None.

        The model must not be older than what was `probed`, and agree with it if it is of the same
        round; with a newer one, which only lockstep rules out, there is nothing to compare it to.
        `newest` takes whatever snapshot the peer has, and waits for one no longer than for any
        answer.
        """
        staleness = None if newest else self._staleness

        async def ask() -> Received:
            network = self._plan.network
            width = WIDTH[network.precision]
            expected = [self._initial.size * width, self._trainable * width if gradient else 0]
            async with self._pulls:
                reply, chunks = await self._ask(
                    index,
                    "data",
                    Pull(round=t, staleness=staleness, wait=self._wait, gradient=gradient),
                    sum(expected),
                )
            if not isinstance(reply, Model):
                raise ProtocolError("not the model that was asked for")
            if [reply.model_bytes, reply.gradient_bytes] != expected:
                raise ProtocolError(f"a model of {reply.model_bytes} bytes, not {expected[0]}")
            self._check_round(reply.round, t, newest=newest)
            if probed is not None and reply.round < probed.round:
                raise ProtocolError(f"a model of round {reply.round}, older than its sketch")
            vectors = 1 + gradient
            whole = decode_vector(
                chunks, sum(expected) // width, network.precision, network.norm_limit * vectors
            )
            model, g = whole[: self._initial.size], whole[self._initial.size :]
            if probed is not None and reply.round == probed.round:
                self._check_sketch(self.drift(model), probed.sketches)
            return Received(model, g if gradient else None, reply.samples, reply.round)

        return await self._persist(index, "pull", ask, newest=newest)

    async def wait_for_all(self, round_: int, seconds: float) -> bool:
        """Return whether every living peer that takes part in `round_` finished it in `seconds`.

        A peer that answers nonsense is not waited for, nor one that is overdue.
        """
        deaf: set[int] = set()

        async def ask(index: int) -> None:
            try:
                status = await self._progress_of(index, round_, self._wait)
            except ProtocolError:
                deaf.add(index)
            except (RefusedError, UnreachableError):
                pass  # busy, starting or gone: membership says which of it before long
            else:
                if status.finished >= round_:
                    return
            await self._swarm.changed(0.2)

        try:
            async with asyncio.timeout(seconds):
                while waiting := self._behind(round_) - deaf:
                    await asyncio.gather(*map(ask, sorted(waiting)))
        except TimeoutError:
            return False
        return True

    async def progress(self) -> list[Status]:
        """Return how far those who are there say that they themselves are; nothing unless half of
        them answer.

        [choice] Where more than half have answered in the time of four pings, the rest are not
        waited for: one of them may be dead, unnoticed so far.
        """
        asked = self._swarm.trusted(self._plan.rounds)
        heard: list[Status] = []

        async def ask(index: int) -> None:
            with suppress(ProtocolError, RefusedError, UnreachableError):
                heard.append(await self._progress_of(index, 0, 0.0))

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(index), name=f"progress-{index}") for index in asked]
            if tasks:
                await asyncio.wait(tasks, timeout=4 * self._plan.network.probe_timeout)
            if 2 * len(heard) > len(asked):
                for task in tasks:
                    task.cancel()
        return heard if 2 * len(heard) >= len(asked) else []

    async def _progress_of(self, index: int, round_: int, wait: float) -> Status:
        """Return how far a peer says it is, once it has finished `round_` or after `wait` seconds.

        Raises what a request does; a ProtocolError has been held against the peer.
        """
        try:
            reply, _ = await self._ask(index, "control", Await(round=round_, wait=wait), 0)
            if not isinstance(reply, Reached):
                raise ProtocolError("not how far it is")
            if reply.status.reached > self._plan.rounds:
                raise ProtocolError(f"beyond round {self._plan.rounds}")
        except ProtocolError as error:
            self._swarm.misbehaved(index, str(error), Offence.MALFORMED)
            raise
        self._swarm.note_status(index, reply.status)
        return reply.status

    async def wait_for_stragglers(self, round_: int) -> None:
        """Wait until all have finished `round_`, and for one `round_timeout` at most."""
        if not await self.wait_for_all(round_, self._plan.network.round_timeout):
            for index in self._behind(round_):
                self._give_up(index, "await")

    def _behind(self, round_: int) -> set[int]:
        return {
            index
            for index in self._swarm.trusted(round_)
            if (member := self._swarm.member(index)) and member.status.finished < round_
        } - {index for index, _ in self._overdue}

    def _give_up(self, index: int, kind: str) -> None:
        """Note that a living peer let a whole `round_timeout` pass without what was asked for.
        [choice] It may take part as before, but until it delivers again nobody waits for that
        longer than for any answer: else one peer that only pretends to live would cost every round
        that time."""
        self._overdue.add((index, kind))
        self._swarm.overdue(index, f"did not deliver in {self._plan.network.round_timeout:g} s")

    @property
    def _wait(self) -> float:
        return min(PATIENCE, self._plan.network.request_timeout / 2)

    async def _ask(
        self, index: int, channel: str, request: Request, max_payload: int
    ) -> tuple[Reply, list[memoryview]]:
        member = self._swarm.member(index)
        if member is None or member.state in (State.DEAD, State.LEFT):
            raise RefusedError(Reason.GONE, "no longer a member")
        address = member.record.control if channel == "control" else member.record.data
        try:
            return await self._transport.request(
                address,
                request,
                timeout=self._plan.network.request_timeout,
                max_payload=max_payload,
            )
        except UnreachableError:
            self._swarm.unreachable(index)
            raise

    async def _persist(
        self, index: int, kind: str, ask: Callable[[], Awaitable[Item]], *, newest: bool = False
    ) -> Item | None:
        """Return what `ask` brings, asking again as long as the mode allows; None when it is over.

        In lockstep the living are waited for (until the round's `round_timeout` is over);
        otherwise, and for the `newest` snapshot or an overdue peer, one `request_timeout` is all a
        peer gets. A peer that answers nonsense is not asked again.
        """
        end = asyncio.get_running_loop().time() + self._plan.network.request_timeout
        patient = self._plan.lockstep and not newest and (index, kind) not in self._overdue
        if patient:
            end = max(end, self._deadline)
        try:
            async with asyncio.timeout_at(end if patient else None):
                item = await self._ask_until(end, index, ask, newest=newest)
        except TimeoutError:
            if patient:
                self._give_up(index, kind)
            return None
        if item is not None:
            self._overdue -= {(index, kind), (index, "await")}
        return item

    async def _ask_until(
        self, end: float, index: int, ask: Callable[[], Awaitable[Item]], *, newest: bool
    ) -> Item | None:
        """Return what `ask` brings; None when there is no use in asking again. Raises TimeoutError
        at `end`, in the event loop's time."""
        lockstep = self._plan.lockstep and not newest
        was_late = False
        while asyncio.get_running_loop().time() < end:
            try:
                return await ask()
            except ProtocolError as error:
                forged = isinstance(error, ForgedError)
                offence = Offence.FORGED if forged else Offence.MALFORMED
                self._swarm.misbehaved(index, str(error), offence)
                return None
            except RefusedError as refusal:
                if refusal.reason not in (Reason.NOT_YET, Reason.BUSY):
                    return None
                if not (lockstep or newest) and self._staleness is None:
                    return None
            except UnreachableError:
                if not lockstep:
                    return None
            if not was_late:
                self.tally.late += 1
                was_late = True
            await self._swarm.changed(0.2)
        raise TimeoutError

    def _check_round(self, got: int, wanted: int, *, newest: bool = False) -> None:
        """Raise ProtocolError for a snapshot of a round that there cannot be, or that is none of
        those that the plan's staleness allows, unless the `newest` was asked for."""
        if got > self._plan.rounds:
            raise ProtocolError(f"a snapshot of round {got} of {self._plan.rounds}")
        if self._staleness is not None and not newest:
            latest = wanted if self._staleness == 0 else got
            if not wanted - self._staleness <= got <= latest:
                raise ProtocolError(f"a snapshot of round {got}, not {wanted}")

    def _check_sketch(self, drift: Vector, sketches: GradientEvidence) -> None:
        """Raise ForgedError when a pulled model contradicts the sketch of h that came before.

        g has no such check: only its owner knows w^{t-1}.
        """
        difference = float(np.linalg.norm(self._sketch.apply(drift) - sketches.h))
        # The model's h carries the wire's rounding error; the sketch does not.
        rounding = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}[
            self._plan.network.precision
        ]
        scale = float(np.linalg.norm(self._initial)) + float(np.linalg.norm(drift))
        if difference > 4 * rounding * scale + 1e-6:
            raise ForgedError("the model contradicts its sketch")


async def _run(awaitable: Awaitable[Item]) -> Item:
    return await awaitable
