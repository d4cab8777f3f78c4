"""Who belongs to a federation, and how its members prove it: the federation file and what follows.

The file is the same at every member. It names the root, whose signature makes a plan the
federation's; the bootstrap node; and who is admitted, in one or both of two ways:

- *Members* are listed by their keys. Each connects by its own CURVE key.
- A *token* is a secret that admits whoever knows it, so that new peers need no list. The CURVE key
  by which they connect follows from it; who they are they say in the metadata of the connection's
  encrypted handshake, signed for the CURVE key of whom they connect to: what one peer has been told
  cannot be used by it towards another.

Whoever listens does so by its own CURVE key, which its address names (`peer.network.address`). So
there is no connection on which either side does not know who the other is, and a stranger's
handshake fails. What a peer says of itself to be passed on, its record, is signed.

Those who are *revoked* are refused whatever they know. The file may change while peers run.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import tomllib
from pathlib import Path
from typing import Annotated, Final, Self

import msgpack
import tomli_w
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from peer.errors import ProtocolError, UserError
from peer.files import write_atomically
from peer.network.address import dial_address, key_of, with_key
from peer.network.identity import (
    CurveKeys,
    IdentityKey,
    Purpose,
    Signed,
    peer_id,
)
from peer.network.messages import PeerId, PeerRecord
from peer.plan import describe
from peer.secret_files import read_secret_file, write_secret_file

log = logging.getLogger(__name__)

MAX_FILE: Final = 4 * 1024 * 1024
_REMEMBERED: Final = 4096
"""Checks that are not made again for the same question, at most."""

PublicKey = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Card(BaseModel):
    """What others need to know a peer: its Ed25519 and its CURVE public key, in hexadecimal."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    public: PublicKey
    curve: PublicKey
    name: str = Field(default="", max_length=100)

    @classmethod
    def of(cls, key: IdentityKey) -> Self:
        """Return the card of an identity."""
        return cls(public=key.public.hex(), curve=key.curve.public.hex())

    @classmethod
    def parse(cls, text: str, name: str = "") -> Self:
        """Return the card that `str` of one wrote. Raises UserError."""
        try:
            return cls(public=text[:64], curve=text[64:], name=name)
        except ValidationError:
            raise UserError("that is no card", "peer keys show prints one, 128 digits") from None

    def __str__(self) -> str:
        return self.public + self.curve

    @property
    def peer(self) -> str:
        """The id that follows from the key."""
        return peer_id(bytes.fromhex(self.public))


class Federation(BaseModel):
    """What the federation file says.

    `root` is the public key whose signature makes a plan the federation's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    root: PublicKey
    token: Annotated[SecretStr, Field(min_length=64, max_length=64)] | None = None
    revoked: tuple[PeerId, ...] = ()
    bootstrap: Card
    member: tuple[Card, ...] = ()

    @classmethod
    def load(cls, path: Path) -> Federation:
        """Return what a file says. Raises UserError when it cannot be used, or others than its
        owner may read it."""
        try:
            return cls.model_validate(tomllib.loads(read_secret_file(path, MAX_FILE).decode()))
        except ValidationError as error:
            problem = describe(error)
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            problem = f"not TOML: {error}"
        raise UserError(f"{path}: {problem}", "peer federation new makes a federation file")

    def to_toml(self) -> str:
        """Return the file's text, the token included."""
        table = self.model_dump(mode="json", exclude_defaults=True)
        if self.token is not None:
            table["token"] = self.token.get_secret_value()
        return tomli_w.dumps(table)

    def with_member(self, card: Card) -> Federation:
        """Return the file with one more member, no longer revoked if it was."""
        others = tuple(member for member in self.member if member.peer != card.peer)
        revoked = tuple(peer for peer in self.revoked if peer != card.peer)
        return self.model_copy(update={"member": (*others, card), "revoked": revoked})

    def without(self, peer: str) -> Federation:
        """Return the file with a peer refused from now on. Raises UserError when that is no id."""
        if not re.fullmatch("[0-9a-f]{32}", peer):
            raise UserError(f"{peer!r} is no id of a peer", "an id has 32 hexadecimal digits")
        members = tuple(member for member in self.member if member.peer != peer)
        revoked = tuple(dict.fromkeys((*self.revoked, peer)))
        return self.model_copy(update={"member": members, "revoked": revoked})

    def with_new_token(self) -> Federation:
        """Return the file with another token: who has only the old one is refused."""
        return self.model_copy(update={"token": SecretStr(secrets.token_hex(32))})

    @property
    def context(self) -> bytes:
        """What members sign with everything that strangers may read: the root, and a digest of the
        token, which strangers cannot have signed."""
        secret = "" if self.token is None else self.token.get_secret_value()
        digest = hashlib.sha256(b"context" + secret.encode()).digest()
        return bytes.fromhex(self.root) + digest

    def at(self, bootstrap: str) -> str:
        """Return the address of the bootstrap node, with its key unless it names one. Raises
        UserError."""
        address = dial_address(bootstrap)
        return (
            address if key_of(address) else with_key(address, bytes.fromhex(self.bootstrap.curve))
        )


