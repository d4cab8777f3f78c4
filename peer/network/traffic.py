"""What a peer sent and received, counted by message kind, and what was wrong with it."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Fault(StrEnum):
    """What can be wrong with traffic: a closed set, so that no sender makes the counters grow."""

    UNDECODABLE = "undecodable"
    """A header that is not a valid message."""
    VERSION = "version"
    """A message of another version of the protocol."""
    FRAMES = "frames"
    """A request that is not exactly one frame."""
    NOT_A_REQUEST = "not-a-request"
    BAD_REPLY = "bad-reply"
    """A reply that is undecodable, too large, or not of a kind that its request allows."""
    REFUSED = "refused"
    """A request refused as a mistake: of another plan or model, a taken index, in a wrong state."""
    LATE = "late"
    """A reply that nobody waits for any more."""
    BUSY = "busy"
    """A request refused because too many were waiting."""
    SLOW_READER = "slow-reader"
    """A reply given up because its receiver did not read."""
    HANDLER = "handler"
    """A request whose handler raised what it must not."""
    CONTENT = "content"
    """What a peer sent or said is of no use: a bad model, a forged record, an odd answer."""
    LIMITED = "limited"
    """A request refused because its sender asked for more than one sender may."""
    LEFT_OUT = "left-out"
    """A peer left out of exchanges for a while, because of its offences."""
    UNLISTED = "unlisted"
    """A connection, or a message of one that was admitted before, of who is no member."""
    HANDSHAKE = "handshake"
    """A handshake that failed otherwise: without encryption, or meant for another."""
    FORGED = "forged"
    """A request in the name of another."""
    OVERDUE = "overdue"
    """A living peer that did not deliver in a whole `round_timeout`."""


@dataclass
class Count:
    """Messages of one kind in one direction; `wire_bytes` is all frames, `payload_bytes` the chunks
    among them (models and evidence)."""

    messages: int = 0
    wire_bytes: int = 0
    payload_bytes: int = 0


class Traffic:
    """Counters of one peer. Cheap enough for every message; not for use by several threads."""

    def __init__(self) -> None:
        self._sent: defaultdict[str, Count] = defaultdict(Count)
        self._received: defaultdict[str, Count] = defaultdict(Count)
        self._faults: Counter[Fault] = Counter()

    def sent(self, kind: str, header: int, payload: int) -> None:
        """Count a message sent: bytes of its header and of all its chunks."""
        _add(self._sent[kind], header, payload)

    def received(self, kind: str, header: int, payload: int) -> None:
        """Count a valid message received: bytes of its header and of all its chunks."""
        _add(self._received[kind], header, payload)

    def fault(self, fault: Fault) -> None:
        """Count something wrong."""
        self._faults[fault] += 1

    def totals(self) -> dict[str, int]:
        """Return payload_sent, payload_received, wire_sent and wire_received: bytes, all kinds."""
        return {
            "payload_sent": sum(count.payload_bytes for count in self._sent.values()),
            "payload_received": sum(count.payload_bytes for count in self._received.values()),
            "wire_sent": sum(count.wire_bytes for count in self._sent.values()),
            "wire_received": sum(count.wire_bytes for count in self._received.values()),
        }

    def snapshot(self) -> dict[str, Any]:
        """Return {"sent" and "received": {kind: {messages, wire_bytes, payload_bytes}}, "faults":
        {reason: count}}, ready for JSON."""
        return {
            "sent": {kind: asdict(count) for kind, count in sorted(self._sent.items())},
            "received": {kind: asdict(count) for kind, count in sorted(self._received.items())},
            "faults": {str(fault): count for fault, count in sorted(self._faults.items())},
        }


def _add(count: Count, header: int, payload: int) -> None:
    count.messages += 1
    count.wire_bytes += header + payload
    count.payload_bytes += payload
