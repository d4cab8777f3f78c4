"""Records in a federation with keys: each speaks for itself, in its federation, while it may."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from peer.network.federation import Card, Credentials, Federation, found, rewrite
from peer.network.identity import IdentityKey
from peer.network.membership import Change, Membership
from peer.network.messages import PeerRecord, Ping, State, Status, Update, decode, encode, fitting
from peer.plan import NetworkPlan


def federation(folder: Path, *, token: bool = True) -> Path:
    file = folder / "federation.toml"
    found(file, folder, token=token)
    return file


def member(file: Path) -> Credentials:
    return Credentials(IdentityKey.generate(), file)


def record(of: Credentials, index: int, **changes: object) -> PeerRecord:
    """Return what a member says of itself."""
    said = PeerRecord(
        peer=of.key.peer,
        index=index,
        control=f"tcp://{of.key.curve.public.hex()}@127.0.0.1:{7000 + index}",
        data=f"tcp://{of.key.curve.public.hex()}@127.0.0.1:{8000 + index}",
        incarnation=1,
        first_round=1,
        model="a" * 32,
    )
    return of.sign(said.model_copy(update=changes))


def view(own: Credentials) -> Membership:
    return Membership(
        record(own, 0),
        settings=NetworkPlan(),
        n=5,
        rounds=9,
        rng=np.random.default_rng(0),
        now=0.0,
        credentials=own,
    )


def alive(said: PeerRecord) -> Update:
    return Update(record=said, state=State.ALIVE, status=Status())


def test_a_record_is_its_peers_alone(tmp_path: Path) -> None:
    file = federation(tmp_path)
    own, other, evil = member(file), member(file), member(file)
    said = record(other, 1)
    assert own.objection(said) == ""
    stolen = {"control": record(evil, 1).control}
    for forged in [
        said.model_copy(update=stolen),
        evil.sign(said.model_copy(update=stolen)),
        said.model_copy(update={"incarnation": 2}),
        said.model_copy(update={"proof": ""}),
        said.model_copy(update={"proof": "0" * 192}),
    ]:
        assert own.objection(forged) != ""
        members = view(own)
        assert len(members.hear([alive(forged)], 0.0)) == 1
        assert len(members.confirm(alive(forged), forged.control, 0.0)) == 1
        assert members.members() == []
    members = view(own)
    assert members.hear([alive(said)], 0.0) == []
    assert [m.record for m in members.members()] == [said]


def test_a_record_of_another_federation_says_nothing_here(tmp_path: Path) -> None:
    files = [federation(tmp_path / name) for name in ("one", "two")]
    key = IdentityKey.generate()
    own = member(files[0])
    assert own.objection(record(Credentials(key, files[0]), 1)) == ""
    assert "not signed" in own.objection(record(Credentials(key, files[1]), 1))


def test_a_replayed_record_is_older_than_what_is_known(tmp_path: Path) -> None:
    file = federation(tmp_path)
    own, other = member(file), member(file)
    old, new = record(other, 1), record(other, 1, incarnation=2, first_round=5)
    members = view(own)
    members.hear([alive(new)], 0.0)
    members.hear([alive(old)], 0.0)
    assert [m.record for m in members.members()] == [new]


def test_what_a_peer_changes_of_its_record_it_signs_again(tmp_path: Path) -> None:
    own = member(federation(tmp_path))
    members = view(own)
    members.set_first_round(7)
    assert members.own.record.first_round == 7
    assert own.objection(members.own.record) == ""


@pytest.mark.parametrize("token", [True, False])
def test_a_revoked_member_is_forgotten_and_stays_so(tmp_path: Path, token: bool) -> None:
    file = federation(tmp_path, token=token)
    keys = [IdentityKey.generate() for _ in range(3)]
    for key in keys:
        rewrite(file, Federation.load(file).with_member(Card.of(key)))
    own, other, revoked = (Credentials(key, file) for key in keys)
    members = view(own)
    members.hear([alive(record(other, 1)), alive(record(revoked, 2))], 0.0)
    members.drain_events()
    assert not own.refresh()
    rewrite(file, Federation.load(file).without(revoked.key.peer))
    assert own.refresh()
    members.expel()
    assert [m.record.index for m in members.members()] == [1]
    assert [(e.change, e.record.index) for e in members.drain_events()] == [(Change.EXPELLED, 2)]
    members.hear([alive(record(revoked, 2, incarnation=9))], 0.0)
    assert [m.record.index for m in members.members()] == [1]


def test_a_file_that_became_useless_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = federation(tmp_path)
    own = member(file)
    before = own.federation
    file.write_text("token = ")
    assert not own.refresh()
    assert own.federation == before
    assert "going on with what it said before" in caplog.text
    file.unlink()
    assert not own.refresh()
    assert own.admit(own.connecting.public) is not None


def test_signed_records_fit_into_a_message(tmp_path: Path) -> None:
    own = member(federation(tmp_path))
    said = alive(record(own, 1))
    chosen = fitting([said] * 500)
    assert len(chosen) > 50
    assert decode(encode(Ping(updates=chosen))) == Ping(updates=chosen)
