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
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from peer.errors import StateError
from peer.files import hold_directory, remove_unfinished, write_atomically
from peer.learning.learner import Vector
from peer.network.messages import Index, PeerId, PeerRecord, Round
from peer.rundir import MODELS

GENERATIONS = 2
MODEL_CARD = "model.json"
"""How to build the model again without its data: a `peer.learning.learner.ModelCard`."""


class Identity(BaseModel):
    """Who this peer is, for as long as its state directory lives."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    peer: PeerId
    incarnation: int = Field(ge=0, lt=2**53)
    index: Index | None = None
    ports: tuple[Annotated[int, Field(ge=1, le=65_535)], ...] = Field(default=(), max_length=2)
    """Where it listened: others look for it there, and where all were stopped nobody else knows."""


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


class StateDirectory:
    """One peer's directory, held by one process at a time.

    Raises StateError, from the constructor or any method, when the directory is in use by another
    process, cannot be written, or holds what cannot be trusted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = hold_directory(path)
        try:
            for directory in (path, path / MODELS):
                remove_unfinished(directory)
        except OSError as error:
            raise StateError(f"cannot write to {path}: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def _write(self, name: str, content: bytes, mode: int = 0o644) -> None:
        try:
            write_atomically(self.path / name, content, mode=mode)
        except OSError as error:
            raise StateError(f"cannot write {self.path / name}: {error.strerror}") from None

    def identity(self) -> Identity:
        """Return this peer's identity with a new incarnation, made on the first call of its life.

        The incarnation is above every earlier one: what others believed of the peer before its
        restart no longer counts.
        """
        path = self.path / "identity.json"
        # The clock puts it above incarnations that were raised after the last write, too.
        now = int(time.time())
        if path.exists():
            try:
                old = Identity.model_validate_json(path.read_bytes())
            except (OSError, ValidationError):
                raise StateError(f"{path} is damaged") from None
            identity = old.model_copy(update={"incarnation": max(old.incarnation + 1, now)})
        else:
            if any(self.path.glob("checkpoint-*.safetensors")):
                raise StateError(f"{self.path} holds checkpoints but no identity.json")
            identity = Identity(peer=secrets.token_hex(16), incarnation=now)
        self.keep_identity(identity)
        return identity

    def keep_identity(self, identity: Identity) -> None:
        """Write the identity (mode 0600)."""
        self._write("identity.json", identity.model_dump_json().encode(), 0o600)

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

    def newest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint; None where there has never been one."""
        return newest_checkpoint(self.path)

    def remember(self, records: Sequence[PeerRecord]) -> None:
        """Write the peers to look for after a restart."""
        self._write("peers.json", _RECORDS.dump_json(list(records)))

    def remembered(self) -> list[PeerRecord]:
        """Return the peers of the last `remember`; a damaged list is as good as none."""
        try:
            return _RECORDS.validate_json((self.path / "peers.json").read_bytes())
        except (OSError, ValidationError):
            return []

    def write_json(self, name: str, value: object) -> None:
        """Write a JSON file for people and tools to read (health, model description)."""
        self._write(name, json.dumps(value, indent=2).encode() + b"\n")


_RECORDS = TypeAdapter(list[PeerRecord])


def newest_checkpoint(path: Path) -> Checkpoint | None:
    """Return the newest whole checkpoint in a state directory; None where there has never been one.

    Raises StateError when there are some and none is whole.
    """
    files = sorted(path.glob("checkpoint-*.safetensors"))
    whole = [checkpoint for file in files if (checkpoint := _read(file)) is not None]
    if files and not whole:
        raise StateError(f"every checkpoint in {path} is damaged")
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
    except (OSError, SafetensorError, KeyError, ValidationError):
        return None
    if model.dtype != np.float32 or _checksum(metadata["meta"], model) != metadata["sha256"]:
        return None
    return Checkpoint(
        plan=meta.plan,
        index=meta.index,
        t=meta.t,
        model=model,
        matcher=meta.matcher,
        counters=meta.counters,
    )
