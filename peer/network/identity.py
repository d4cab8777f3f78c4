"""Who a peer is, when it can prove it: an Ed25519 key, and what is signed by one.

A key signs; CURVE, which encrypts connections, needs a key of another kind (X25519). It is derived
from the first, so that a peer has one secret, in one file. An id is derived from the public key:
nobody can take another's without its secret.

Every signature is made for one purpose, which is part of what is signed (domain separation): a
signed record can never pass for a signed plan.

Importing this module loads `cryptography`; peers without keys do not need it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple, Self

import msgpack
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from peer.errors import ProtocolError, UserError
from peer.secret_files import read_secret_file, write_secret_file

KEY_FILE = "identity.pem"
"""Name of a peer's key in its state directory."""

MAX_SIGNED = 64 * 1024
"""Bytes of a packed `Signed`, checked before it is unpacked."""

_DOMAIN: Final = b"panmesh 1 "
_KEY_BYTES: Final = 32
_SIGNATURE_BYTES: Final = 64
_MAX_KEY_FILE: Final = 4096


class Purpose(StrEnum):
    """What a signature is for; it holds for nothing else."""

    CONNECTION = "connection"
    """The signer is who connects to the holder of this CURVE key."""
    RECORD = "record"
    """What the signer says of itself to other peers."""
    PRESENCE = "presence"
    """What the signer says of itself on a broker."""
    CLAIM = "claim"
    """The index that the signer claims."""
    METRICS = "metrics"
    """How the signer's training goes."""
    PLAN = "plan"
    """The plan of the federation whose root the signer is."""


def peer_id(public_key: bytes) -> str:
    """Return the id, 32 hexadecimal digits, of who has the secret of a 32-byte public key."""
    return hashlib.sha256(_DOMAIN + b"peer id" + public_key).hexdigest()[:32]


class Signed(NamedTuple):
    """Bytes that somebody signed; who, and whether for that purpose, `verify` tells."""

    payload: bytes
    public_key: bytes
    signature: bytes

    @property
    def signer(self) -> str:
        """The id of the peer that has signed this, if `verify` does not object."""
        return peer_id(self.public_key)

    def verify(self, purpose: Purpose) -> bytes:
        """Return the payload. Raises ProtocolError unless its key signed it for `purpose`."""
        try:
            key = Ed25519PublicKey.from_public_bytes(self.public_key)
            key.verify(self.signature, _signed_bytes(purpose, self.payload))
        except (ValueError, InvalidSignature):
            raise ProtocolError(f"not signed as a {purpose} by its key") from None
        return self.payload

    def pack(self) -> bytes:
        """Return the bytes that `unpack` reads. Raises ValueError above `MAX_SIGNED` bytes."""
        packed: bytes = msgpack.packb(tuple(self))
        if len(packed) > MAX_SIGNED:
            raise ValueError(f"{len(packed)} bytes are too many to sign")
        return packed

    @classmethod
    def unpack(cls, packed: bytes, *, limit: int = MAX_SIGNED) -> Self:
        """Return what `pack` wrote. Raises ProtocolError, and nothing else, for other bytes."""
        if len(packed) > min(limit, MAX_SIGNED):
            raise ProtocolError(f"{len(packed)} signed bytes, at most {limit}")
        try:
            parts = msgpack.unpackb(
                packed,
                max_bin_len=limit,
                max_array_len=3,
                max_str_len=0,
                max_map_len=0,
                max_ext_len=0,
            )
            payload, public_key, signature = parts
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
            raise ProtocolError("not a signed message") from None
        if not all(isinstance(part, bytes) for part in parts) or (
            len(public_key) != _KEY_BYTES or len(signature) != _SIGNATURE_BYTES
        ):
            raise ProtocolError("not a signed message")
        return cls(payload, public_key, signature)


@dataclass(frozen=True)
class CurveKeys:
    """A CURVE key pair: 32 bytes each."""

    public: bytes
    secret: bytes

    @classmethod
    def derive(cls, secret: bytes, use: str) -> Self:
        """Return the keys that follow from a secret, others for every use of it (HKDF)."""
        hkdf = HKDF(SHA256(), _KEY_BYTES, salt=None, info=_DOMAIN + use.encode())
        key = X25519PrivateKey.from_private_bytes(hkdf.derive(secret))
        return cls(key.public_key().public_bytes_raw(), key.private_bytes_raw())

    def __repr__(self) -> str:
        return f"CurveKeys({self.public.hex()})"


class IdentityKey:
    """A secret Ed25519 key, and with it an identity: a peer's, a bootstrap node's, or the root's of
    a federation.

    Attributes:
        public: the public key, 32 bytes. peer: the id that follows from it.
        curve: the CURVE keys that follow from the secret.
    """

    def __init__(self, secret: Ed25519PrivateKey) -> None:
        self._secret = secret
        self.public = secret.public_key().public_bytes_raw()
        self.peer = peer_id(self.public)
        self.curve = CurveKeys.derive(secret.private_bytes_raw(), "CURVE key")

    def __repr__(self) -> str:
        return f"IdentityKey({self.peer})"

    @classmethod
    def generate(cls) -> Self:
        """Return a new identity."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the identity in a file. Raises UserError when it holds none, or others than its
        owner may read it."""
        secret = read_secret_file(path, _MAX_KEY_FILE)
        try:
            key = load_pem_private_key(secret, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise UserError(
                f"{path} is no Ed25519 key without a password", "peer keys new makes one"
            )
        return cls(key)

    def save(self, path: Path) -> None:
        """Write the secret to a new file of mode 0600, as PKCS#8 in PEM.

        Raises UserError when there is a file already, or none can be written.
        """
        pem = self._secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_secret_file(path, pem)

    def sign(self, purpose: Purpose, payload: bytes) -> Signed:
        """Return the payload signed for one purpose."""
        signature = self._secret.sign(_signed_bytes(purpose, payload))
        return Signed(payload, self.public, signature)


def _signed_bytes(purpose: Purpose, payload: bytes) -> bytes:
    return _DOMAIN + purpose.encode() + b"\0" + payload
