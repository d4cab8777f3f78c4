"""How much one sender may ask for: token buckets of requests and bytes, with the time passed in.

What an honest peer needs is far below its `Allowance`, so that only a flood is ever refused; and a
refusal is an answer (BUSY), after which an honest peer asks again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

MiB: Final = 2**20
MAX_SENDERS: Final = 4096
"""Senders whose buckets are kept; beyond that the one that asked longest ago begins anew."""


@dataclass(frozen=True)
class Allowance:
    """What one sender may ask for: so much a second in the long run, and a burst at once.

    [choice] A peer pings once in `probe_interval`, exchanges views once in a second, asks to be
    told of progress a few times a second, and probes and pulls once a round: 200 requests a second
    are enough for fifty rounds a second.
    """

    requests: float = 200.0
    request_burst: float = 1000.0
    bytes: float = 64.0 * MiB
    byte_burst: float = 256.0 * MiB

    @classmethod
    def of_snapshots(cls, size: int, history: int) -> Allowance:
        """Return what a peer may ask of one that keeps `history` snapshots of `size` bytes.

        [choice] In the long run a snapshot a second, or 16 MiB where that is more: nobody needs one
        twice, and where rounds are shorter than a second models are small. At once all that are
        kept, twice over, as a transfer that broke off is begun anew.
        """
        return cls(
            bytes=max(16.0 * MiB, float(size)), byte_burst=max(64.0 * MiB, 2.0 * history * size)
        )


class TokenBucket:
    """Holds at most `burst` tokens and gains `rate` a second; full at the time `now`.

    What is taken may exceed what is there, as the size of an answer is known only when it is made:
    the bucket is then empty until the debt is paid.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._at = burst, now

    def tokens(self, now: float) -> float:
        """Return how many tokens there are at the time `now`; a debt is negative."""
        return min(self._burst, self._tokens + self._rate * max(0.0, now - self._at))

    def take(self, count: float, now: float) -> None:
        """Take tokens, of which there need not be so many."""
        self._tokens = self.tokens(now) - count
        self._at = max(self._at, now)


class Limiter:
    """The buckets of all senders.

    A sender is whatever its transport cannot take for another: a connection, or a key.
    """

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._senders: OrderedDict[bytes, tuple[TokenBucket, TokenBucket]] = OrderedDict()

    def admits(self, sender: bytes, now: float) -> bool:
        """Return whether a sender may make one more request, and count it if so."""
        requests, volume = self._buckets(sender, now)
        if requests.tokens(now) < 1 or volume.tokens(now) <= 0:
            return False
        requests.take(1, now)
        return True

    def spend(self, sender: bytes, size: int, now: float) -> None:
        """Charge a sender for the bytes of an answer."""
        self._buckets(sender, now)[1].take(size, now)

    def _buckets(self, sender: bytes, now: float) -> tuple[TokenBucket, TokenBucket]:
        if sender not in self._senders:
            if len(self._senders) >= MAX_SENDERS:
                self._senders.popitem(last=False)
            granted = self._allowance
            self._senders[sender] = (
                TokenBucket(granted.requests, granted.request_burst, now),
                TokenBucket(granted.bytes, granted.byte_burst, now),
            )
        self._senders.move_to_end(sender)
        return self._senders[sender]
