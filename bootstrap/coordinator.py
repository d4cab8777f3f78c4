"""The central coordinator, live: FedAvg, IFCA and CFL over the wire.

Contract. Peers report again and again (`Report`): what they have done, and that they want a task;
the answer waits a little for one (`Assignment`). Vectors are fetched, never pushed: peers fetch
models of a version here, the coordinator fetches from a peer what it made, checks it, and counts
whatever is wrong as that peer's. What is to be done is said by `bootstrap.coordination.rounds`.

An exchange ends when all of those asked who are there have answered; or at its deadline
(`network.round_timeout`), as soon as a quorum has. Who did not answer by then is overdue: nobody
waits for it again until it does. Who answers what it must not, again and again, is left out for a
while: neither asked nor waited for. A round is finished once it is on the disk; only then do peers
hear of it, so no peer is ever ahead of a coordinator that was started again with its state. One
that has lost its state refuses peers that are ahead, and says so.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bootstrap.coordination import fedavg
from bootstrap.coordination.rounds import (
    Answers,
    Exchange,
    Exchanges,
    Method,
    Outcome,
    Round,
    Weights,
    advance,
    new_method,
)
from bootstrap.coordinator_rows import RoundRows
from bootstrap.coordinator_store import CoordinatorStore, Layout, Saved
from peer.errors import ProtocolError, RefusedError, UnreachableError
from peer.exchange import PATIENCE, PULLS_AT_ONCE
from peer.learning.learner import Vector
from peer.network.address import deserted, parse_address
from peer.network.conduct import Conduct
from peer.network.limits import Allowance
from peer.network.messages import (
    Assignment,
    Fetch,
    Parcel,
    PeerRecord,
    Reason,
    Reply,
    Report,
    Task,
    Work,
)
from peer.network.score import Offence
from peer.network.traffic import Fault
from peer.network.transport import Buffer, Transport
from peer.network.vectors import WIDTH, decode_vector, encode_vector, split
from peer.plan import Plan
from peer.standing import Standing

log = logging.getLogger(__name__)

MAX_VALUES = 2**28
"""Values of the largest model that is coordinated: 1 GiB, and a multiple of it is held."""
MAX_WAITING = 128
"""Reports that wait for a task at a time; further ones are answered at once."""
RETURN = 20.0
"""Seconds that a restarted coordinator waits for those that were there before."""
AHEAD = 20.0
"""Seconds for which nothing is started anew after a report of a peer that is ahead."""
SILENCE = 2.0
"""Seconds without a report after which one that is waited for is looked at: does it live?"""
LOOKED_AT = 16
"""Peers that are looked at a second."""


@dataclass
class _Client:
    """A peer as its last report has it."""

    record: PeerRecord
    samples: int
    finished: int
    heard: float


@dataclass(eq=False)
class _Open:
    """The exchange that is going on; `collecting` is from whom a vector is being fetched."""

    exchange: Exchange
    answers: dict[int, Vector | int | None] = field(default_factory=dict)
    collecting: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Closing:
    """The last finished round, as its `members` are told of it.

    Those are all whose model it knows; after the last round only those that have the right one.
    """

    t: int
    members: frozenset[int]
    draw: int
    owners: Mapping[int, str]
    standing: Standing
    encoded: bytes


class Coordinator:
    """Coordinates the peers of `plan` while `run` runs; `report` and `fetch` answer them.

    Args:
        transport: asks peers; its data socket is where models are fetched.
        present: returns the id of the peer that is there by an index, None when nobody is.
        lost: is told the index of a peer that is found gone.
        state: directory for what outlives a restart, and for the rows of the run; None keeps
            nothing.

    Raises StateError when the directory holds what cannot be trusted.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        transport: Transport,
        present: Callable[[int], str | None],
        lost: Callable[[int], None],
        state: Path | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self._transport = transport
        self._present = present
        self._lost = lost
        self._clock = clock
        self._conduct = Conduct(transport, plan.network.ban_score, clock)
        self._clients: dict[int, _Client] = {}
        self._owners: dict[int, str] = {}
        self._overdue: set[str] = set()
        self._layout: Layout | None = None
        self._method: Method | None = None
        self._open: _Open | None = None
        self._closing: _Closing | None = None
        self._tried: set[str] = set()
        self._expected: tuple[int, ...] = ()
        self._version = 0
        self._models: Mapping[int, Vector | None] = {}
        self._encoded: dict[int, memoryview] = {}
        self._pulls = asyncio.Semaphore(PULLS_AT_ONCE)
        self._late_pulls = asyncio.Semaphore(1)
        self._ahead = -math.inf
        self._changed = asyncio.Event()
        self._waiting = 0
        self._turn = 0
        self.summed_up = False
        """Whether the last round was closed by those who were there, and their summary written."""
        self._store = None if state is None else CoordinatorStore(state, plan)
        self._rows = None if state is None else RoundRows(state, plan)
        self._resume()

    @property
    def finished(self) -> int:
        """The last finished round."""
        return 0 if self._closing is None else self._closing.t

    def _resume(self) -> None:
        saved = None if self._store is None else self._store.load()
        if saved is None:
            return
        self._settle_on(saved.layout)
        self._method = saved.method
        self._owners, self._expected = saved.owners, saved.present
        self._closing = self._closing_of(saved.method, saved.standing)
        self._publish(saved.method)
        if self._rows is not None:
            self._rows.resume(self.finished, saved.standing)
        log.info("going on after round %d of %d", self.finished, self.plan.rounds)

    # What peers ask.

    async def report(self, request: Report) -> tuple[Reply, Sequence[Buffer]]:
        """Take in a peer's report and return its task. Raises RefusedError."""
        record, status = request.update.record, request.update.status
        self._agree(request)
        if status.finished > self.finished:
            self._ahead = self._clock()
            self._transport.blame(
                Fault.CONTENT, "behind",
                f"peer {record.index} has finished round {status.finished}, this coordinator knows "
                f"of {self.finished}: its state was lost or is an old one; start it with the "
                "--state it had, or everybody with a new one",
            )  # fmt: skip
            raise RefusedError(Reason.BEHIND, f"round {self.finished} was the last finished here")
        self._clients[record.index] = _Client(
            record, request.samples, status.finished, self._clock()
        )
        self._take_answer(record, request)
        if self._rows is not None:
            self._rows.add(status.finished, record.index, status.accuracy)
        self._notify()
        await self._wait_for_task(record, request.wait)
        task = self._task_of(record)
        chunks: Sequence[Buffer] = ()
        if task is not None and task.work is Work.CLOSE and self._closing is not None:
            chunks = tuple(split(self._closing.encoded))
        port = parse_address(self._transport.data).port
        return Assignment(data_port=port, task=task), chunks

    async def fetch(self, request: Fetch) -> tuple[Reply, Sequence[Buffer]]:
        """Return a model. Raises RefusedError."""
        if request.round != self._version:
            raise RefusedError(Reason.GONE, f"the models here are those of round {self._version}")
        if request.number not in self._models:
            raise RefusedError(Reason.BAD_REQUEST, f"there is no model {request.number}")
        model = self._models[request.number]
        if model is None:
            return Parcel(round=request.round, number=request.number, size=0), ()
        if request.number not in self._encoded:
            precision = self.plan.network.precision
            self._encoded[request.number] = encode_vector(model, precision)
        content = self._encoded[request.number]
        parcel = Parcel(round=request.round, number=request.number, size=len(content))
        return parcel, list(split(content))

    def _agree(self, request: Report) -> None:
        """Hold a peer's model and secret to those of the others. Raises RefusedError.

        The first to report says what they are; as long as nothing is computed from it and none of
        those that agree with it is there, another may.
        """
        record = request.update.record
        said = Layout(
            model=record.model,
            size=request.size,
            trainable=request.trainable,
            fingerprint=request.fingerprint,
        )
        if said == self._layout:
            return
        if said.size > MAX_VALUES or said.trainable > said.size:
            raise RefusedError(Reason.MODEL_MISMATCH, f"a model of {said.size} values")
        if bool(said.fingerprint) != self.plan.permutes:
            raise RefusedError(Reason.PERMUTATION_MISMATCH, "the plan says who permutes")
        if self._layout is None or (self._method is None and not self._there(but=record.index)):
            self._settle_on(said)
            self._clients.clear()
            return
        if said.fingerprint != self._layout.fingerprint:
            raise RefusedError(
                Reason.PERMUTATION_MISMATCH, "the others permute by another secret than this peer"
            )
        raise RefusedError(
            Reason.MODEL_MISMATCH,
            f"the model here is {self._layout.model} of {self._layout.size} values",
        )

    def _settle_on(self, layout: Layout) -> None:
        """Take a model for everybody's, and let each of them fetch all models of a version."""
        self._layout = layout
        models = self.plan.c if self.plan.method == "ifca" else 1
        size = models * layout.size * WIDTH[self.plan.network.precision]
        self._transport.allow(Allowance.of_snapshots(size, 1))

    def _task_of(self, record: PeerRecord) -> Task | None:
        """Return what a peer is to do now."""
        index, closing, going_on = record.index, self._closing, self._open
        client = self._clients.get(index)
        if client is None or client.record.peer != record.peer:
            return None
        if closing is not None and self._unclosed(index):
            place = closing.standing.places[index]
            return Task(
                work=Work.CLOSE, round=closing.t, version=closing.t, model=place, draw=closing.draw
            )
        if (
            going_on is None
            or not self._asked(going_on, index)
            or index in going_on.answers
            or index in going_on.collecting
        ):
            return None
        return going_on.exchange.tasks.get(index)

    def _take_answer(self, record: PeerRecord, request: Report) -> None:
        """Take in what a peer says that it has done, if that is what it was to do."""
        going_on, index = self._open, record.index
        task = self._task_of(record)
        if going_on is None or task is None or task.work is Work.CLOSE or request.done != task:
            return
        if request.failed:
            self._answer(going_on, record, None)
        elif task.work is Work.TRAIN:
            going_on.collecting.add(index)
            self._collectors.create_task(
                self._collect(going_on, record, task), name=f"collect-{index}"
            )
        elif request.choice in self._models:
            self._answer(going_on, record, request.choice)
        else:
            # Without keys others can report in its name.
            offence = Offence.MALFORMED if self._transport.proves_senders else None
            self._conduct.misbehaved(record, f"chose {request.choice}", offence)
            self._answer(going_on, record, None)

    def _answer(self, going_on: _Open, record: PeerRecord, answer: Vector | int | None) -> None:
        going_on.answers[record.index] = answer
        self._overdue.discard(record.peer)
        self._notify()

    async def _collect(self, going_on: _Open, record: PeerRecord, task: Task) -> None:
        """Fetch what a peer made; when it cannot be reached, its next report is another chance."""
        try:
            vector = await self._pull(record, task)
        except ProtocolError as error:
            self._conduct.misbehaved(record, str(error), Offence.MALFORMED)
            self._answer(going_on, record, None)
        except (UnreachableError, RefusedError) as error:
            log.debug("peer %d: %s", record.index, error)
        else:
            self._answer(going_on, record, vector)
        finally:
            going_on.collecting.discard(record.index)
            self._notify()

    async def _pull(self, record: PeerRecord, task: Task) -> Vector:
        """Return what a peer made of a task [e], checked. Raises what a request does."""
        assert self._layout is not None
        assert task.model is not None
        network, size = self.plan.network, self._layout.size
        expected = size * WIDTH[network.precision]
        # The overdue do not keep those who deliver waiting.
        async with self._late_pulls if record.peer in self._overdue else self._pulls:
            reply, chunks = await self._transport.request(
                record.data,
                Fetch(round=task.round, number=task.model),
                timeout=network.request_timeout,
                max_payload=expected,
            )
        if not isinstance(reply, Parcel) or (reply.round, reply.number, reply.size) != (
            task.round,
            task.model,
            expected,
        ):
            raise ProtocolError("not the vector that was asked for")
        return decode_vector(chunks, size, network.precision, network.norm_limit)

    # The rounds.

    async def run(self) -> None:
        """Run every round that is left, then receive newcomers, until cancelled."""
        async with asyncio.TaskGroup() as self._collectors:
            self._collectors.create_task(self._look_after(), name="look-after")
            method = await self._begin()
            while self.finished < self.plan.rounds:
                await self._round(method, self.finished + 1)
            await self._closed_by_all()
            while True:
                await self._receive(method)

    async def _begin(self) -> Method:
        """Wait until the federation is there, and return its method."""
        if self._method is not None:
            patience = self._clock() + RETURN
            while not (there := self._there()) or (
                not set(self._expected).issubset(there) and self._clock() < patience
            ):
                await self._change(0.5)
            return self._method
        noted = -math.inf
        # Those who are ahead of a lost state keep what they have: it may be found again.
        while (
            len(there := self._there()) < self.plan.quorum
            or self._layout is None
            or self._clock() < self._ahead + AHEAD
        ):
            if self._clock() >= noted + 15:
                log.info("waiting for the start: %d of %d present", len(there), self.plan.quorum)
                noted = self._clock()
            await self._change(1.0)
        self._method = method = new_method(self.plan, self._layout.size, self._layout.trainable)
        if self._store is not None:
            saved = Saved(self._layout, method, dict(self._owners), Standing({}), tuple(there))
            await asyncio.to_thread(self._store.save, saved)
        self._publish(method)
        return method

    async def _round(self, method: Method, t: int) -> None:
        """Run round t with those who are there, if any of them answers."""
        while not (there := self._there()):
            await self._change(1.0)
        self._own(method, there)
        taking_part = fedavg.participants(there, self.plan.central.fraction, self.plan.seed, t)
        outcome = await self._drive(method, method.round(t, there, taking_part, self._weights()))
        if outcome is None:
            await self._change(0.2)
        else:
            await self._finish(method, outcome)

    def _own(self, method: Method, there: Sequence[int]) -> None:
        """Let the indices of those who are there be theirs: one that another peer had is new."""
        for index in there:
            peer = self._clients[index].record.peer
            if self._owners.setdefault(index, peer) != peer:
                method.places.pop(index, None)
                self._owners[index] = peer

    def _weights(self) -> Weights:
        if self.plan.matching.weighting == "uniform":
            return None
        return {index: client.samples for index, client in self._clients.items()}

    async def _drive(self, method: Method, exchanges: Round | Exchanges) -> Outcome | None:
        """Carry the exchanges of a round to peers and back; return the outcome."""
        answers: Answers | None = None
        while True:
            # Averages and cosines of large models take a while: peers are answered meanwhile.
            exchange, outcome = await asyncio.to_thread(advance, exchanges, answers)
            self._publish(method)
            if exchange is None:
                return outcome
            answers = await self._carry(exchange)

    async def _carry(self, exchange: Exchange) -> Answers:
        """Give peers their tasks, and return what they answered, by index."""
        self._open = going_on = _Open(exchange)
        self._notify()
        deadline = self._clock() + self.plan.network.round_timeout
        quorum = math.ceil(self.plan.central.quorum * len(exchange.tasks))
        while (waited := self._waited_for()) or self._unheard(going_on):
            if waited and self._clock() >= deadline and len(going_on.answers) >= quorum:
                self._leave_behind(waited)
                break
            await self._change(max(0.05, min(1.0, deadline - self._clock())))
        self._open = None
        return dict(sorted(going_on.answers.items()))

    def _waited_for(self) -> list[int]:
        """Return who is there and owes an answer, or has not closed the last round yet."""
        if self._open is None:
            return []
        going_on = self._open
        return [
            i
            for i in self._there()
            if ((self._asked(going_on, i) and i not in going_on.answers) or self._unclosed(i))
            and self._clients[i].record.peer not in self._overdue
        ]

    def _unheard(self, going_on: _Open) -> bool:
        """Return whether nobody has answered, though some of those asked are there."""
        return not going_on.answers and any(self._asked(going_on, i) for i in self._there())

    def _asked(self, going_on: _Open, index: int) -> bool:
        """Return whether the peer that reports under an index is one of those that were asked, and
        has not been left out since."""
        record = self._clients[index].record
        return (
            index in going_on.exchange.tasks
            and self._owners.get(index) == record.peer
            and not self._conduct.left_out(record)
        )

    def _unclosed(self, index: int) -> bool:
        """Return whether a peer is to close the last round, and can: its models are still here."""
        closing, client = self._closing, self._clients[index]
        return (
            closing is not None
            and client.finished < closing.t == self._version
            and closing.owners.get(index) == client.record.peer
            and index in closing.members
        )

    def _leave_behind(self, late: Sequence[int]) -> None:
        """Go on without those who live but do not deliver.

        [choice] They may take part as before, but are not waited for until they deliver again.
        """
        for index in late:
            record = self._clients[index].record
            self._overdue.add(record.peer)
            self._transport.blame(
                Fault.OVERDUE, ("overdue", record.peer),
                f"peer {index} did not deliver in {self.plan.network.round_timeout:g} s",
            )  # fmt: skip

    async def _finish(self, method: Method, outcome: Outcome) -> None:
        """Put a round on the disk, and then let peers know of it."""
        assert self._layout is not None
        standing = Standing(dict(method.places), outcome.trained)
        closing = self._closing_of(method, standing)
        # The rows first: a round whose attempts were not written is run again after a crash.
        if self._rows is not None:
            self._rows.begin(closing.t, standing, outcome.attempts)
        if self._store is not None:
            saved = Saved(self._layout, method, dict(self._owners), standing, tuple(self._there()))
            await asyncio.to_thread(self._store.save, saved)
        for attempt in outcome.attempts:
            if attempt.children is not None:
                log.info(
                    "round %d: cluster %d of %d peers is split into %d and %d",
                    attempt.t, attempt.node, len(attempt.members), *attempt.children,
                )  # fmt: skip
        self._closing = closing
        self._notify()

    def _closing_of(self, method: Method, standing: Standing) -> _Closing:
        members = frozenset(
            i
            for i in standing.places
            if method.version < self.plan.rounds
            or method.settled(i)
            or self._owners.get(i) in self._tried
        )
        return _Closing(
            t=method.version,
            members=members,
            draw=method.draw,
            owners=dict(self._owners),
            standing=standing,
            encoded=standing.encode(self.plan.n),
        )

    async def _closed_by_all(self) -> None:
        """Wait until those who are there have closed the last round, and sum up."""
        deadline = self._clock() + self.plan.network.round_timeout
        while any(map(self._unclosed, self._there())) and self._clock() < deadline:
            await self._change(1.0)
        if self._rows is not None:
            self._rows.sum_up(self._transport.traffic)
        self.summed_up = True
        log.info("round %d was the last; serving those who come late", self.finished)

    async def _receive(self, method: Method) -> None:
        """Find the models of those who come, or return, after the last round."""
        await self._change(1.0)
        closing = self._closing
        assert closing is not None
        new = [
            i
            for i in self._there()
            if self._clients[i].finished < closing.t
            and (i not in closing.members or closing.owners[i] != self._clients[i].record.peer)
        ]
        if not new:
            return
        self._own(method, new)
        await self._drive(method, method.settle(self.plan.rounds, new))
        self._tried |= {self._clients[i].record.peer for i in new}
        trained = {i: v for i, v in closing.standing.trained.items() if i not in new}
        await self._finish(method, Outcome(trained))

    # Helpers.

    def _publish(self, method: Method) -> None:
        """Let peers fetch the models of now."""
        models = method.models()
        if self._version == method.version and models.keys() == self._models.keys():
            return
        self._version, self._models, self._encoded = method.version, models, {}

    def _there(self, *, but: int | None = None) -> list[int]:
        """Return the sorted indices of those who report and are present, all `but` one, and those
        who are left out for their offences."""
        return sorted(
            index
            for index, client in self._clients.items()
            if index != but
            and self._present(index) == client.record.peer
            and not self._conduct.left_out(client.record)
        )

    async def _look_after(self) -> None:
        """Find out soon when one that is waited for has ended: nobody listens there then."""
        while True:
            await asyncio.sleep(1.0)
            oldest = self._clock() - SILENCE
            silent = [i for i in self._waited_for() if self._clients[i].heard < oldest]
            # By turns: those who are only slow must not hide the dead.
            start = self._turn % max(1, len(silent))
            chosen = [*silent[start:], *silent[:start]][:LOOKED_AT]
            self._turn += len(chosen)
            await asyncio.gather(*map(self._look_at, chosen))

    async def _look_at(self, index: int) -> None:
        client = self._clients[index]
        gone = await deserted(client.record.control, self.plan.network.probe_timeout)
        if gone and self._clients[index] is client:
            self._lost(index)
            self._notify()

    async def _wait_for_task(self, record: PeerRecord, seconds: float) -> None:
        """Wait until there is something for a peer to do, `seconds` at most."""
        if self._task_of(record) is not None or seconds <= 0 or self._waiting >= MAX_WAITING:
            return
        self._waiting += 1
        try:
            async with asyncio.timeout(min(seconds, PATIENCE)):
                while self._task_of(record) is None:
                    await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1

    async def _change(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
