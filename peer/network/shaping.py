"""A network between peers as their transports meet it, for experiments on one machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Shaper(Protocol):
    """How long messages take, and which are lost.

    The other end is named by its peer id or its address, `tcp://HOST:PORT`.
    """

    def introduce(self, index_of: Callable[[str], int | None]) -> None:
        """Say how the index of the other end is found; None where it is no known peer's."""
        ...

    async def leave(self, to: str, payload: int) -> bool:
        """Wait until the first byte of a message with `payload` bytes of chunks is at the other
        end; return False when it does not arrive there."""
        ...

    async def arrive(self, sender: str, payload: int) -> bool:
        """Wait until the last byte of a message whose first byte is here has come; return False
        when it does not come."""
        ...
