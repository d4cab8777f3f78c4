"""A peer's state directory: identity, checkpoints and remembered peers, safe against kill -9.

Every file is written to a temporary name, flushed to the disk and renamed, so that at any moment
the directory holds whole files only. Checkpoints alternate between two files; each carries a
checksum of all it says, and the newest whole one counts. A directory whose checkpoints are all
damaged is an error that a person must see: nothing ever starts silently from nothing.

The round is the unit of restart: momentum starts anew each round and every draw comes from (seed,
index, round, purpose), so neither optimiser nor generators have a state to keep.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from peer.errors import StateError
from peer.files import hold_directory, remove_unfinished, write_atomically
from peer.learning.budget import Spent
from peer.learning.learner import Vector
from peer.network.membership import STRIDE
from peer.network.messages import Index, PeerId, PeerRecord, Round
from peer.rundir import MODELS, holds_rows
from peer.sealed import Sealed

if TYPE_CHECKING:
    from peer.network.identity import IdentityKey

log = logging.getLogger(__name__)

IDENTITY = "identity.json"
PEERS = "peers.json"
LEDGER = "privacy.json"
_CHECKPOINTS = "checkpoint-*.safetensors"
GENERATIONS = 2
RESTORE_OR_LEAVE = "restore it from a copy, or begin anew with another --state"
MODEL_CARD = "model.json"
"""How to build the model again without its data: a `peer.learning.learner.ModelCard`."""


class Identity(Sealed):
    """Who this peer is, for as long as its state directory lives."""

    peer: PeerId
    incarnation: int = Field(ge=0, lt=2**53)
    index: Index | None = None
    ports: tuple[Annotated[int, Field(ge=1, le=65_535)], ...] = Field(default=(), max_length=2)
    """Where it listened: others look for it there, and where all were stopped nobody else knows."""
    learned: bool = False
    """Whether a checkpoint was ever written: if there is none now, it was lost."""
    keyed: bool = False
    """Whether the id is that of a key: if there is none now, it was lost."""


class _Meta(BaseModel):
    """What a checkpoint says beside the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    plan: str
    index: Index
    t: Round
    matcher: dict[str, Any]
    counters: dict[str, int]


@dataclass(frozen=True)
class Checkpoint:
    """A peer after round `t`: its model w^t [e], its matcher's state and its traffic so far."""

    plan: str
    index: int
    t: int
    model: Vector
    matcher: dict[str, Any]
    counters: dict[str, int]


class _Ledger(Sealed):
    """What was spent of the epsilon of this peer's samples."""

    spent: tuple[Spent, ...]


