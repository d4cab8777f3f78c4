"""Federations with keys: fresh peers enrol themselves, strangers stay outside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from live import Start, command, finished, log, small, wait_for
from typer.testing import CliRunner

from bootstrap.server import BootstrapNode
from peer.cli import app
from peer.errors import UserError
from peer.hosting import host
from peer.network.federation import Credentials, Federation, found, rewrite
from peer.network.identity import IdentityKey
from peer.node import Peer
from peer.plan import Plan
from peer.rundir import read_metrics
from peer.settings import PeerSettings, replica_states
from peer.state import newest_checkpoint
from simulations.processes import Worker

PLAN = small(n=3, rounds=3, method="random", model="sklearn-sgd", matching={}, partition={})
PATIENCE = 100.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of a federation that a token admits to; its keys are beside it."""
    path = tmp_path / "federation.toml"
    found(path, tmp_path, token=True)
    return path


async def learn(plan: Plan, state: Path, file: Path | None) -> dict[int, bytes]:
    """Run a plan's federation in this process; return the models by index."""
    credentials = None
    if file is not None:
        credentials = Credentials(IdentityKey.load(file.with_name("bootstrap.pem")), file)
    async with BootstrapNode(
        plan, listen="127.0.0.1:0", state=state / "bootstrap", credentials=credentials
    ) as node:
        serving = asyncio.create_task(node.serve())
        settings = PeerSettings.gather(
            config=None,
            bootstrap=[node.address.rpartition("@")[2]],
            state=state / "peers",
            replicas=plan.n,
            federation=file,
        )
        await host(settings)
        serving.cancel()
        assert node.traffic.snapshot()["faults"] == {}
    saved = [newest_checkpoint(path) for path in replica_states(state / "peers")]
    return {one.index: one.model.tobytes() for one in saved if one is not None}


