"""Membership at work: pings, rendezvous, and the answers to both, over a `Transport`.

Three kinds of loops run for as long as the peer does. One drives the failure detector. One for each
bootstrap node announces this peer there, forever: peers that never heard of each other meet at it.
One seeks: it exchanges all it knows with a random living peer, and with a random one of those that
were given, remembered or declared dead, without which two halves of a partition, each of which has
buried the other, would never meet again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from peer.errors import (
    NotAdmittedError,
    ProtocolError,
    RefusedError,
    UnreachableError,
    UserError,
)
from peer.network.address import deserted, dial_address, parse_address
from peer.network.conduct import Conduct
from peer.network.membership import Change, Membership
from peer.network.messages import (
    Announce,
    Done,
    Enrol,
    Enrolled,
    Known,
    Leave,
    Members,
    PeerRecord,
    Ping,
    PingRequest,
    Pong,
    Reason,
    Reply,
    Request,
    State,
    Status,
    Update,
    fitting,
)
from peer.network.score import Offence
from peer.network.traffic import Fault
from peer.network.transport import Buffer, Transport
from peer.plan import NetworkPlan

if TYPE_CHECKING:
    import numpy as np

    from peer.network.federation import Credentials

log = logging.getLogger(__name__)

GOSSIP = 10
"""Updates that ride on a ping."""
RENDEZVOUS_TIMEOUT = 3.0
"""Seconds that a bootstrap node or a sought peer has to answer."""
QUICK = 1.0
"""Seconds between rendezvous while others are still turning up."""
STEADY = 5.0
"""Seconds between rendezvous otherwise."""
SLOWEST = 60.0
"""Seconds that the growing pauses between failures end at."""
GROWTH = 1.6
SEEK_AT_ONCE = 4
"""Addresses tried at a time while nobody is known."""
CLASH_PATIENCE = 30.0
"""Seconds for which a new peer's index may be held by another, which may be about to be declared
dead: that of a peer which was started anew without its state."""
FULL_PATIENCE = 90.0
"""Seconds to wait for a place in a full federation; a bootstrap node keeps a lost one for less."""
FAREWELLS = 64
"""Peers that are told of a departure at most; gossip tells the others."""

_NOT_ADMITTED = (
    "%s not admit this peer: its key was revoked, or it has another federation file than they; "
    "trying on"
)

_LEVELS = {
    Change.DEAD: logging.WARNING,
    # A rumour of a departure is a suspicion until the peer itself is heard or asked.
    Change.SUSPECTED: logging.DEBUG,
    Change.REFUTED: logging.DEBUG,
}
_BREAKS = (Change.DEAD, Change.LEFT, Change.MOVED, Change.RESTARTED, Change.EXPELLED)
"""Changes after which nothing comes any more by the connections there are."""
_MISFITS = {
    Reason.PLAN_MISMATCH: "follows another plan",
    Reason.MODEL_MISMATCH: "has another model, or the same with other initial weights",
    Reason.INDEX_CLASH: "knows another peer by this peer's index",
    Reason.INDEX_HELD: "has this peer's index itself",
}


class Swarm:
    """The federation as one peer sees it, kept up to date by `run`.

    Args:
        transport: of this peer; its messages are stamped with this peer's id and plan from now on.
        plan_digest: digest of the plan; messages of another are refused.
        own: this peer's record.
        n: number of peers of the plan. rounds: of the plan. settings: its numbers for the network.
        bootstrap, peers: addresses as people write them. remembered: records of an earlier run.
        credentials: in a federation with keys, the same as the transport's.
        rng: of probe order, helpers, jitter. reach: see Membership. clock: monotonic seconds.

    Raises UserError when an address cannot be dialled.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        plan_digest: str,
        own: PeerRecord,
        n: int,
        rounds: int,
        settings: NetworkPlan,
        bootstrap: Sequence[str] = (),
        peers: Sequence[str] = (),
        remembered: Sequence[PeerRecord] = (),
        credentials: Credentials | None = None,
        rng: np.random.Generator,
        reach: frozenset[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        parse_address(own.control)
        self._transport = transport
        self._plan = plan_digest
        self._bootstrap = [dial_address(address) for address in bootstrap]
        self._given = {dial_address(address) for address in peers}
        self._remembered = {record.index: record.control for record in remembered}
        self._settings = settings
        self._rng = rng
        self._clock = clock
        self._membership = Membership(
            own,
            settings=settings,
            n=n,
            rounds=rounds,
            rng=rng,
            now=clock(),
            credentials=credentials,
            reach=reach,
        )
        self._conduct = Conduct(transport, settings.ban_score, clock)
        self._credentials = credentials
        self._joined = False
        self._clash_since: float | None = None
        self._seen = self._membership.version
        self._changed = asyncio.Event()
        transport.introduce(sender=own.peer, plan=plan_digest)

    # What the owner asks and tells.

    @property
    def own(self) -> Update:
        """What this peer says of itself."""
        return self._membership.own

    def known(self, t: int) -> list[int]:
        """Return the sorted indices of the others that take part in round `t`: alive or suspect."""
        return self._membership.known(t)

    def trusted(self, t: int) -> list[int]:
        """Return `known` but for those that are left out of exchanges, because of offences."""
        left_out = self.left_out()
        return [index for index in self.known(t) if index not in left_out]

    def left_out(self) -> list[int]:
        """Return the sorted indices of those that are left out of exchanges now."""
        return [m.record.index for m in self.members() if self._conduct.left_out(m.record)]

    def member(self, index: int) -> Update | None:
        """Return what is believed of the peer of an index, None when it was never heard of."""
        return self._membership.member(index)

    def members(self) -> list[Update]:
        """Return what is believed of all others, the dead and departed included, by index."""
        return self._membership.members()

    def index_of(self, who: str) -> int | None:
        """Return the index of a peer by its id or one of its addresses, None if it is unknown."""
        for update in self._membership.members():
            record = update.record
            if who in (record.peer, record.control, record.data):
                return record.index
        return None

    async def changed(self, timeout: float) -> None:  # noqa: ASYNC109 - a time-out is no error here
        """Wait until the membership or anyone's status changes, for at most `timeout` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait()

    def set_status(self, status: Status) -> None:
        """Say how far this peer is; the others hear it with the next messages."""
        self._membership.set_status(status)

    def set_first_round(self, t: int) -> None:
        """Say from which round this peer takes part."""
        self._membership.set_first_round(t)

    def note_status(self, index: int, status: Status) -> None:
        """Take in how far a peer itself said it is."""
        self._membership.note_status(index, status)
        self._notify()

    def hear(
        self, updates: Sequence[Update], teller: str, *, liable: PeerRecord | None = None
    ) -> None:
        """Take in what somebody believes of others, as a rumour.

        What no honest peer passes on is held against whom it surely came from, if that is known:
        the `liable`.
        """
        self._hold_fabrication(updates, liable)
        self._note_lies(self._membership.hear(updates, self._clock()), teller)
        self._joined = self._joined or bool(self._membership.living())
        self._notify()

    def unreachable(self, index: int) -> None:
        """Report that a request to a peer failed: it is probed next."""
        self._membership.unreachable(index)

    def misbehaved(self, index: int, detail: str, offence: Offence | None = None) -> None:
        """Report that a peer answered what it should not: counted, and logged once.

        An `offence` is held against it: too many, and it is left out of exchanges for a while.
        """
        member = self.member(index)
        if member is not None:
            self._conduct.misbehaved(member.record, detail, offence)

    def overdue(self, index: int, detail: str) -> None:
        """Report that a peer lives but does not deliver: counted, and logged once."""
        self._transport.blame(Fault.OVERDUE, ("overdue", index), f"peer {index} {detail}")

    async def run(self) -> None:
        """Keep the membership; never returns.

        Raises UserError when this peer does not fit the federation that it tries to join: plan,
        model or index. Once it has joined, such refusals are only counted and logged: one odd peer
        must not end the others.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._detect(tasks), name="detect-failures")
                tasks.create_task(self._seek(), name="seek-peers")
                for address in self._bootstrap:
                    tasks.create_task(self._announce(address), name=f"announce-{address}")
        except BaseExceptionGroup as group:
            for error in group.exceptions:
                if isinstance(error, UserError):
                    raise error from None
            raise

    async def leave(self) -> None:
        """Tell the others that this peer goes on purpose; takes a second at most."""
        self._membership.leave()
        message = Leave(update=self.own)
        living = [record.control for record in self._membership.living()]
        addresses = self._draw(living, FAREWELLS) + self._bootstrap
        await asyncio.gather(
            *(self._transport.request(address, message, timeout=1.0) for address in addresses),
            return_exceptions=True,
        )

    # What others ask.

    async def handle(self, request: Request) -> tuple[Reply, Sequence[Buffer]]:
        """Answer Ping, PingRequest, Members and Leave. Raises RefusedError."""
        if request.plan != self._plan:
            raise RefusedError(Reason.PLAN_MISMATCH, f"the plan here is {self._plan}")
        match request:
            case Ping():
                self._admit(request.sender, request.updates)
                return Pong(updates=self._membership.gossip(GOSSIP, to=request.sender)), ()
            case PingRequest():
                return await self._ping_for(request.target), ()
            case Members():
                return Known(updates=fitting(self._membership.everyone(to=request.sender))), ()
            case Leave():
                await self._see_off(request)
                return Done(), ()
        raise RefusedError(Reason.BAD_REQUEST, f"no {request.kind} here")

    def _admit(self, sender: str, updates: Sequence[Update]) -> None:
        """Take in what a peer says of itself (first) and of others. Raises RefusedError."""
        if not updates or updates[0].record.peer != sender:
            raise RefusedError(Reason.BAD_REQUEST, "the first update must be the sender's own")
        record = updates[0].record
        objection = self._membership.objection(record)
        if objection is not None and sender != self.own.record.peer:
            # The holder of the index may be gone without anyone having noticed yet.
            self._membership.unreachable(record.index)
            if objection is Reason.INDEX_CLASH and record.index == self.own.record.index:
                objection = Reason.INDEX_HELD
            raise RefusedError(objection, f"index {record.index}, model {record.model}")
        self.hear(updates, sender, liable=record if self._transport.proves_senders else None)

    async def _see_off(self, request: Leave) -> None:
        """Ask a peer that is said to leave whether it does: it still answers while it says goodbye.

        Raises RefusedError when the request speaks for another.
        """
        if request.update.record.peer != request.sender:
            raise RefusedError(Reason.BAD_REQUEST, "the update must be the sender's own")
        for record in self._membership.living():
            if record.peer != request.sender:
                continue
            if not await self._answers(record):
                self._membership.unreachable(record.index)
            elif self._membership.is_present(request.sender):
                raise RefusedError(Reason.BAD_REQUEST, "it has not left")

    async def _ping_for(self, target: str) -> Pong:
        """Ping a member for another. Raises RefusedError when it is unknown or does not answer."""
        if all(member.record.control != target for member in self.members()):
            raise RefusedError(Reason.UNREACHABLE, "not known here")
        try:
            return await self._ping(target, (self.own,), self._settings.probe_timeout)
        except (UnreachableError, ProtocolError):
            raise RefusedError(Reason.UNREACHABLE) from None

    # The failure detector.

    async def _detect(self, tasks: asyncio.TaskGroup) -> None:
        checked = 0
        while True:
            if self._credentials is not None and self._credentials.version != checked:
                checked = self._credentials.version
                self._membership.expel()
            for target in self._membership.tick(self._clock()):
                tasks.create_task(self._probe(target), name=f"probe-{target.index}")
            self._notify()
            await asyncio.sleep(self._membership.tick_interval)

    async def _probe(self, target: PeerRecord) -> None:
        """Ping a member, itself and then through others, and report what came of it."""
        membership = self._membership
        if await self._answers(target):
            membership.ping_ok(target.peer)
            return
        if membership.rumoured_elsewhere(target.peer) and await deserted(
            target.control, self._settings.probe_timeout
        ):
            membership.vacated(target.peer, self._clock())
            self._notify()
            return
        helpers = membership.ping_failed(target.peer, self._clock())
        if not helpers:
            self._notify()
            return
        heard = await asyncio.gather(*(self._ask_helper(helper, target) for helper in helpers))
        if any(heard):
            membership.ping_ok(target.peer)
        else:
            answered = any(answer is not None for answer in heard)
            membership.helpers_failed(target.peer, self._clock(), answered=answered)
        self._notify()

    async def _answers(self, target: PeerRecord) -> bool:
        updates = self._membership.gossip(GOSSIP, to=target.peer)
        try:
            pong = await self._ping(target.control, updates, self._membership.probe_timeout)
        except RefusedError as refusal:
            return refusal.reason in (Reason.BUSY, Reason.NOT_YET)
        except ProtocolError as error:
            self._conduct.misbehaved(target, str(error), Offence.MALFORMED)
            return False
        except UnreachableError:
            return False
        # Another peer may have got the address of one that is gone.
        return pong.updates[0].record.peer == target.peer

    async def _ask_helper(self, helper: PeerRecord, target: PeerRecord) -> bool | None:
        """Return whether a helper heard the target; None when the helper did not answer itself."""
        patience = self._settings.probe_timeout + self._membership.probe_timeout
        try:
            pong, _ = await self._transport.request(
                helper.control, PingRequest(target=target.control), timeout=patience
            )
        except RefusedError:
            return False
        except ProtocolError as error:
            # No offence: what is wrong may be the target's, as the helper passed it on.
            self._conduct.misbehaved(helper, str(error))
            return None
        except UnreachableError:
            return None
        if not isinstance(pong, Pong) or not pong.updates:
            return None
        if pong.updates[0].record.peer != target.peer:
            return False
        self.hear(pong.updates, helper.peer)
        return True

    async def _ping(self, address: str, updates: Sequence[Update], patience: float) -> Pong:
        """Ping an address, take in what comes back, and return it, its sender's own update first.

        Raises UnreachableError, RefusedError or ProtocolError.
        """
        pong, _ = await self._transport.request(
            address, Ping(updates=tuple(updates)), timeout=patience
        )
        if not isinstance(pong, Pong) or not pong.updates or pong.plan != self._plan:
            raise ProtocolError(f"{address} answers a ping by an empty or foreign pong")
        own, *others = pong.updates
        self._hold_fabrication(pong.updates, self._living_at(address))
        self._note_lies(self._membership.confirm(own, address, self._clock()), own.record.peer)
        self.hear(others, own.record.peer)
        return pong

    def _living_at(self, address: str) -> PeerRecord | None:
        """Return who answers at an address, as is believed."""
        return next((r for r in self._membership.living() if r.control == address), None)

    # Rendezvous.

    async def _announce(self, address: str) -> None:
        """Tell a bootstrap node how far this peer is, and hear whom it knows, again and again."""
        pause, present, lost = QUICK, 0, False
        while self.own.state is not State.LEFT:
            try:
                known, _ = await self._transport.request(
                    address, Announce(update=self.own), timeout=RENDEZVOUS_TIMEOUT
                )
            except (UnreachableError, ProtocolError) as error:
                if not lost:
                    level = (
                        logging.ERROR if isinstance(error, NotAdmittedError) else logging.WARNING
                    )
                    log.log(level, "bootstrap node %s lost (%s); trying on", address, error)
                lost, pause = True, min(SLOWEST, pause * GROWTH)
            except RefusedError as refusal:
                self._misfit(refusal, f"the bootstrap node {address}")
                pause = min(SLOWEST, pause * GROWTH)
            else:
                if isinstance(known, Known):
                    self._joined = True
                    self.hear(known.updates, address)
                if lost:
                    log.info("bootstrap node %s found again", address)
                before, present = present, len(self._membership.living())
                pause = STEADY if 0 < present == before else QUICK
                lost = False
            await self._sleep(pause)

    async def _seek(self) -> None:
        """Exchange views with the living, and look for those given, remembered or lost."""
        pause, told = QUICK, False
        while self.own.state is not State.LEFT:
            living = [record.control for record in self._membership.living()]
            # The membership forgets the dead; a partition may last for longer than that.
            self._remembered |= {m.record.index: m.record.control for m in self.members()}
            lost = {*self._remembered.values(), *self._given}
            lost -= {*living, self.own.record.control}
            chosen = self._draw(living, 1) + self._draw(sorted(lost), 1 if living else SEEK_AT_ONCE)
            admitted = await asyncio.gather(*(self._exchange_views(a) for a in chosen))
            if chosen and not living and not any(admitted) and not told:
                log.error(_NOT_ADMITTED, "those who are known do")
                told = True
            if living:
                pause, told = STEADY, False
            else:
                pause = QUICK if self._membership.living() else min(SLOWEST, pause * GROWTH)
            await self._sleep(pause)

    async def _exchange_views(self, address: str) -> bool:
        """Tell another peer all that is known here, and hear all that is known there.

        Returns whether it may admit this peer: unless it says that it does not.
        """
        holder = next((m.record.peer for m in self.members() if m.record.control == address), "")
        try:
            pong = await self._ping(
                address, fitting(self._membership.everyone(to=holder)), RENDEZVOUS_TIMEOUT
            )
            if pong.updates[0].record.peer == self.own.record.peer:
                self._given.discard(address)
                self._remembered = {i: a for i, a in self._remembered.items() if a != address}
                return True
            known, _ = await self._transport.request(address, Members(), timeout=RENDEZVOUS_TIMEOUT)
            if isinstance(known, Known):
                self.hear(known.updates, address, liable=self._living_at(address))
        except RefusedError as refusal:
            self._misfit(refusal, f"the peer at {address}", fatal=address in self._given)
        except ProtocolError as error:
            if (record := self._living_at(address)) is not None:
                self._conduct.misbehaved(record, str(error), Offence.MALFORMED)
            else:
                self._transport.blame(Fault.CONTENT, address, f"{address}: {error}")
        except NotAdmittedError:
            return False
        except UnreachableError:
            pass
        return True

    def _misfit(self, refusal: RefusedError, who: str, *, fatal: bool = True) -> None:
        """Judge a refusal to a peer that wants to join. Raises UserError when a person must act.

        It is not `fatal` from those whom no person named: one of them may be odd, or an enemy.
        """
        if refusal.reason not in _MISFITS:
            return
        complaint = f"{who} {_MISFITS[Reason(refusal.reason)]} ({refusal.detail})"
        if self._joined or not fatal:
            self._transport.blame(Fault.CONTENT, ("misfit", who), complaint)
            return
        if refusal.reason == Reason.INDEX_CLASH:
            if self._clash_since is None:
                self._clash_since = self._clock()
                log.warning("%s; waiting whether it is gone", complaint)
            if self._clock() - self._clash_since < CLASH_PATIENCE:
                return
        raise UserError(complaint, "plan, model and index must fit those of the federation")

    # Helpers of all.

    def _hold_fabrication(self, updates: Sequence[Update], liable: PeerRecord | None) -> None:
        """Hold what no honest peer says, of itself or of others, against whom it came from."""
        fabrications = filter(None, map(self._membership.fabrication, updates))
        if liable is not None and (lie := next(fabrications, "")):
            self._conduct.misbehaved(liable, lie, Offence.LIED)

    def _note_lies(self, lies: Sequence[str], teller: str) -> None:
        for lie in lies:
            self._transport.blame(Fault.CONTENT, ("teller", teller), f"{teller}: {lie}")

    def _notify(self) -> None:
        """Log what happened, and wake those who wait for a change."""
        for change, record in self._membership.drain_events():
            level = _LEVELS.get(change, logging.INFO)
            log.log(level, "peer %d %s", record.index, change)
            # Whoever waits for an answer from there waits in vain.
            if change in _BREAKS:
                self._transport.forget(record.control)
                self._transport.forget(record.data)
        if self._membership.version != self._seen:
            self._seen = self._membership.version
            self._changed.set()
            self._changed = asyncio.Event()

    def _draw(self, addresses: Sequence[str], size: int) -> list[str]:
        chosen = self._rng.permutation(len(addresses))[:size]
        return [addresses[int(i)] for i in chosen]

    async def _sleep(self, pause: float) -> None:
        """Sleep about `pause` seconds, jittered so that peers do not march in step."""
        await asyncio.sleep(pause * float(self._rng.uniform(0.5, 1.5)))


