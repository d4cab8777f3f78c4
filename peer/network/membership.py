"""Who is there: SWIM's membership as a pure state machine, with the time passed in.

Das, Gupta and Motivala, "SWIM" (DSN 2002): each peer pings one other at a time in a shuffled
round-robin (section 4.3); who does not answer is asked for through `HELPERS` others, then
suspected (section 4.2), and declared dead unless it refutes in time by raising its incarnation
number. What is news rides on pings, the least often sent first, each O(log n) times (section 4.1).
Dadgar, Phillips and Currey, "Lifeguard" (DSN-W 2018): a peer that has reason to doubt itself
probes more slowly.

The driver (`peer.network.swarm`) calls `tick` every `tick_interval` seconds, pings whom it returns,
and reports `ping_ok` or `ping_failed`; the latter returns the helpers to ask, whose failure is
reported to `helpers_failed`. Nothing here waits, reads a clock or draws from any other generator
than the one given.

Rumours may lie: records are signed only in federations with keys, and beliefs never are. What they
say of one that is present is therefore never more than a reason to ask it, at the address where it
was believed to be, and what it answers there (`confirm`) counts for more than any rumour: nobody is
moved, buried or sent away by others' words.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from peer.network.messages import PeerRecord, Reason, State, Status, Update
from peer.plan import NetworkPlan

if TYPE_CHECKING:
    import numpy as np

    from peer.network.federation import Credentials

HELPERS = 3
"""Others that are asked to ping who did not answer."""
MAX_DOUBT = 8
"""Bound of the local health score; probing slows down by a factor of up to 1 + MAX_DOUBT."""
RETRANSMISSIONS = 3
"""A piece of news is sent about RETRANSMISSIONS log2(n) times by each peer that hears it."""
FORGET_AFTER = 3600.0
"""Seconds for which the dead are kept: old gossip must not revive them, and they are sought."""
MAX_INCARNATION = 2**52
"""Above it lies what no honest peer reaches."""
LEAP = 2**20
"""Incarnations, which count seconds, that a peer can have gone through since it was last heard of.
More is a lie, told so that it could not be refuted."""
STRIDE = LEAP // 256
"""Incarnations that a restart goes on by at most, wherever its clock stands: others who have heard
nothing of 255 lives between must still believe the next."""

_RANK = {State.ALIVE: 0, State.SUSPECT: 1, State.DEAD: 2, State.LEFT: 3}
_PRESENT = (State.ALIVE, State.SUSPECT)


class Change(StrEnum):
    """What happened to a peer, as one peer sees it."""

    JOINED = "joined"
    SUSPECTED = "suspected"
    REFUTED = "refuted"
    DEAD = "dead"
    LEFT = "left"
    RETURNED = "returned"
    MOVED = "moved"
    RESTARTED = "restarted"
    EXPELLED = "expelled"


class Event(NamedTuple):
    """A change and whom it concerns; with MOVED the record from before, with the old addresses."""

    change: Change
    record: PeerRecord


@dataclass
class _Member:
    """What is believed of one peer; `deadline` ends a suspicion, or how long the dead are kept;
    `sent` counts how often this news was passed on; `claim` is a record that rumour gives it
    instead of its own; `restarted` says that it seems to have begun a new life."""

    update: Update
    deadline: float = math.inf
    sent: int = 0
    claim: PeerRecord | None = None
    restarted: bool = False

    @property
    def present(self) -> bool:
        return self.update.state in _PRESENT


class Membership:
    """One peer's view of the federation.

    At most one peer holds an index: while the holder is alive or suspect, another that claims its
    index is ignored; a dead or departed holder is replaced. Records of another model are ignored,
    and so is whoever claims more than the plan's `rounds`, or is none of those that this peer can
    `reach`, where an experiment says which. With `credentials` this peer's record is signed,
    and one that is not what a member says of itself is ignored.
    """

    def __init__(
        self,
        own: PeerRecord,
        *,
        settings: NetworkPlan,
        n: int,
        rounds: int,
        rng: np.random.Generator,
        now: float,
        reach: frozenset[int] | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self._credentials = credentials
        self.own = Update(record=self._signed(own), state=State.ALIVE, status=Status())
        self.version = 0
        """Grows with every change of what is believed of anyone."""
        self._settings = settings
        self._n = n
        self._rounds = rounds
        self._rng = rng
        self._reach = reach
        self._members: dict[int, _Member] = {}
        self._index: dict[str, int] = {}
        self._displaced: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._events: list[Event] = []
        self._doubt = 0
        self._order: list[int] = []
        self._urgent: OrderedDict[str, None] = OrderedDict()
        self._probing: dict[str, float] = {}
        self._next_probe = now
        self._ticked = now
        self._unblocked = -math.inf

    # What is known.

    def known(self, t: int) -> list[int]:
        """Return the sorted indices of the others that take part in round `t`: alive or suspect."""
        return sorted(
            index
            for index, member in self._members.items()
            if member.present and member.update.record.first_round <= t
        )

    def member(self, index: int) -> Update | None:
        """Return what is believed of the peer of an index, None when it was never heard of."""
        member = self._members.get(index)
        return None if member is None else member.update

    def is_present(self, peer: str) -> bool:
        """Return whether the peer of an id is believed to be there: alive or suspect."""
        return peer in self._index and self._members[self._index[peer]].present

    def living(self) -> list[PeerRecord]:
        """Return the records of all others that are alive or suspect, by index."""
        return [
            self._members[index].update.record
            for index in sorted(self._members)
            if self._members[index].present
        ]

    def members(self) -> list[Update]:
        """Return what is believed of all others, the dead and departed included, by index."""
        return [self._members[index].update for index in sorted(self._members)]

    def drain_events(self) -> list[Event]:
        """Return what happened since the last call."""
        events, self._events = self._events, []
        return events

    # What is heard.

    def objection(self, record: PeerRecord) -> Reason | None:
        """Return why `record` cannot be a member, None when it can."""
        if record.model != self.own.record.model:
            return Reason.MODEL_MISMATCH
        if record.index >= self._n:
            return Reason.INDEX_CLASH
        holder = self._members.get(record.index)
        taken = holder is not None and holder.present
        rival = holder.update.record.peer if holder is not None and taken else record.peer
        if record.index == self.own.record.index:
            rival = self.own.record.peer
        return None if rival == record.peer else Reason.INDEX_CLASH

    def hear(self, updates: Iterable[Update], now: float) -> list[str]:
        """Take in what another peer believes; what is older or of less weight changes nothing.

        Weight is (incarnation, state): a higher incarnation wins, then left, dead, suspect, alive.
        Suspicion or death of oneself is refuted by an incarnation above it. The rumoured death of
        one that is believed present only makes it a suspect: after a partition either side has
        buried the other, and all must get the time to refute. A rumour that it has left or is
        elsewhere only makes it be probed next. Returns what was not believed, for a log.
        """
        lies = []
        for update in updates:
            if not self._within_reach(update.record.index):
                continue
            if lie := self._lie(update):
                lies.append(lie)
            elif update.record.peer == self.own.record.peer:
                self._hear_of_self(update)
            else:
                self._hear_of_other(update, now)
        return lies

    def _within_reach(self, index: int) -> bool:
        return self._reach is None or index in self._reach or index == self.own.record.index

    def confirm(self, update: Update, address: str, now: float) -> list[str]:
        """Take in what a peer that was asked at `address` says of itself.

        Where it was believed to be, that is beyond any rumour. Returns what was, or turned out to
        be, untrue, for a log.
        """
        record = update.record
        # What is believed is passed on, and who passes on a fabrication offends.
        if lie := self._forgery(record) or self.fabrication(update):
            return [lie]
        index = self._index.get(record.peer)
        member = None if index is None else self._members[index]
        if member is None or member.update.record.control != address:
            return self.hear([update], now)
        if objection := self.objection(record):
            return [f"peer {record.index} says of itself: {objection}"]
        believed, claim = member.update, member.claim
        member.claim = None
        if (record, update.state) == (believed.record, believed.state):
            self._merge_status(member, update.status)
        else:
            self._install(update, now)
        current = self._members[record.index]
        if current.restarted:
            current.restarted = False
            self._events.append(Event(Change.RESTARTED, record))
        forged = claim is not None and not _same_but_newer(claim, record)
        if forged or record.incarnation < believed.record.incarnation:
            return [f"what was said of peer {believed.record.index} is not so"]
        return []

    def _lie(self, update: Update) -> str:
        """Return what about an update cannot be true; empty when it can."""
        record = update.record
        if lie := self._forgery(record) or self.fabrication(update):
            return lie
        if record.peer == self.own.record.peer:
            highest = self.own.record.incarnation + LEAP
        else:
            objection = self.objection(record)
            if objection is Reason.MODEL_MISMATCH or (objection and update.state in _PRESENT):
                return f"peer {record.index} is said to be {record.peer}: {objection}"
            member = self._members.get(self._index.get(record.peer, -1))
            highest = MAX_INCARNATION
            if member is not None:
                highest = member.update.record.incarnation + LEAP
        if record.incarnation > highest:
            return f"peer {record.index} is said to be of incarnation {record.incarnation}"
        return ""

    def fabrication(self, update: Update) -> str:
        """Return what about an update no honest peer believes, and so none passes on; empty where
        there is nothing: in what they know of others honest peers may differ."""
        record = update.record
        if self._credentials is not None and not self._credentials.is_signed(record):
            return f"record of peer {record.index}: not signed by it"
        if update.status.reached > self._rounds:
            return f"peer {record.index} is said to be beyond round {self._rounds}"
        return ""

    def _forgery(self, record: PeerRecord) -> str:
        """Return why a record cannot be what a member says of itself; empty when it can."""
        objection = "" if self._credentials is None else self._credentials.objection(record)
        return objection and f"record of peer {record.index}: {objection}"

    def expel(self) -> None:
        """Forget those who are members of the federation no more."""
        for index, member in list(self._members.items()):
            if self._forgery(member.update.record):
                del self._members[index], self._index[member.update.record.peer]
                self.version += 1
                self._events.append(Event(Change.EXPELLED, member.update.record))

    def note_status(self, index: int, status: Status) -> None:
        """Take in how far a peer itself says it is."""
        member = self._members.get(index)
        if member is not None:
            self._merge_status(member, status)

    def _hear_of_self(self, update: Update) -> None:
        own = self.own
        same = update.record == own.record and update.state is own.state
        # Nobody knows better how far this peer is.
        ahead = _progress(update.status) > _progress(own.status)
        if (same and not ahead) or _weight(update) < _weight(own):
            return
        if own.state is State.LEFT:
            return
        # Suspected, declared dead, forged, or a record of an earlier life of this peer.
        incarnation = max(own.record.incarnation, update.record.incarnation) + 1
        self._set_own(incarnation=incarnation)
        if update.state is not State.ALIVE:
            self._raise_doubt()
            self._events.append(Event(Change.REFUTED, self.own.record))

    def _hear_of_other(self, update: Update, now: float) -> None:
        if self.objection(update.record) is not None:
            return  # one that is gone, whose index another has by now
        record = update.record
        current = self._members.get(self._index.get(record.peer, -1))
        if current is None:
            if _weight(update) > self._displaced.get(record.peer, (-1, 0)):
                self._install(update, now)
            return
        believed = current.update
        if _weight(update) > _weight(believed):
            if current.present:
                same = _same_but_newer(believed.record, record)
                if not same or update.state is not State.ALIVE:
                    self._urgent[record.peer] = None
                if not same:
                    current.claim = record
                if not same or update.state is State.LEFT:
                    return
                if update.state is State.DEAD:
                    update = update.model_copy(update={"state": State.SUSPECT})
                if _weight(update) <= _weight(believed):
                    return
            if record.incarnation == believed.record.incarnation:
                update = update.model_copy(
                    update={"status": _later(believed.status, update.status)}
                )
            self._install(update, now)
        elif record.incarnation == believed.record.incarnation:
            self._merge_status(current, update.status)

    def _install(self, update: Update, now: float) -> None:
        """Put an update in its place: whoever held that is gone, wherever the peer was before."""
        record = update.record
        before = self._index.get(record.peer, record.index)
        if before != record.index:
            del self._members[before]
        holder = self._members.get(record.index)
        if holder is not None and holder.update.record.peer != record.peer:
            self._displace(holder.update)
        self._displaced.pop(record.peer, None)
        self._put(update, now)

    def _displace(self, old: Update) -> None:
        """Remember the weight of who lost its index, lest old gossip bring it back."""
        del self._index[old.record.peer]
        self._displaced[old.record.peer] = _weight(old)
        if len(self._displaced) > 2 * self._n:
            self._displaced.popitem(last=False)

    def _merge_status(self, member: _Member, status: Status) -> None:
        later = _later(member.update.status, status)
        if later is not member.update.status:
            member.update = member.update.model_copy(update={"status": later})
            member.sent = 0
            self.version += 1

    def _put(self, update: Update, now: float) -> None:
        """Believe `update` from now on, and note what that changes."""
        record = update.record
        before = self._members.get(record.index)
        same = before is not None and before.update.record.peer == record.peer
        old = before.update.state if before is not None and same else None
        member = _Member(update)
        if before is not None and same and _addresses(before.update) != _addresses(update):
            self._events.append(Event(Change.MOVED, before.update.record))
        elif before is not None and same and before.present:
            # In one life a peer only moves on.
            member.restarted = update.status.published < before.update.status.published
            if member.restarted:
                self._urgent[record.peer] = None
        match update.state:
            case State.SUSPECT:
                member.deadline = now + self.suspicion
            case State.DEAD | State.LEFT:
                member.deadline = now + FORGET_AFTER
        self._members[record.index] = member
        self._index[record.peer] = record.index
        self.version += 1
        change = _change(old, update.state)
        if change is not None:
            self._events.append(Event(change, record))

    # What this peer says of itself.

    def set_status(self, status: Status) -> None:
        """Say how far this peer is; travels with its next messages."""
        self.own = self.own.model_copy(update={"status": status})

    def set_first_round(self, t: int) -> None:
        """Say from which round this peer takes part."""
        self._set_own(incarnation=self.own.record.incarnation + 1, first_round=t)

    def leave(self) -> None:
        """Say that this peer goes on purpose."""
        self._set_own(incarnation=self.own.record.incarnation + 1)
        self.own = self.own.model_copy(update={"state": State.LEFT})

    def _set_own(self, **fields: int) -> None:
        record = self._signed(self.own.record.model_copy(update=fields))
        self.own = self.own.model_copy(update={"record": record})

    def _signed(self, record: PeerRecord) -> PeerRecord:
        return record if self._credentials is None else self._credentials.sign(record)

    # What is passed on.

    def gossip(self, limit: int, *, to: str = "") -> tuple[Update, ...]:
        """Return up to `limit` updates: this peer's own, what is believed of the receiver `to` (for
        it to refute), then the least often sent news."""
        updates = [self.own]
        receiver = self._members.get(self._index.get(to, -1))
        if receiver is not None:
            updates.append(receiver.update)
        budget = RETRANSMISSIONS * max(1, math.ceil(math.log2(len(self._members) + 2)))
        news = sorted(
            (m for m in self._members.values() if m.sent < budget and m is not receiver),
            key=lambda member: member.sent,
        )
        for member in news[: max(0, limit - len(updates))]:
            member.sent += 1
            updates.append(member.update)
        return tuple(updates[:limit])

    def everyone(self, *, to: str = "") -> list[Update]:
        """Return all updates: this peer's own, what is believed of the receiver `to`, the living
        in random order, then the rest in random order."""
        others = [self._members[int(i)] for i in self._rng.permutation(sorted(self._members))]
        others.sort(key=lambda member: (member.update.record.peer != to, not member.present))
        return [self.own, *(member.update for member in others)]

    # Failure detection.

    @property
    def tick_interval(self) -> float:
        """Seconds between two calls of `tick`."""
        return self._settings.probe_interval / 5

    @property
    def probe_timeout(self) -> float:
        """Seconds until a ping counts as failed: longer while this peer doubts itself."""
        return self._settings.probe_timeout * (1 + self._doubt)

    @property
    def suspicion(self) -> float:
        """Seconds that a suspect has to refute."""
        return self._settings.suspicion * max(1.0, math.log10(self._n))

    def tick(self, now: float) -> list[PeerRecord]:
        """Declare dead who did not refute in time, and return whom to ping now."""
        self._notice_blockage(now)
        self._ticked = now
        self._expire(now)
        due = [self._index[peer] for peer in self._urgent if peer in self._index]
        self._urgent.clear()
        if now >= self._next_probe:
            self._next_probe = now + self._settings.probe_interval * (1 + self._doubt)
            due += self._next_in_order()
        targets = []
        for index in dict.fromkeys(due):
            member = self._members[index]
            if member.present and member.update.record.peer not in self._probing:
                self._probing[member.update.record.peer] = now
                targets.append(member.update.record)
        return targets

    def rumoured_elsewhere(self, peer: str) -> bool:
        """Return whether a peer is said to have moved from where it is believed to be."""
        member = self._members.get(self._index.get(peer, -1))
        return member is not None and member.claim is not None

    def vacated(self, peer: str, now: float) -> None:
        """Note that nobody listens any more where a peer was: it is where rumour has it.

        [choice] It is not suspected first, since nobody is left there who could protest: a peer
        that was restarted at another port must not keep the others waiting.
        """
        member = self._members.get(self._index.get(peer, -1))
        self._probing.pop(peer, None)
        if member is None or member.claim is None or self.objection(member.claim) is not None:
            return
        self._install(Update(record=member.claim, state=State.ALIVE, status=Status()), now)

    def unreachable(self, index: int) -> None:
        """Note that a request to a peer failed: it is probed next, and not judged by this alone."""
        member = self._members.get(index)
        if member is not None and member.present:
            self._urgent[member.update.record.peer] = None

    def ping_ok(self, peer: str) -> None:
        """Note that a pinged peer answered, or a helper heard it answer."""
        self._probing.pop(peer, None)
        self._doubt = max(0, self._doubt - 1)

    def ping_failed(self, peer: str, now: float) -> list[PeerRecord]:
        """Note that a pinged peer did not answer; return the helpers to ask.

        Without any helper the peer is suspected at once.
        """
        if self._excused(peer, now):
            return []
        helpers = [
            member.update.record
            for index, member in sorted(self._members.items())
            if member.update.state is State.ALIVE and index != self._index.get(peer)
        ]
        if not helpers:
            self._suspect(peer, now)
            return []
        chosen = self._rng.permutation(len(helpers))[:HELPERS]
        return [helpers[int(i)] for i in chosen]

    def helpers_failed(self, peer: str, now: float, *, answered: bool) -> None:
        """Note that no helper heard the peer; `answered` says whether any helper answered at all.

        If none did, the fault may be this peer's own (Lifeguard's missed nacks).
        """
        if self._excused(peer, now):
            return
        if not answered:
            self._raise_doubt()
        self._suspect(peer, now)

    def _excused(self, peer: str, now: float) -> bool:
        """Return whether a failed probe means nothing, because this peer was blocked meanwhile."""
        self._notice_blockage(now)
        started = self._probing.get(peer)
        if started is not None and started >= self._unblocked:
            return False
        self._probing.pop(peer, None)
        self._urgent[peer] = None
        return True

    def _notice_blockage(self, now: float) -> None:
        """Blame nobody for the time that this peer itself did not run."""
        blocked = now - self._ticked - self.tick_interval
        if blocked <= max(self.tick_interval, self._settings.probe_timeout / 2):
            return
        self._ticked = self._unblocked = now
        self._raise_doubt()
        for member in self._members.values():
            if member.update.state is State.SUSPECT:
                member.deadline += blocked

    def _expire(self, now: float) -> None:
        for index, member in list(self._members.items()):
            if member.deadline > now:
                continue
            if member.update.state is State.SUSPECT:
                self._put(member.update.model_copy(update={"state": State.DEAD}), now)
            else:
                del self._members[index], self._index[member.update.record.peer]

    def _next_in_order(self) -> list[int]:
        """Return the next index of the round-robin, shuffled anew each time around; or nothing."""
        for _ in range(2):
            while self._order:
                index = self._order.pop()
                member = self._members.get(index)
                if member is not None and member.present:
                    return [index]
            present = [index for index in sorted(self._members) if self._members[index].present]
            self._order = [int(index) for index in self._rng.permutation(present)]
        return []

    def _suspect(self, peer: str, now: float) -> None:
        self._probing.pop(peer, None)
        member = self._members.get(self._index.get(peer, -1))
        if member is not None and member.update.state is State.ALIVE:
            self._put(member.update.model_copy(update={"state": State.SUSPECT}), now)

    def _raise_doubt(self) -> None:
        self._doubt = min(MAX_DOUBT, self._doubt + 1)


def _same_but_newer(old: PeerRecord, new: PeerRecord) -> bool:
    return old == new.model_copy(update={"incarnation": old.incarnation, "proof": old.proof})


def _addresses(update: Update) -> tuple[str, str]:
    return update.record.control, update.record.data


def _weight(update: Update) -> tuple[int, int]:
    return update.record.incarnation, _RANK[update.state]


def _later(old: Status, new: Status) -> Status:
    """Return the status that is further: within an incarnation a peer only moves on."""

    return new if _progress(new) > _progress(old) else old


def _progress(status: Status) -> tuple[int, int, bool]:
    return status.finished, status.published, status.done


def _change(old: State | None, new: State) -> Change | None:
    """Return what a new belief amounts to; None where it is no news for a person."""
    if old is None:
        return Change.JOINED if new in _PRESENT else None
    if new is old:
        return None
    if new is State.ALIVE:
        return Change.REFUTED if old is State.SUSPECT else Change.RETURNED
    return {
        State.SUSPECT: Change.SUSPECTED,
        State.DEAD: Change.DEAD,
        State.LEFT: Change.LEFT,
    }[new]
