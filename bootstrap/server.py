"""The bootstrap node: answers those who join, and keeps a list of who is there.

Peers among themselves need it only to meet: they go on without it, and find it again when it is
back. Of a central method it is the coordinator, too, and peers wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import zmq.asyncio

from bootstrap.registry import Registry
from peer.errors import RefusedError, UserError, first_failure
from peer.files import hold_directory
from peer.matching.registry import CENTRAL
from peer.network.messages import (
    MAX_PLAN,
    Announce,
    Done,
    Enrol,
    Enrolled,
    Fetch,
    Known,
    Leave,
    Members,
    Ping,
    Pong,
    Reason,
    Reply,
    Report,
    Request,
    State,
    Update,
    fitting,
)
from peer.network.traffic import Traffic
from peer.network.transport import Buffer, Transport
from peer.plan import Plan

if TYPE_CHECKING:
    from bootstrap.coordinator import Coordinator
    from peer.network.federation import Credentials

log = logging.getLogger(__name__)

LOST_AFTER = 20.0
"""Seconds without an announcement after which a peer no longer counts as present. Peers announce
themselves every few seconds; their own failure detection is faster."""
SWEEP = 1.0
"""Seconds between two looks for the lost."""
MAX_TOLD = 1000
"""Lines of the log about one peer: one that comes and goes without end must not fill the disk."""


@dataclass
class Guest:
    """A peer as this node sees it: its last announcement, and when that came."""

    update: Update
    seen: float

    @property
    def present(self) -> bool:
        """Whether it is here: neither lost nor gone on purpose."""
        return self.update.state is State.ALIVE


class BootstrapNode:
    """Serves a plan; an async context manager.

        async with BootstrapNode(plan, listen="127.0.0.1:7700") as node:
            await node.serve()

    Args:
        plan: what the federation runs.
        listen: HOST:PORT; port 0 takes any free one. A coordinator takes the next port, too.
        state: directory that keeps across restarts the registry, and what a coordinator knows; None
            keeps nothing.
        reclaim_after: seconds after which the index of a peer that was not seen can be given to
            another, when none is free.
        exit_when_done: whether `serve` returns once all n peers have finished their last round.
        context: a ZeroMQ context to share.
        credentials: in a federation with keys, the bootstrap node's.
        insecure: whether it may listen beyond loopback without credentials.

    Entering raises UserError when the address cannot be bound or the state directory not be
    written, StateError when that cannot be had at all, is another process's, or holds what cannot
    be trusted.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        listen: str,
        state: Path | None = None,
        reclaim_after: float = 60.0,
        exit_when_done: bool = False,
        context: zmq.asyncio.Context | None = None,
        credentials: Credentials | None = None,
        insecure: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.guests: dict[int, Guest] = {}
        self.traffic = Traffic()
        self._toml = plan.to_toml()
        if len(self._toml) > MAX_PLAN:
            raise UserError(f"the plan is longer than {MAX_PLAN} characters")
        self._digest = plan.digest
        self._state = state
        self._exit_when_done = exit_when_done
        self._clock = clock
        self._registry = Registry(
            n=plan.n, plan=self._digest, model=plan.model_digest, reclaim_after=reclaim_after
        )
        self._transport = Transport(
            listen=listen,
            handler=self._handle,
            traffic=self.traffic,
            context=context,
            data=plan.method in CENTRAL,
            credentials=credentials,
            insecure=insecure,
        )
        self._credentials = credentials
        self._coordinator: Coordinator | None = None
        self._turn = 0
        self._told: Counter[int] = Counter()
        self._handlers: dict[type[Request], Callable[[Any], Reply]] = {
            Enrol: self._enrol,
            Announce: self._announce,
            Members: self._members,
            Ping: self._ping,
            Leave: self._leave,
        }

    @property
    def address(self) -> str:
        """Where it listens, tcp://HOST:PORT, once entered."""
        return self._transport.control

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as entered:
            if self._state is not None:
                entered.enter_context(hold_directory(self._state))
                try:
                    self._registry.load(self._state, self._clock())
                    self._registry.save(self._state)
                except OSError as error:
                    raise UserError(f"cannot write to {self._state}: {error.strerror}") from None
            if self.plan.method in CENTRAL:
                self._coordinator = self._coordinate()
            await entered.enter_async_context(self._transport)
            self._entered = entered.pop_all()
        own = "" if self._credentials is None else self._credentials.key.peer
        self._transport.introduce(sender=own, plan=self._digest)
        log.info(
            "federation %s (%s, %d peers) meets at %s",
            self.plan.name,
            self.plan.method,
            self.plan.n,
            self.address,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._entered.__aexit__(kind, error, traceback)

    def _coordinate(self) -> Coordinator:
        # Not otherwise: a node that is only met at needs neither numpy nor scipy.
        from bootstrap.coordinator import Coordinator

        if self._state is None:
            log.warning("without --state, all that is learned is lost when this node ends")
        return Coordinator(
            self.plan,
            transport=self._transport,
            present=self._present,
            lost=self._lose,
            state=self._state,
            clock=self._clock,
        )

    async def serve(self) -> None:
        """Serve, and coordinate, until cancelled, or until all are done if that was asked for."""
        try:
            async with asyncio.TaskGroup() as group:
                coordinating = None
                if self._coordinator is not None:
                    coordinating = group.create_task(self._coordinator.run(), name="coordinate")
                while not (self._exit_when_done and self.done):
                    await asyncio.sleep(SWEEP)
                    self._sweep()
                if coordinating is not None:
                    coordinating.cancel()
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        log.info("all %d peers are done", self.plan.n)

    @property
    def done(self) -> bool:
        """Whether every one of the plan's n peers has finished its last round, and a coordinator
        has summed up."""
        finished = sum(guest.update.status.done for guest in self.guests.values())
        summed_up = self._coordinator is None or self._coordinator.summed_up
        return finished >= self.plan.n and summed_up

    def _sweep(self) -> None:
        """Stop counting those as present who have not announced themselves for long, or are members
        no more."""
        oldest = self._clock() - LOST_AFTER
        for index, guest in self.guests.items():
            if guest.present and (guest.seen < oldest or self._forgery(guest.update)):
                self._lose(index)

    def _forgery(self, update: Update) -> str:
        """Return why a record is not what a member says of itself; empty when it is."""
        return "" if self._credentials is None else self._credentials.objection(update.record)

    def _present(self, index: int) -> str | None:
        """Return the id of the peer that is present by an index."""
        guest = self.guests.get(index)
        return guest.update.record.peer if guest is not None and guest.present else None

    def _lose(self, index: int) -> None:
        """Count a peer as present no more, until it announces itself again."""
        guest = self.guests[index]
        if guest.present:
            guest.update = guest.update.model_copy(update={"state": State.DEAD})
            self._tell("lost", index)

    async def _handle(self, request: Request) -> tuple[Reply, Sequence[Buffer]]:
        """Answer one request. Raises RefusedError."""
        if request.plan != self._digest and not isinstance(request, Enrol):
            raise RefusedError(Reason.PLAN_MISMATCH, f"the plan here is {self._digest}")
        if self._coordinator is not None and isinstance(request, Fetch):
            return await self._coordinator.fetch(request)
        if self._coordinator is not None and isinstance(request, Report):
            self._note(request.sender, request.update)
            self._save()
            return await self._coordinator.report(request)
        handler = self._handlers.get(type(request))
        if handler is None:
            raise RefusedError(Reason.BAD_REQUEST, f"no {request.kind} here")
        reply = handler(request)
        self._save()
        return reply, ()

    def _save(self) -> None:
        """Put on the disk what was promised. Raises RefusedError BUSY where that fails for now."""
        if self._registry.changed and self._state is not None:
            try:
                self._registry.save(self._state)
            except OSError as error:
                log.error("cannot write to %s: %s", self._state, error.strerror)
                raise RefusedError(Reason.BUSY, "cannot save the registry") from None

    def _enrol(self, request: Enrol) -> Reply:
        if not request.sender:
            raise RefusedError(Reason.BAD_REQUEST, "a peer must say its id")
        index = self._registry.enrol(request.sender, request.index, self._clock())
        return Enrolled(index=index, toml=self._toml)

    def _announce(self, request: Announce) -> Reply:
        self._note(request.sender, request.update)
        return self._known(to=request.sender)

    def _note(self, sender: str, said: Update) -> None:
        """Take in what a peer says of itself. Raises RefusedError."""
        record = said.record
        self._check_own(sender, said)
        self._registry.announce(record, self._clock())
        update = said.model_copy(update={"state": State.ALIVE})
        before = self.guests.get(record.index)
        if before is not None and before.update.record.peer != record.peer:
            before = None
        self.guests[record.index] = Guest(update, self._clock())
        if before is None or not before.present:
            self._tell("joined" if before is None else "returned", record.index)
        if update.status.done and not (before is not None and before.update.status.done):
            self._tell("finished", record.index)

    def _members(self, request: Members) -> Reply:
        return self._known(to=request.sender)

    def _ping(self, _: Ping) -> Reply:
        return Pong(updates=())

    def _leave(self, request: Leave) -> Reply:
        self._check_own(request.sender, request.update)
        index = request.update.record.index
        guest = self.guests.get(index)
        if guest is not None and guest.update.record.peer == request.sender:
            update = request.update.model_copy(update={"state": State.LEFT})
            self.guests[index] = Guest(update, self._clock())
            self._tell("left", index)
        return Done()

    def _check_own(self, sender: str, update: Update) -> None:
        if update.record.peer != sender:
            raise RefusedError(Reason.BAD_REQUEST, "the update must be the sender's own")
        if forgery := self._forgery(update):
            raise RefusedError(Reason.BAD_REQUEST, forgery)
        if update.status.reached > self.plan.rounds:
            raise RefusedError(Reason.BAD_REQUEST, f"the plan has {self.plan.rounds} rounds")

    def _known(self, *, to: str) -> Known:
        """Return who is present, but for the receiver; where all do not fit, the next few."""
        present = [
            guest.update
            for _, guest in sorted(self.guests.items())
            if guest.present and guest.update.record.peer != to
        ]
        start = self._turn % max(1, len(present))
        chosen = fitting([*present[start:], *present[:start]])
        if len(chosen) < len(present):
            self._turn += len(chosen)
        return Known(updates=chosen)

    def _tell(self, what: str, index: int) -> None:
        self._told[index] += 1
        if self._told[index] > MAX_TOLD:
            return
        if self._told[index] == MAX_TOLD:
            what += " (the last line about it)"
        status = self.guests[index].update.status
        present = sum(guest.present for guest in self.guests.values())
        log.info(
            "peer %d %s in round %d: %d of %d present",
            index,
            what,
            status.finished,
            present,
            self.plan.n,
        )
