"""State directories: whole after every crash, never silently empty, one process at a time."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from peer.errors import StateError
from peer.files import write_atomically
from peer.network.membership import LEAP, STRIDE
from peer.network.messages import PeerRecord
from peer.state import Checkpoint, StateDirectory


def checkpoint(t: int) -> Checkpoint:
    return Checkpoint(
        plan="a" * 32,
        index=3,
        t=t,
        model=np.arange(5, dtype=np.float32) + t,
        matcher={"bag": [1, 2]},
        counters={"payload_sent": 7},
    )


def test_a_checkpoint_comes_back_whole(tmp_path: Path) -> None:
    with StateDirectory(tmp_path / "state") as state:
        state.identity()
        assert state.newest() is None
        state.save(checkpoint(4))
        state.save(checkpoint(5))
        found = state.newest()
    assert found is not None
    np.testing.assert_array_equal(found.model, checkpoint(5).model)
    expected = vars(checkpoint(5)) | {"model": None}
    assert vars(found) | {"model": None} == expected


@pytest.mark.parametrize("harm", ["truncated", "flipped", "empty", "not-safetensors"])
def test_the_generation_before_counts_when_the_newest_is_damaged(tmp_path: Path, harm: str) -> None:
    with StateDirectory(tmp_path) as state:
        state.save(checkpoint(4))
        state.save(checkpoint(5))
        damage(tmp_path / "checkpoint-1.safetensors", harm)
        found = state.newest()
        assert found is not None
        assert found.t == 4
        damage(tmp_path / "checkpoint-0.safetensors", harm)
        with pytest.raises(StateError, match="damaged"):
            state.newest()


def damage(path: Path, harm: str) -> None:
    content = bytearray(path.read_bytes())
    match harm:
        case "truncated":
            del content[-3:]
        case "flipped":
            content[-2] ^= 1
        case "empty":
            content.clear()
        case _:
            content[:] = b"hello" * 10
    path.write_bytes(content)


def test_a_directory_is_held_by_one_process(tmp_path: Path) -> None:
    with StateDirectory(tmp_path), pytest.raises(StateError, match="in use"):
        StateDirectory(tmp_path)
    with StateDirectory(tmp_path):
        pass


def test_identity_stays_and_its_incarnation_grows(tmp_path: Path) -> None:
    with StateDirectory(tmp_path) as state:
        first = state.identity()
        ahead = first.model_copy(update={"incarnation": first.incarnation + 1000, "index": 3})
        state.keep_identity(ahead)
        second = state.identity()
    assert second.peer == first.peer
    assert second.index == 3
    assert second.incarnation == first.incarnation + 1001
    assert stat.S_IMODE((tmp_path / "identity.json").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("clock", "incarnations"),
    [
        ([100, 101, 2_000_000_000, 2_000_000_000], [100, 101, 101 + STRIDE, 101 + 2 * STRIDE]),
        ([1_000_000, 1_000_060, 0, 1_000_070], [1_000_000, 1_000_060, 1_000_061, 1_000_070]),
    ],
)
def test_incarnations_grow_by_steps_that_others_believe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[int], incarnations: list[int]
) -> None:
    lives = []
    for now in clock:
        monkeypatch.setattr("peer.state.time", SimpleNamespace(time=lambda now=now: now))
        with StateDirectory(tmp_path) as state:
            lives.append(state.identity().incarnation)
    assert lives == incarnations
    assert 255 * STRIDE < LEAP


def test_a_damaged_or_missing_identity_is_an_error_not_a_new_peer(tmp_path: Path) -> None:
    with StateDirectory(tmp_path) as state:
        state.identity()
        state.save(checkpoint(1))
        (tmp_path / "identity.json").write_text("{}")
        with pytest.raises(StateError, match="identity"):
            state.identity()
        (tmp_path / "identity.json").unlink()
        with pytest.raises(StateError, match="identity"):
            state.identity()


def test_a_lost_key_is_an_error_not_a_new_peer(tmp_path: Path) -> None:
    with StateDirectory(tmp_path) as state:
        key = state.key()
        assert state.identity(key.peer).peer == key.peer
        assert state.key().peer == key.peer
    (tmp_path / "identity.pem").unlink()
    with StateDirectory(tmp_path) as state, pytest.raises(StateError, match="no identity"):
        state.key()


def test_a_peer_without_a_key_may_get_one(tmp_path: Path) -> None:
    with StateDirectory(tmp_path) as state:
        first = state.identity()
        key = state.key()
        assert state.identity(key.peer).peer == key.peer != first.peer


def test_a_directory_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot use the state directory"):
        StateDirectory(tmp_path / "file" / "state")


def test_remembered_peers_come_back_and_a_damaged_list_is_none(tmp_path: Path) -> None:
    record = PeerRecord(
        peer="1" * 32,
        index=2,
        control="tcp://127.0.0.1:7000",
        data="tcp://127.0.0.1:7001",
        incarnation=5,
        first_round=1,
        model="f" * 32,
    )
    with StateDirectory(tmp_path) as state:
        assert state.remembered() == []
        state.remember([record])
        assert state.remembered() == [record]
        (tmp_path / "peers.json").write_text("[{")
        assert state.remembered() == []


def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "file"
    write_atomically(target, b"old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]
