"""Who holds which index, and which model the federation has: what outlives a bootstrap node.

Pure: the time is passed in. An index belongs to a peer id for good, so that data shards and seeds
stay with it; only when none is free is the one taken back whose holder was not seen for longest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from peer.errors import RefusedError, StateError
from peer.network.messages import Digest, Index, PeerId, PeerRecord, Reason
from peer.sealed import Sealed

_FILE = "registry.json"


class _Saved(Sealed):
    """What the state directory holds."""

    plan: Digest
    model: Digest
    holders: dict[PeerId, Index]


@dataclass
class _Holder:
    """A peer with an index; `seen` is when it last asked or announced itself."""

    index: int
    seen: float
    announced: bool = False


class Registry:
    """Indices 0 to n - 1 by peer id, and the digest of the model that all must have.

    Args:
        n: number of peers of the plan. plan: its digest.
        model: the digest of the model if the plan fixes it; else the first announcer's counts, for
            as long as anyone who announced it is seen.
        reclaim_after: seconds unseen after which an index can be taken back.
    """

    def __init__(self, *, n: int, plan: str, model: str | None, reclaim_after: float) -> None:
        self.changed = False
        """Whether there is something that `save` has not saved."""
        self._n = n
        self._plan = plan
        self._fixed_model = model
        self._model = model or ""
        self._reclaim_after = reclaim_after
        self._holders: dict[str, _Holder] = {}

    def index_of(self, peer: str) -> int | None:
        """Return the index that a peer holds."""
        holder = self._holders.get(peer)
        return None if holder is None else holder.index

    def enrol(self, peer: str, wanted: int | None, now: float) -> int:
        """Return the peer's index: the one it has, else the wanted one if free, else the lowest
        free, else one that is taken back.

        Raises RefusedError BAD_REQUEST when `wanted` is not an index of the plan, FULL when there
        is none to be had.
        """
        if wanted is not None and wanted >= self._n:
            raise RefusedError(Reason.BAD_REQUEST, f"index {wanted} is not in 0..{self._n - 1}")
        if peer not in self._holders:
            taken = {holder.index for holder in self._holders.values()}
            if wanted is None or wanted in taken:
                free = (index for index in range(self._n) if index not in taken)
                wanted = next(free, None)
            if wanted is None:
                wanted = self._reclaim(now)
            self._assign(peer, wanted, now)
        self._holders[peer].seen = now
        return self._holders[peer].index

    def announce(self, record: PeerRecord, now: float) -> None:
        """Note that a peer is there.

        One that is unknown here, because it enrolled elsewhere or before this registry was lost,
        is taken in under the index it says. Raises RefusedError MODEL_MISMATCH or INDEX_CLASH.
        """
        self._check_model(record, now)
        holder = self._holders.get(record.peer)
        if holder is None or holder.index != record.index:
            if record.index >= self._n:
                raise RefusedError(Reason.INDEX_CLASH, f"the plan has {self._n} peers")
            for peer, other in list(self._holders.items()):
                if other.index == record.index:
                    if now - other.seen < self._reclaim_after:
                        raise RefusedError(Reason.INDEX_CLASH, f"index {record.index} is {peer}'s")
                    del self._holders[peer]
            self._assign(record.peer, record.index, now)
        self._holders[record.peer].seen = now
        self._holders[record.peer].announced = True

    def _check_model(self, record: PeerRecord, now: float) -> None:
        if record.model == self._model:
            return
        in_use = self._fixed_model is not None or any(
            holder.announced and now - holder.seen < self._reclaim_after
            for peer, holder in self._holders.items()
            if peer != record.peer
        )
        if self._model and in_use:
            raise RefusedError(Reason.MODEL_MISMATCH, f"the model here is {self._model}")
        self._model = record.model
        self.changed = True

    def _reclaim(self, now: float) -> int:
        peer = min(self._holders, key=lambda peer: self._holders[peer].seen)
        unseen = now - self._holders[peer].seen
        if unseen < self._reclaim_after:
            wait = math.ceil(self._reclaim_after - unseen)
            raise RefusedError(
                Reason.FULL, f"all {self._n} places are taken; one may be free in {wait} s"
            )
        return self._holders.pop(peer).index

    def _assign(self, peer: str, index: int, now: float) -> None:
        self._holders[peer] = _Holder(index, now)
        self.changed = True

    def save(self, directory: Path) -> None:
        """Write the registry to a state directory, atomically. Raises OSError."""
        holders = {peer: holder.index for peer, holder in self._holders.items()}
        _Saved(plan=self._plan, model=self._model, holders=holders).write(directory / _FILE)
        self.changed = False

    def load(self, directory: Path, now: float) -> None:
        """Take over what `save` wrote, if there is anything; all holders count as seen now.

        Raises StateError when the file is damaged, lost, or belongs to another plan.
        """
        path = directory / _FILE
        try:
            saved = _Saved.load(path)
        except FileNotFoundError:
            # It is the first file that a node writes: what a coordinator knows comes after it.
            if any(directory.glob("*.json*")):
                raise StateError(
                    f"{directory} holds a run but no {_FILE}",
                    "restore it from a copy, or begin anew, every node with another --state",
                ) from None
            return
        if saved.plan != self._plan:
            raise StateError(f"{path} belongs to a federation of another plan")
        self._holders = {
            peer: _Holder(index, now, announced=True) for peer, index in saved.holders.items()
        }
        self._model = self._fixed_model or saved.model
