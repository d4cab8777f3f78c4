"""Who has which index where nobody hands them out: claims, as a pure state machine.

Every peer has one register that it alone writes and all others read (a retained message of a
broker). In it stands its claim: an index, and whether it is held for good. The rule is that of
Fischer's mutual exclusion (in Lamport, "A fast mutual exclusion algorithm", ACM TOCS 1987, section
2), an index being the critical section: look who claims what, claim what nobody claims, wait, and
hold it if nobody else has claimed it meanwhile. Of several who have, the one of the smallest id
stays. While what is written reaches all others within `SETTLE` / 2 seconds, no two ever hold the
same index, since whoever claims later has seen the earlier claim by then.

A slower broker can break that. Then two hold one index, and the peers that they meet refuse one of
them: its index is held (`peer.network.membership`), and that peer ends with an error.

Claims are renewed. One that was not for `VOID_AFTER` seconds of the reader's own clock is void, so
that the index of a peer that is gone for good is given away, once there is no other. No clock of a
writer counts: what it wrote is put in order by its lives and what it had written in each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

SETTLE = 2.0
"""Seconds from reading to claiming, and from claiming to holding: twice what a broker takes."""
VOID_AFTER = 90.0
"""Seconds without renewal after which a claim counts no more."""


@dataclass(frozen=True)
class Claim:
    """What a peer claims: an index, for good if `held`; an applicant has not chosen one yet."""

    index: int | None = None
    held: bool = False


class Stamp(NamedTuple):
    """What puts the writings of one peer in order: its incarnation, and how many went before in
    that life."""

    incarnation: int
    number: int


@dataclass
class _Rival:
    """Another's claim; `stamp` is the writer's, `renewed` the reader's time of the newest one."""

    claim: Claim
    stamp: Stamp
    renewed: float
    renewals: int = 0

    def void(self, now: float) -> bool:
        """Whether it counts no more."""
        return now >= self.renewed + VOID_AFTER


class Claims:
    """One peer's way to an index of its own.

    The driver writes `claim` to the peer's register whenever `tick` says that it changed, and tells
    what it reads in those of others (`hear`). `lost_sight` says that the others' registers could
    not be read for a while.

    Args:
        own: id of this peer. n: number of indices.
        wanted: an index to claim at once. strict: whether no other will do. settled: whether the
            peer holds it from earlier.
        now: monotonic seconds, as in all methods.
    """

    def __init__(
        self,
        own: str,
        *,
        n: int,
        wanted: int | None,
        strict: bool = False,
        settled: bool = False,
        now: float,
    ) -> None:
        self.claim = Claim(wanted, held=settled)
        self._own = own
        self._n = n
        self._wanted = wanted
        self._choices = [wanted] if strict and wanted is not None else range(n)
        self._since = now
        self._rivals: dict[str, _Rival] = {}

    @property
    def held(self) -> int | None:
        """The index that this peer holds, None as long as it holds none."""
        return self.claim.index if self.claim.held else None

    def hear(self, peer: str, claim: Claim, stamp: Stamp, now: float) -> None:
        """Take in what stands in the register of another; an older stamp changes nothing.

        Of more than 4 n peers no more are remembered: who invents peers cannot fill the memory.
        """
        known = self._rivals.get(peer)
        if peer == self._own or (known is not None and stamp <= known.stamp):
            return
        if known is not None:
            self._rivals[peer] = _Rival(claim, stamp, now, known.renewals + 1)
        elif len(self._rivals) < 4 * self._n:
            self._rivals[peer] = _Rival(claim, stamp, now)

    def forget(self, peer: str) -> None:
        """Note that the register of another was emptied."""
        self._rivals.pop(peer, None)

    def lost_sight(self, now: float) -> None:
        """Begin the wait anew: claims made meanwhile may not have been read."""
        self._since = now

    def tick(self, now: float) -> bool:
        """Take the next step that is due; return whether `claim` has changed."""
        if self.claim.held:
            return False
        before = self.claim
        if before.index is not None and self._beaten(before.index, now):
            self.claim = Claim(self._choose(now))
        elif now >= self._since + SETTLE:
            if before.index is None:
                self.claim = Claim(self._choose(now))
            else:
                self.claim = replace(before, held=True)
        if self.claim != before:
            self._since = now
        return self.claim != before

    def holder(self, index: int, now: float) -> str | None:
        """Return who else claims an index (who holds it, else the smallest id), None if nobody."""
        rivals = [
            (not rival.claim.held, peer)
            for peer, rival in self._rivals.items()
            if rival.claim.index == index and not rival.void(now)
        ]
        return min(rivals)[1] if rivals else None

    def hopeless(self, now: float) -> bool:
        """Return whether all indices that would do are held by others who have renewed their claims
        since they were first read, and so are there."""
        alive = {
            rival.claim.index
            for rival in self._rivals.values()
            if rival.claim.held and rival.renewals and not rival.void(now)
        }
        return all(index in alive for index in self._choices)

    def _beaten(self, index: int, now: float) -> bool:
        """Whether another has the better claim to the index that this peer claims."""
        holder = self.holder(index, now)
        return holder is not None and (self._rivals[holder].claim.held or holder < self._own)

    def _choose(self, now: float) -> int | None:
        """Return a free index to claim, None where there is none.

        [choice] Applicants take the free indices in the order of their ids: those who start
        together and see each other do not get into each other's way.
        """
        free = self._free(now)
        if self._wanted in free:
            return self._wanted
        ahead = sum(
            rival.claim.index is None and peer < self._own and not rival.void(now)
            for peer, rival in self._rivals.items()
        )
        return free[ahead % len(free)] if free else None

    def _free(self, now: float) -> list[int]:
        """Return the indices that no other has ever claimed, else those whose claims are void."""
        rivals = self._rivals.values()
        ever = {rival.claim.index for rival in rivals}
        still = {rival.claim.index for rival in rivals if not rival.void(now)}
        free = [index for index in self._choices if index not in ever]
        return free or [index for index in self._choices if index not in still]