class StateDirectory:
    """One peer's directory, held by one process at a time.

    Raises StateError, from the constructor or any method, when the directory is in use by another
    process, cannot be written, or holds what cannot be trusted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: Identity | None = None
        self._lock = hold_directory(path)
        try:
            remove_unfinished(path / MODELS)
        except OSError as error:
            raise StateError(f"cannot write to {path}: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def _write(self, name: str, content: bytes) -> None:
        try:
            write_atomically(self.path / name, content)
        except OSError as error:
            raise StateError(f"cannot write {self.path / name}: {error.strerror}") from None

    def key(self) -> IdentityKey:
        """Return this peer's secret key, made on the first call of its life. Raises UserError when
        it cannot be read, or others can."""
        from peer.network.identity import KEY_FILE, IdentityKey

        path = self.path / KEY_FILE
        if not path.exists():
            if (self.path / IDENTITY).exists() and Identity.load(self.path / IDENTITY).keyed:
                raise StateError(f"{self.path} holds a run but no {KEY_FILE}", RESTORE_OR_LEAVE)
            IdentityKey.generate().save(path)
        return IdentityKey.load(path)

    def identity(self, peer: str | None = None) -> Identity:
        """Return this peer's identity with a new incarnation, made on the first call of its life.

        The id is `peer`, that of the peer's key; without one it is drawn once. The incarnation is
        above every earlier one: what others believed of the peer before its restart no longer
        counts.
        """
        # The clock puts it above incarnations that were raised after the last write, too; where the
        # clock was set back, a peer that hears of such a one goes above it. Where the clock was set
        # on, by decades at a device that starts in 1970, others must still believe it.
        now = max(0, int(time.time()))
        try:
            old = Identity.load(self.path / IDENTITY)
        except FileNotFoundError:
            if any(self.path.glob(_CHECKPOINTS)) or holds_rows(self.path):
                raise StateError(
                    f"{self.path} holds a run but no {IDENTITY}", RESTORE_OR_LEAVE
                ) from None
            identity = Identity(peer=secrets.token_hex(16), incarnation=now)
        else:
            incarnation = min(max(old.incarnation + 1, now), old.incarnation + STRIDE)
            identity = old.model_copy(update={"incarnation": incarnation})
        if peer is not None:
            identity = identity.model_copy(update={"peer": peer, "keyed": True})
        self.keep_identity(identity)
        return identity

    def keep_identity(self, identity: Identity) -> None:
        """Write the identity (mode 0600)."""
        try:
            identity.write(self.path / IDENTITY, mode=0o600)
        except OSError as error:
            raise StateError(f"cannot write {self.path / IDENTITY}: {error.strerror}") from None
        self._identity = identity

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint beside the one before it."""
        meta = _Meta(
            plan=checkpoint.plan,
            index=checkpoint.index,
            t=checkpoint.t,
            matcher=checkpoint.matcher,
            counters=checkpoint.counters,
        ).model_dump_json()
        model = np.ascontiguousarray(checkpoint.model, dtype=np.float32)
        content = save({"model": model}, metadata={"meta": meta, "sha256": _checksum(meta, model)})
        self._write(f"checkpoint-{checkpoint.t % GENERATIONS}.safetensors", content)
        if self._identity is not None and not self._identity.learned:
            self.keep_identity(self._identity.model_copy(update={"learned": True}))

    def newest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint; None where there has never been one."""
        found = newest_checkpoint(self.path)
        if found is None and self._identity is not None and self._identity.learned:
            raise StateError(f"the checkpoints in {self.path} are gone", RESTORE_OR_LEAVE)
        return found

    def keep_spent(self, spent: Sequence[Spent]) -> None:
        """Write what was spent of epsilon: before anything leaves the peer that it was spent on."""
        try:
            _Ledger(spent=tuple(spent)).write(self.path / LEDGER)
        except OSError as error:
            raise StateError(f"cannot write {self.path / LEDGER}: {error.strerror}") from None

    def spent(self) -> list[Spent]:
        """Return the last of `keep_spent`: none only where nothing was ever learned here."""
        try:
            return list(_Ledger.load(self.path / LEDGER).spent)
        except FileNotFoundError:
            if self._identity is not None and self._identity.learned:
                raise StateError(
                    f"{self.path} holds a run but no {LEDGER}: what it has spent of epsilon is "
                    "not known",
                    RESTORE_OR_LEAVE,
                ) from None
            return []

    def remember(self, records: Sequence[PeerRecord]) -> None:
        """Write the peers to look for after a restart."""
        self._write(PEERS, _RECORDS.dump_json(list(records)))

    def remembered(self) -> list[PeerRecord]:
        """Return the peers of the last `remember`; a damaged list is as good as none."""
        try:
            return _RECORDS.validate_json((self.path / PEERS).read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, ValidationError):
            log.warning("%s is damaged; nobody is remembered", self.path / PEERS)
            return []

    def write_json(self, name: str, value: object) -> None:
        """Write a JSON file for people and tools to read (health, model description)."""
        self._write(name, json.dumps(value, indent=2).encode() + b"\n")


_RECORDS = TypeAdapter(list[PeerRecord])


def newest_checkpoint(path: Path) -> Checkpoint | None:
    """Return the newest whole checkpoint in a state directory; None where there has never been one.

    Raises StateError when there are some and none is whole.
    """
    files = sorted(path.glob(_CHECKPOINTS))
    whole = [checkpoint for file in files if (checkpoint := _read(file)) is not None]
    if files and not whole:
        raise StateError(f"every checkpoint in {path} is damaged", RESTORE_OR_LEAVE)
    return max(whole, key=lambda checkpoint: checkpoint.t, default=None)


def _checksum(meta: str, model: Vector) -> str:
    sha = hashlib.sha256(meta.encode())
    sha.update(model.tobytes())
    return sha.hexdigest()


def _read(path: Path) -> Checkpoint | None:
    """Return the checkpoint in `path`, or None when it is not whole."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            model = file.get_tensor("model")
        meta = _Meta.model_validate_json(metadata["meta"])
        whole = _checksum(metadata["meta"], model) == metadata["sha256"]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        whole = False
    if not whole or model.dtype != np.float32 or model.ndim != 1:
        log.warning("%s is damaged", path)
        return None
    return Checkpoint(
        plan=meta.plan,
        index=meta.index,
        t=meta.t,
        model=model,
        matcher=meta.matcher,
        counters=meta.counters,
    )
