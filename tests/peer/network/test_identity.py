"""Identities: who signed what, for which purpose, and what no file or message may do."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq
import zmq.utils.z85
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import ProtocolError, UserError
from peer.network.identity import MAX_SIGNED, IdentityKey, Purpose, Signed, peer_id

KEY = IdentityKey.generate()


def _changed(position: int, value: int) -> bytes:
    """Return a signed message with one byte of it changed."""
    packed = bytearray(KEY.sign(Purpose.PLAN, b"x" * 40).pack())
    packed[position] = value
    return bytes(packed)


def test_an_id_is_the_public_keys() -> None:
    assert KEY.peer == peer_id(KEY.public)
    assert len(bytes.fromhex(KEY.peer)) == 16
    assert IdentityKey.generate().peer != KEY.peer


def test_the_curve_keys_are_a_pair() -> None:
    secret = zmq.utils.z85.encode(KEY.curve.secret)
    assert zmq.utils.z85.decode(zmq.curve_public(secret)) == KEY.curve.public
    assert KEY.curve.secret.hex() not in repr(KEY.curve) + repr(KEY)


@given(st.binary(max_size=300), st.sampled_from(Purpose))
def test_what_is_signed_is_verified(payload: bytes, purpose: Purpose) -> None:
    signed = Signed.unpack(KEY.sign(purpose, payload).pack())
    assert signed.verify(purpose) == payload
    assert signed.signer == KEY.peer


@pytest.mark.parametrize(
    "forged",
    [
        KEY.sign(Purpose.PLAN, b"model")._replace(payload=b"modem"),
        KEY.sign(Purpose.PLAN, b"model")._replace(public_key=IdentityKey.generate().public),
        KEY.sign(Purpose.PLAN, b"model")._replace(public_key=b"\0" * 32),
        KEY.sign(Purpose.PLAN, b"model")._replace(signature=b"\0" * 64),
        KEY.sign(Purpose.RECORD, b"model"),
    ],
)
def test_what_is_not_is_refused(forged: Signed) -> None:
    with pytest.raises(ProtocolError):
        forged.verify(Purpose.PLAN)


@given(
    st.binary(max_size=200)
    | st.tuples(st.integers(0, 140), st.integers(0, 255)).map(lambda change: _changed(*change))
)
def test_any_bytes_are_a_signed_message_or_an_error(packed: bytes) -> None:
    try:
        Signed.unpack(packed).verify(Purpose.PLAN)
    except ProtocolError:
        return
    assert Signed.unpack(packed).signer == KEY.peer


@pytest.mark.parametrize(
    "packed",
    [
        bytes(MAX_SIGNED + 1),
        KEY.sign(Purpose.PLAN, b"").pack() + b"\0",
        KEY.sign(Purpose.PLAN, b"").pack()[:-1],
        KEY.sign(Purpose.PLAN, b"")._replace(public_key=b"short").pack(),
        b"\x91" * 1000,
    ],
)
def test_odd_bytes_are_no_signed_message(packed: bytes) -> None:
    with pytest.raises(ProtocolError):
        Signed.unpack(packed)


def test_a_limit_holds_before_anything_is_unpacked() -> None:
    packed = KEY.sign(Purpose.PRESENCE, bytes(5000)).pack()
    with pytest.raises(ProtocolError, match="at most 4096"):
        Signed.unpack(packed, limit=4096)
    with pytest.raises(ValueError, match="too many"):
        KEY.sign(Purpose.PLAN, bytes(MAX_SIGNED)).pack()


def test_a_key_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.pem"
    KEY.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert IdentityKey.load(path).peer == KEY.peer
    assert IdentityKey.load(path).curve == KEY.curve
    with pytest.raises(UserError, match="exists"):
        IdentityKey.generate().save(path)
    assert IdentityKey.load(path).peer == KEY.peer


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    KEY.save(path)
    path.chmod(0o640)
    with pytest.raises(UserError, match="others can read"):
        IdentityKey.load(path)


@pytest.mark.parametrize("content", [b"", b"PRIVATE KEY", b"\0" * 10_000])
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UserError):
        IdentityKey.load(path)
    with pytest.raises(UserError, match="cannot read"):
        IdentityKey.load(tmp_path / "none")


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    other = X25519PrivateKey.generate()
    path.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    path.chmod(0o600)
    with pytest.raises(UserError, match="no Ed25519 key"):
        IdentityKey.load(path)