@pytest.mark.parametrize("method", ["random", "cfl"])
async def test_fresh_peers_learn_what_they_would_without_keys(
    tmp_path: Path, file: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = PLAN.model_copy(update={"method": method})
    with_keys = await learn(plan, tmp_path / "keys", file)
    said = caplog.text
    assert len(with_keys) == plan.n
    assert with_keys == await learn(plan, tmp_path / "none", None)
    token = Federation.load(file).token
    assert token is not None
    for state in replica_states(tmp_path / "keys" / "peers"):
        key = IdentityKey.load(state / "identity.pem")
        said += "".join(path.read_text() for path in state.glob("*.json*"))
        assert key.peer in said
        assert key.curve.secret.hex() not in said
    assert token.get_secret_value() not in said


@pytest.mark.parametrize("informed", [True, False])
async def test_one_that_is_revoked_ends_or_says_so(
    tmp_path: Path, file: Path, informed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends where its own file tells it; with an old file it tries on, and says that nobody
    admits it. What it has learned stays; the other learns on."""
    network = {
        "request_timeout": 2.0,
        "probe_interval": 0.2,
        "probe_timeout": 0.5,
        "suspicion": 0.5,
    }
    plan = small(n=2, rounds=100_000, method="random", model="sklearn-sgd", network=network)
    old = tmp_path / "old.toml"
    rewrite(old, Federation.load(file))
    credentials = Credentials(IdentityKey.load(file.with_name("bootstrap.pem")), file)
    async with BootstrapNode(plan, listen="127.0.0.1:0", credentials=credentials) as node:
        serving = asyncio.create_task(node.serve())
        states, running = [tmp_path / "revoked", tmp_path / "other"], []
        for state, its in zip(states, [file if informed else old, file], strict=True):
            settings = PeerSettings.gather(
                config=None,
                bootstrap=[node.address.rpartition("@")[2]],
                state=state,
                federation=its,
            )
            running.append(asyncio.create_task(Peer(settings).run()))

        def reached(state: Path) -> int:
            saved = newest_checkpoint(state) if state.exists() else None
            return 0 if saved is None else saved.t

        async def until(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(PATIENCE):
                while not condition():  # noqa: ASYNC110 - of what no event tells
                    await asyncio.sleep(0.1)

        await until(lambda: min(map(reached, states)) >= 2)
        before = [reached(state) for state in states]
        revoked = IdentityKey.load(states[0] / "identity.pem").peer
        rewrite(file, Federation.load(file).without(revoked))
        if informed:
            with pytest.raises(UserError, match=f"peer {revoked} is revoked"):
                await asyncio.wait_for(running[0], PATIENCE)
        else:
            await until(lambda: "those who are known do not admit this peer" in caplog.text)
            assert not running[0].done()
        await until(lambda: reached(states[1]) > before[1] + 2)
        assert reached(states[0]) >= before[0]
        for task in (*running, serving):
            task.cancel()
        await asyncio.gather(*running, serving, return_exceptions=True)
    errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert len(errors) == len(set(errors))
    assert any("does not admit" in error for error in errors) is not informed


@pytest.mark.slow
def test_a_peer_of_another_federation_stays_outside(
    federation: Start, tmp_path: Path, file: Path
) -> None:
    key = file.with_name("bootstrap.pem")
    run = federation(
        PLAN,
        start=2,
        peer_flags=["--federation", str(file)],
        bootstrap_flags=["--federation", str(file), "--key", str(key)],
    )
    late: Worker = run.peers[2]
    place = late.command.index(str(file))
    other = tmp_path / "other" / "federation.toml"
    found(other, other.parent, token=True)
    late.command[place] = str(other)
    late.start()
    wait_for(lambda: "no bootstrap node yet" in log(late), PATIENCE)
    late.kill()
    assert "handshake" in log(run.bootstrap)
    assert [finished(worker) for worker in run.peers] == [0, 0, 0]
    late.command[place] = str(file)
    late.start()
    run.wait(timeout=PATIENCE)
    assert [read_metrics(worker.directory)[-1].t for worker in run.peers] == [PLAN.rounds] * 3


def ran(*arguments: str) -> str:
    """Run a command of `peer` here, and return what it printed. Raises what it raises."""
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None:
        raise result.exception
    return result.output


def test_commands_make_a_federation(tmp_path: Path) -> None:
    file, keys, state = tmp_path / "federation.toml", tmp_path / "keys", str(tmp_path / "p")
    ran("federation", "new", str(file), "--keys", str(keys), "--no-token")
    for path in (file, keys / "root.pem", keys / "bootstrap.pem"):
        assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UserError, match="exists"):
        ran("federation", "new", str(file), "--keys", str(tmp_path / "others"))
    before = file.read_bytes()
    ran("federation", "new", str(file), "--if-missing")
    assert file.read_bytes() == before
    ran("keys", "new", "--state", state)
    shown = dict(line.split() for line in ran("keys", "show", "--state", state).splitlines())
    ran("federation", "add", str(file), shown["card"], "--name", "p")
    (member,) = Federation.load(file).member
    assert (member.peer, member.curve, member.name) == (shown["id"], shown["key"], "p")
    ran("federation", "revoke", str(file), shown["id"])
    assert Federation.load(file).member == ()
    assert Federation.load(file).revoked == (shown["id"],)
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UserError, match="no card"):
        ran("federation", "add", str(file), "12")
    with pytest.raises(UserError, match="is no id"):
        ran("federation", "revoke", str(file), "12")


def test_revoking_can_leave_the_token_behind(file: Path) -> None:
    before = Federation.load(file)
    ran("federation", "revoke", str(file), "a" * 32)
    assert Federation.load(file).token == before.token
    ran("federation", "revoke", str(file), "b" * 32, "--new-token")
    after = Federation.load(file)
    assert after.token != before.token
    assert after.revoked == ("a" * 32, "b" * 32)
    assert (after.root, after.bootstrap) == (before.root, before.bootstrap)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("root = 1", "root"),
        ("= 1", "not TOML"),
        (f'root = "{"0" * 64}"', "bootstrap"),
        ("", "root"),
        ("\0" * 100, "not TOML"),
    ],
)
def test_a_file_that_says_no_federation(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "federation.toml"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(UserError, match=match):
        Federation.load(file)


def test_a_file_that_others_can_read_is_refused(file: Path) -> None:
    file.chmod(0o640)
    with pytest.raises(UserError, match="others can read"):
        Federation.load(file)


def test_a_wrong_token_is_not_repeated(file: Path) -> None:
    secret = "c0ffee" * 5
    file.write_text(file.read_text().replace('token = "', f'token = "{secret}'))
    with pytest.raises(UserError, match="token") as error:
        Federation.load(file)
    assert secret not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({"federation": "file", "peer": ["127.0.0.1:1"]}, "go together"),
        ({"peer": [f"{'0' * 64}@127.0.0.1:1"]}, "go together"),
        ({"bootstrap": [f"{'0' * 64}@127.0.0.1:1"]}, "--federation is missing"),
        ({"listen": "0.0.0.0:0"}, "without keys"),
        ({"federation": "none"}, "cannot read"),
        ({"federation": "strict"}, "does not admit this peer"),
    ],
)
async def test_what_does_not_fit_is_told(
    tmp_path: Path, flags: dict[str, object], match: str
) -> None:
    if "federation" in flags:
        path = tmp_path / f"{flags['federation']}.toml"
        if flags["federation"] in ("file", "strict"):
            found(path, tmp_path / "keys", token=flags["federation"] == "file")
        flags = flags | {"federation": path}
    given: dict[str, object] = {"bootstrap": ["127.0.0.1:1"]} | flags
    settings = PeerSettings.gather(config=None, state=tmp_path / "p", **given)
    with pytest.raises(UserError, match=match):
        await Peer(settings).run()


def test_the_bootstrap_node_needs_its_own_key(tmp_path: Path, file: Path) -> None:
    from bootstrap import cli

    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.to_toml())
    for flags, match in [
        (["--federation", str(file)], "go together"),
        (["--federation", str(file), "--key", str(tmp_path / "root.pem")], "is not the key"),
        (["--listen", "0.0.0.0:0"], "without keys"),
    ]:
        result = CliRunner().invoke(cli.app, ["--plan", str(plan), *flags])
        assert isinstance(result.exception, UserError)
        assert match in str(result.exception)


def test_settings_show_no_secret(file: Path) -> None:
    token = Federation.load(file).token
    assert token is not None
    shown = command("--federation", str(file), "config", "show").stdout
    assert str(file) in shown
    assert token.get_secret_value() not in shown