def found(path: Path, keys: Path, *, token: bool) -> Federation:
    """Make a federation: its file, and the secret keys `root.pem` and `bootstrap.pem` in the folder
    `keys`. Without a `token` it admits listed members only.

    Raises UserError when any of the files exists or cannot be written.
    """
    root, bootstrap = IdentityKey.generate(), IdentityKey.generate()
    federation = Federation(root=root.public.hex(), bootstrap=Card.of(bootstrap))
    if token:
        federation = federation.with_new_token()
    root.save(keys / "root.pem")
    bootstrap.save(keys / "bootstrap.pem")
    # Last: where it is there, the keys are.
    write_secret_file(path, federation.to_toml().encode())
    return federation


def rewrite(path: Path, federation: Federation) -> None:
    """Replace a federation file. Raises UserError when it cannot be written."""
    try:
        write_atomically(path, federation.to_toml(), mode=0o600)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


class Credentials:
    """What one member proves of itself and asks of others, as its federation file says by now.

    Args:
        key: of this peer. path: of the federation file.

    Attributes:
        key: of this peer. federation: what the file says.
        version: grows whenever that changes.

    Raises UserError when the file cannot be used, or does not admit this peer.
    """

    def __init__(self, key: IdentityKey, path: Path) -> None:
        self.key = key
        self.version = 0
        self._path = path
        self._seen = _stamp(path)
        self._take(Federation.load(path))
        self.check()

    def check(self) -> None:
        """Raise UserError when the federation file does not admit this peer, or not any more."""
        if objection := self._why_not(self.key.peer):
            raise UserError(
                f"{self._path} does not admit this peer: {objection}",
                "peer keys show prints what peer federation add needs",
            )

    def _take(self, federation: Federation) -> None:
        self.federation = federation
        self._revoked = frozenset(federation.revoked)
        listed = [federation.bootstrap, *federation.member]
        self._listed = {card.peer for card in listed}
        self._users = {bytes.fromhex(card.curve): card.peer for card in listed}
        self._token: CurveKeys | None = None
        if federation.token is not None:
            secret = federation.token.get_secret_value().encode()
            self._token = CurveKeys.derive(secret, "token")
            # A digest of the token by its public key: connections of an older one are told apart.
            self._users[self._token.public] = f"token {self._token.public.hex()}"
        self._senders: dict[tuple[str, str], str] = {}
        self._genuine: dict[PeerRecord, None] = {}

    def refresh(self) -> bool:
        """Take over the federation file if it has changed; return whether it has.

        One that cannot be used changes nothing.
        """
        stamp = _stamp(self._path)
        if stamp == self._seen:
            return False
        self._seen = stamp
        try:
            federation = Federation.load(self._path)
        except UserError as error:
            log.error("%s; going on with what it said before", error)
            return False
        if federation == self.federation:
            return False
        self._take(federation)
        self.version += 1
        log.info("the federation file has changed: %d revoked", len(federation.revoked))
        return True

    # Connections.

    @property
    def connecting(self) -> CurveKeys:
        """The CURVE keys by which this peer connects to others."""
        if self._token is None or self.key.peer in self._listed:
            return self.key.curve
        return self._token

    def introduction(self, server: bytes) -> str:
        """Return how this peer introduces itself to whoever listens by a CURVE key."""
        signed = self.key.sign(Purpose.CONNECTION, self._of_federation(server))
        return signed.public_key.hex() + signed.signature.hex()

    def admit(self, client: bytes) -> str | None:
        """Return the User-Id of connections by a CURVE key; None where they are refused."""
        user = self._users.get(client)
        return None if user in self._revoked else user

    def sender(self, user: str, introduction: str) -> str:
        """Return the id of the peer at the other end of a connection to this one.

        `user` is what `admit` returned for it, perhaps before the file changed. Raises
        ProtocolError unless it proves that it is a member.
        """
        question = (user, introduction)
        if question not in self._senders:
            if len(self._senders) >= _REMEMBERED:
                self._senders.clear()
            self._senders[question] = self._identify(user, introduction)
        return self._senders[question]

    def _identify(self, user: str, introduction: str) -> str:
        if user not in self._users.values():
            raise ProtocolError("its key is no member's any more")
        peer = user
        if self._token is not None and user == self._users[self._token.public]:
            try:
                key, signature = bytes.fromhex(introduction[:64]), bytes.fromhex(introduction[64:])
            except ValueError:
                raise ProtocolError("it does not introduce itself") from None
            said = Signed(self._of_federation(self.key.curve.public), key, signature)
            said.verify(Purpose.CONNECTION)
            peer = said.signer
        if objection := self._why_not(peer):
            raise ProtocolError(objection)
        return peer

    def is_member(self, peer: str) -> bool:
        """Return whether a peer, given its id, may be a member."""
        return not self._why_not(peer)

    def _why_not(self, peer: str) -> str:
        """Return why a peer is no member, empty when it is one."""
        if peer in self._revoked:
            return f"peer {peer} is revoked"
        if self._token is None and peer not in self._listed:
            return f"peer {peer} is no listed member"
        return ""

    # Records.

    def sign(self, record: PeerRecord) -> PeerRecord:
        """Return this peer's own record, signed."""
        signed = self.key.sign(Purpose.RECORD, self._of_federation(_said(record)))
        proof = signed.public_key.hex() + signed.signature.hex()
        return record.model_copy(update={"proof": proof})

    def objection(self, record: PeerRecord) -> str:
        """Return why a record is not what a member says of itself; empty when it is."""
        if objection := self._why_not(record.peer):
            return objection
        return "" if self.is_signed(record) else "not signed by it"

    def is_signed(self, record: PeerRecord) -> bool:
        """Return whether a record, a member's or not, is signed by the peer that it is about."""
        if record in self._genuine:
            return True
        key, signature = bytes.fromhex(record.proof[:64]), bytes.fromhex(record.proof[64:])
        try:
            signed = Signed(self._of_federation(_said(record)), key, signature)
            signed.verify(Purpose.RECORD)
        except ProtocolError:
            return False
        if signed.signer != record.peer:
            return False
        if len(self._genuine) >= _REMEMBERED:
            self._genuine.clear()
        self._genuine[record] = None
        return True

    def _of_federation(self, payload: bytes) -> bytes:
        """Return what is signed so that it holds in this federation alone."""
        return bytes.fromhex(self.federation.root) + payload


def _said(record: PeerRecord) -> bytes:
    fields = record.model_dump(mode="json", exclude={"proof"})
    packed: bytes = msgpack.packb(fields)
    return packed


def _stamp(path: Path) -> tuple[int, int, int]:
    """Return what changes when a file is replaced or rewritten; zeros where there is none."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0, 0
    return status.st_mtime_ns, status.st_size, status.st_ino
