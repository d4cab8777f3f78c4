"""Keys over real loopback sockets: who gets in, who a message is from, and what strangers reach."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from peer.errors import NotAdmittedError, RefusedError, UnreachableError, UserError
from peer.network import gate as gate_module
from peer.network import transport as module
from peer.network.address import dial_address, key_of
from peer.network.conduct import Conduct
from peer.network.federation import Card, Credentials, Federation, found, rewrite
from peer.network.gate import METADATA
from peer.network.identity import CurveKeys, IdentityKey
from peer.network.messages import (
    Model,
    PeerRecord,
    Ping,
    Pong,
    Pull,
    Reason,
    Reply,
    Request,
    encode,
)
from peer.network.traffic import Fault, Traffic
from peer.network.transport import Buffer, Transport

PATIENCE = 20.0
SHORT = 1.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of a federation that a token admits to."""
    path = tmp_path / "federation.toml"
    found(path, tmp_path, token=True)
    return path


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "REFRESH", 0.05)


async def whoami(request: Request) -> tuple[Reply, Sequence[Buffer]]:
    """Refuse, and say who asks."""
    raise RefusedError(Reason.GONE, request.sender)


@asynccontextmanager
async def member(file: Path, key: IdentityKey | None = None) -> AsyncIterator[Transport]:
    credentials = Credentials(key or IdentityKey.generate(), file)
    async with Transport(
        listen="127.0.0.1:0", handler=whoami, traffic=Traffic(), credentials=credentials
    ) as transport:
        yield transport


async def asked(client: Transport, address: str, patience: float = PATIENCE) -> str:
    """Return who the other side says that this one is."""
    with pytest.raises(RefusedError) as refusal:
        await client.request(address, Ping(updates=()), timeout=patience)
    return refusal.value.detail


async def until_refused(client: Transport, address: str) -> None:
    """Ask until nobody answers."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await client.request(address, Ping(updates=()), timeout=SHORT)
            except UnreachableError:
                return
            except RefusedError:
                await asyncio.sleep(0.05)


async def until_told(client: Transport, address: str, why: str) -> UnreachableError:
    """Ask until it is known why nobody answers, which a busy machine may tell late."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with pytest.raises(UnreachableError) as caught:
                await client.request(address, Ping(updates=()), timeout=SHORT)
            if why in str(caught.value):
                return caught.value


def faults(transport: Transport) -> dict[str, int]:
    counted: dict[str, int] = transport.traffic.snapshot()["faults"]
    return counted


def plain(address: str) -> str:
    """Return the address without its key."""
    return "tcp://" + address.rpartition("@")[2]


async def test_members_know_each_other(file: Path) -> None:
    keys = [IdentityKey.generate(), IdentityKey.generate()]
    async with member(file, keys[0]) as one, member(file, keys[1]) as other:
        assert key_of(other.control) == keys[1].curve.public
        assert await asked(one, other.control) == keys[0].peer
        assert await asked(other, one.data) == keys[1].peer
        assert faults(one) == faults(other) == {}


async def test_the_bootstrap_node_and_listed_members_need_no_token(tmp_path: Path) -> None:
    file, key = tmp_path / "federation.toml", IdentityKey.generate()
    found(file, tmp_path, token=False)
    with pytest.raises(UserError, match="no listed member"):
        Credentials(key, file)
    rewrite(file, Federation.load(file).with_member(Card.of(key)))
    bootstrap = IdentityKey.load(tmp_path / "bootstrap.pem")
    async with member(file, key) as one, member(file, bootstrap) as other:
        assert await asked(one, other.control) == key.peer
        assert await asked(other, one.control) == bootstrap.peer


async def test_nobody_answers_for_the_holder_of_another_key(file: Path) -> None:
    async with member(file) as one, member(file) as other:
        key = IdentityKey.generate().curve.public.hex()
        address = dial_address(f"{key}@{plain(other.control).removeprefix('tcp://')}")
        await until_told(one, address, "another key")
        assert faults(other)["handshake"] > 0
        with pytest.raises(UnreachableError, match="has no key"):
            await one.request(plain(other.control), Ping(updates=()), timeout=SHORT)


@asynccontextmanager
async def stranger(
    address: str, keys: CurveKeys | None, metadata: str = ""
) -> AsyncIterator[zmq.asyncio.Socket]:
    """A socket of whoever knows the address, with CURVE keys or without any."""
    with zmq.asyncio.Context() as context:
        dealer = context.socket(zmq.DEALER)
        dealer.set(zmq.LINGER, 0)
        server = key_of(address)
        if keys is not None and server is not None:
            dealer.set(zmq.CURVE_SERVERKEY, server)
            dealer.set(zmq.CURVE_PUBLICKEY, keys.public)
            dealer.set(zmq.CURVE_SECRETKEY, keys.secret)
        if metadata:
            dealer.set(zmq.METADATA, f"{METADATA}:{metadata}".encode())
        dealer.connect(plain(address))
        try:
            yield dealer
        finally:
            dealer.close()


