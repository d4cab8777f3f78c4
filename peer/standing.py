"""Where every peer of a coordinated federation stands after a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from peer.cluster_models import idle
from peer.errors import ProtocolError
from peer.plan import MAX_PEERS, Plan

if TYPE_CHECKING:
    from peer.network.transport import Buffer

NOBODY: Final = -1


@dataclass(frozen=True)
class Standing:
    """Whose model is which, and who took part with which; both by peer, and of those known."""

    places: Mapping[int, int]
    trained: Mapping[int, int] = field(default_factory=dict)

    def bag(self, peer: int) -> frozenset[int]:
        """Return the others that have the model that `peer` has."""
        own = self.places.get(peer)
        return frozenset(j for j, place in self.places.items() if place == own and j != peer)

    def neighbours(self, peer: int, method: str) -> list[int]:
        """Return with whom `peer` was averaged: none when it did not take part.

        By `cfl` it was with its cluster, as this is after the round; else with those that trained
        the same model.
        """
        if peer not in self.trained:
            return []
        if method == "cfl":
            return sorted(self.bag(peer))
        own = self.trained[peer]
        return sorted(j for j, model in self.trained.items() if model == own and j != peer)

    def notes(self, peer: int, plan: Plan) -> dict[str, Any]:
        """Return what the row of `peer` notes: its model (of cfl its node), whether it took part,
        and of ifca the models that nobody trained."""
        notes: dict[str, Any] = {
            "node" if plan.method == "cfl" else "model": self.places[peer],
            "took_part": peer in self.trained,
        }
        if plan.method == "ifca" and plan.c > 1:
            notes["idle"] = idle(list(self.trained.values()), plan.c)
        return notes

    def encode(self, n: int) -> bytes:
        """Return 8 n bytes for the plan's n peers: int32, places, then trained; -1 is none."""
        rows = np.full((2, n), NOBODY, dtype="<i4")
        for row, models in zip(rows, (self.places, self.trained), strict=True):
            row[list(models)] = list(models.values())
        return rows.tobytes()

    @classmethod
    def decode(cls, chunks: Sequence[Buffer], n: int) -> Standing:
        """Return what `encode` made of n peers. Raises ProtocolError for any other bytes."""
        content = b"".join(chunks)
        if len(content) != 8 * n:
            raise ProtocolError(f"a standing of {len(content)} bytes, not {8 * n}")
        rows = np.frombuffer(content, dtype="<i4").reshape(2, n)
        if rows.min() < NOBODY or rows.max() >= 2 * MAX_PEERS:
            raise ProtocolError("a standing with numbers out of range")
        places, trained = (
            {int(j): int(row[j]) for j in np.flatnonzero(row != NOBODY)} for row in rows
        )
        return cls(places, trained)