async def enrol(
    transport: Transport,
    bootstraps: Sequence[str],
    *,
    index: int | None,
    peer_id: str,
    patience: float | None = None,
) -> Enrolled | None:
    """Get the plan and an index (`index`, if it can be had) from any of the bootstrap nodes.

    Asks them in turn until one answers; None when none did in `patience` seconds. Raises UserError
    when an address cannot be dialled or a bootstrap node refuses for good.
    """
    addresses = [dial_address(address) for address in bootstraps]
    transport.introduce(sender=peer_id, plan="")
    loop = asyncio.get_running_loop()
    started, pause, told, excluded = loop.time(), 0.2, "", False
    while True:
        admitted = len(addresses)
        for address in addresses:
            try:
                reply, _ = await transport.request(
                    address, Enrol(index=index), timeout=RENDEZVOUS_TIMEOUT
                )
            except RefusedError as refusal:
                full = refusal.reason == Reason.FULL
                if refusal.reason not in (Reason.BUSY, Reason.NOT_YET) and (
                    not full or loop.time() - started > FULL_PATIENCE
                ):
                    raise UserError(f"the bootstrap node {address} refuses: {refusal}") from None
                trouble = f"the bootstrap node {address} has no place yet: {refusal}"
            except (UnreachableError, ProtocolError) as error:
                admitted -= isinstance(error, NotAdmittedError)
                trouble = f"no bootstrap node yet: {error}"
            else:
                assert isinstance(reply, Enrolled)
                return reply
            if not told:
                log.info("%s; trying on", trouble)
                told = trouble
        if not admitted and not excluded:
            log.error(_NOT_ADMITTED, f"{', '.join(addresses)} does")
            excluded = True
        if patience is not None and loop.time() - started > patience:
            return None
        await asyncio.sleep(pause)
        pause = min(5.0, pause * GROWTH)
