"""Who misbehaves is told to people, and has to stay outside for a while.

Offences are held against whoever surely committed them, and against nobody else. In a federation
with keys that is the id that a message's connection proves. Without, anyone can claim any id: what
is held against a peer is held against its id *at its addresses*, where it answered itself, so that
a liar that takes another's id earns no points for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from peer.network.messages import PeerRecord
from peer.network.score import Offence, Scores
from peer.network.traffic import Fault
from peer.network.transport import Transport


class Conduct:
    """What one node holds against others.

    Takes the offences of which its transport alone knows (`Transport.judge`), too.

    Args:
        transport: where faults are counted. limit: points from which a peer is left out. clock:
            monotonic seconds.
    """

    def __init__(
        self, transport: Transport, limit: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._transport = transport
        self._scores = Scores(limit)
        self._clock = clock
        transport.judge = self._offend

    def misbehaved(self, record: PeerRecord, detail: str, offence: Offence | None = None) -> None:
        """Report that a peer sent what it should not: counted, and logged once.

        An `offence` is held against it: too many, and it is left out for a while.
        """
        name = f"peer {record.index}"
        self._transport.blame(Fault.CONTENT, ("peer", record.peer), f"{name}: {detail}")
        if offence is not None:
            self._hold(self._culprit(record), name, detail, offence)

    def left_out(self, record: PeerRecord) -> bool:
        """Return whether a peer is to be left out now."""
        return self._scores.left_out(self._culprit(record), self._clock())

    def _culprit(self, record: PeerRecord) -> str:
        if self._transport.proves_senders:
            return record.peer
        return f"{record.peer} {record.control} {record.data}"

    def _offend(self, sender: str, detail: str) -> None:
        """Hold a malformed message against the proved id of its sender."""
        self._hold(sender, f"peer {sender}", detail, Offence.MALFORMED)

    def _hold(self, culprit: str, name: str, detail: str, offence: Offence) -> None:
        seconds = self._scores.offend(culprit, offence, self._clock())
        if seconds:
            told = f"{name} is left out of exchanges for {seconds:.0f} s: {detail}"
            self._transport.blame(Fault.LEFT_OUT, ("left-out", culprit), told)