async def counted(transport: Transport, fault: Fault) -> None:
    async with asyncio.timeout(PATIENCE):
        while str(fault) not in faults(transport):  # noqa: ASYNC110 - counters know no events
            await asyncio.sleep(0.02)


async def test_nothing_of_a_stranger_reaches_the_decoder(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither without encryption, nor with keys of its own, nor with the token but no name, nor in
    another's name: of many messages on either port not one is decoded."""
    decoded: list[int] = []
    decode = module.decode

    def counting(header: bytes | memoryview) -> object:
        decoded.append(len(header))
        return decode(header)

    monkeypatch.setattr(module, "decode", counting)
    header = encode(Ping(updates=(), sender="a" * 32))
    async with member(file) as one, member(file) as other:
        credentials = Credentials(IdentityKey.generate(), file)
        one_name = credentials.key.public.hex()
        elsewhere = key_of(other.control)
        assert elsewhere is not None
        for address in (one.control, one.data):
            for keys, metadata, fault in [
                (None, "", Fault.HANDSHAKE),
                (IdentityKey.generate().curve, "", Fault.UNLISTED),
                (credentials.connecting, "", Fault.UNLISTED),
                (credentials.connecting, one_name + "0" * 128, Fault.UNLISTED),
                (credentials.connecting, "no hex", Fault.UNLISTED),
                # What this peer was told, another cannot use here.
                (credentials.connecting, credentials.introduction(elsewhere), Fault.UNLISTED),
            ]:
                one.traffic = Traffic()
                async with stranger(address, keys, metadata) as dealer:
                    for _ in range(20):
                        await dealer.send(header)
                    await counted(one, fault)
        assert decoded == []
        await asked(other, one.control)
        assert len(decoded) == 2  # the question, and the answer


async def test_who_has_no_keys_is_told_that_it_needs_them(file: Path) -> None:
    async with (
        member(file) as one,
        Transport(listen="127.0.0.1:0", handler=whoami, traffic=Traffic()) as keyless,
    ):
        keyless.introduce(sender="a" * 32, plan="")
        await until_told(keyless, plain(one.control), "does not encrypt, or this one does not")


async def test_without_keys_who_breaks_off_a_handshake_is_only_unreachable() -> None:
    """It has died, or has been stopped: nothing is wrong with its keys."""
    async with (
        Transport(listen="127.0.0.1:0", handler=whoami, traffic=Traffic()) as keyless,
        await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as dying,
    ):
        port = dying.sockets[0].getsockname()[1]
        with pytest.raises(UnreachableError, match=r"within 1 s$"):
            await keyless.request(f"tcp://127.0.0.1:{port}", Ping(updates=()), timeout=SHORT)
        assert faults(keyless) == {}


async def test_nobody_asks_in_the_name_of_another(file: Path) -> None:
    async with member(file) as one, member(file) as other:
        one.introduce(sender="a" * 32, plan="")
        with pytest.raises(UnreachableError):
            await one.request(other.control, Ping(updates=()), timeout=SHORT)
        assert faults(other)["forged"] > 0


async def test_what_no_honest_peer_sends_is_held_against_its_sender(file: Path) -> None:
    evil, good = (Credentials(IdentityKey.generate(), file) for _ in range(2))

    def record(of: Credentials) -> PeerRecord:
        return PeerRecord(
            peer=of.key.peer,
            index=1,
            control="tcp://127.0.0.1:9",
            data="tcp://127.0.0.1:9",
            incarnation=1,
            first_round=1,
            model="a" * 32,
        )

    bad: list[tuple[Fault, list[bytes]]] = [
        (Fault.FRAMES, [b"x", b"y"]),
        (Fault.UNDECODABLE, [b"x"]),
        (Fault.NOT_A_REQUEST, [encode(Pong(updates=(), sender=evil.key.peer))]),
        (Fault.FORGED, [encode(Ping(updates=(), sender=good.key.peer))]),
    ]
    async with member(file) as one:
        conduct = Conduct(one, limit=100.0)
        key = key_of(one.control)
        assert key is not None
        async with stranger(one.control, evil.connecting, evil.introduction(key)) as dealer:
            for fault, frames in bad:
                assert not conduct.left_out(record(evil))
                await dealer.send_multipart(frames)
                await counted(one, fault)
        assert conduct.left_out(record(evil))
        assert not conduct.left_out(record(good))


async def test_a_revoked_peer_is_refused_on_the_connection_it_has(
    file: Path, tmp_path: Path
) -> None:
    key, old = IdentityKey.generate(), tmp_path / "old.toml"
    rewrite(old, Federation.load(file))
    async with (
        member(old, key) as revoked,
        member(file) as one,
        member(file) as other,
        member(file, key) as informed,
    ):
        await asked(revoked, one.control)
        await asked(informed, one.control)
        rewrite(file, Federation.load(file).without(key.peer))
        await until_refused(revoked, one.control)
        # It is told, at once, on this connection and on any other.
        with pytest.raises(NotAdmittedError, match="does not admit this peer"):
            await revoked.request(one.control, Ping(updates=()), timeout=PATIENCE)
        assert faults(one)["unlisted"] > 0
        await asked(other, one.control)
        # One whose own file says so asks nobody any more.
        with pytest.raises(UserError, match=f"peer {key.peer} is revoked"):
            async with asyncio.timeout(PATIENCE):
                while True:
                    with suppress(NotAdmittedError, RefusedError):
                        await informed.request(one.control, Ping(updates=()), timeout=PATIENCE)
    with pytest.raises(UserError, match="is revoked"):
        Credentials(key, file)


async def test_a_listed_peer_that_is_revoked_cannot_connect(tmp_path: Path) -> None:
    file, key = tmp_path / "federation.toml", IdentityKey.generate()
    found(file, tmp_path, token=False)
    rewrite(file, Federation.load(file).with_member(Card.of(key)))
    bootstrap = IdentityKey.load(tmp_path / "bootstrap.pem")
    old = tmp_path / "old.toml"
    rewrite(old, Federation.load(file))
    async with member(file, bootstrap) as one:
        credentials = Credentials(key, old)
        rewrite(file, Federation.load(file).without(key.peer))
        async with Transport(
            listen="127.0.0.1:0", handler=whoami, traffic=Traffic(), credentials=credentials
        ) as late:
            await until_refused(late, one.control)
            refusal = await until_told(late, one.control, "does not admit")
            assert isinstance(refusal, NotAdmittedError)


async def test_members_with_the_new_token_find_each_other_again(file: Path, tmp_path: Path) -> None:
    old = tmp_path / "old.toml"
    rewrite(old, Federation.load(file))
    async with member(file) as one, member(file) as other, member(old) as left_behind:
        await asked(other, one.control)
        await asked(left_behind, one.control)
        rewrite(file, Federation.load(file).with_new_token())
        await until_refused(left_behind, one.control)
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    await other.request(one.control, Ping(updates=()), timeout=SHORT)
                except UnreachableError:
                    continue
                except RefusedError as refusal:
                    assert refusal.reason == Reason.GONE
                    break


async def test_a_mistake_while_deciding_costs_one_connection(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with member(file) as one, member(file) as other:
        with monkeypatch.context() as patch:
            patch.setattr(Credentials, "admit", lambda *_: 1 // 0)
            await until_told(one, other.control, "does not admit")
        assert "ZeroDivisionError" in caplog.text
        await asked(one, other.control)


async def test_models_arrive_whole(file: Path) -> None:
    """Eight megabytes in chunks, and back comes what was sent."""
    chunks = [bytes([number]) * module.CHUNK for number in range(8)]

    async def handler(request: Request) -> tuple[Reply, Sequence[Buffer]]:
        return Model(round=1, model_bytes=8 * module.CHUNK, samples=1), chunks

    credentials = Credentials(IdentityKey.generate(), file)
    async with (
        Transport(
            listen="127.0.0.1:0", handler=handler, traffic=Traffic(), credentials=credentials
        ) as one,
        member(file) as other,
    ):
        pull = Pull(round=1, staleness=0, wait=0)
        _, received = await other.request(
            one.data, pull, timeout=PATIENCE, max_payload=8 * module.CHUNK
        )
        assert [bytes(chunk) for chunk in received] == chunks


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "192.0.2.1:0"])
async def test_nobody_listens_to_strangers_unasked(listen: str) -> None:
    transport = Transport(listen=listen, handler=whoami, traffic=Traffic())
    with pytest.raises(UserError, match="without keys"):
        async with transport:
            pass


async def test_secrets_are_in_no_log(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key = IdentityKey.generate()
    token = Federation.load(file).token
    assert token is not None
    async with member(file, key) as one, member(file) as other:
        await asked(one, other.control)
        async with stranger(other.control, IdentityKey.generate().curve) as dealer:
            await dealer.send(b"")
            await counted(other, Fault.UNLISTED)
        rewrite(file, Federation.load(file).without("a" * 32))
        async with asyncio.timeout(PATIENCE):
            while "has changed" not in caplog.text:  # noqa: ASYNC110 - a log knows no events
                await asyncio.sleep(0.02)
    credentials = Credentials(key, file)
    said = caplog.text + repr(credentials.federation) + repr(vars(credentials))
    assert token.get_secret_value() not in said
    for secret in (key.curve.secret, credentials.connecting.secret):
        assert secret.hex() not in said
        assert repr(secret) not in said
