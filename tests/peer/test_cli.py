"""The `peer` command: mistakes told in a line, where settings come from, health."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import alone, command, log, small, wait_for

from peer import Plan, run
from simulations.processes import Worker, free_port

PLAN = small(n=3, rounds=2, method="random", model="sklearn-sgd", matching={}, partition={})


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A peer with index 0 that waits for two others; what it was given is in its folder."""
    folder = tmp_path_factory.mktemp("waiting")
    plan = folder / "plan.toml"
    plan.write_text(PLAN.to_toml())
    address = f"127.0.0.1:{free_port()}"
    (folder / "address").write_text(address)
    worker = alone(plan, 0, folder / "state", "--listen", address)
    worker.start()
    wait_for(lambda: worker.log.exists() and "waiting for the start" in log(worker), 30)
    yield worker
    assert worker.running, log(worker)
    worker.kill()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state directory of a peer that has run a plan to its end."""
    folder = tmp_path_factory.mktemp("done")
    run(PLAN, state=folder)
    return folder / "replica-0"


def mistake(*arguments: str) -> str:
    """Run a command that must end with 2 and one line about what is wrong, maybe with a hint."""
    ended = command(*arguments)
    said = [line for line in ended.stderr.splitlines() if line.startswith(("error:", "hint:"))]
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert [line[:6] for line in said] in (["error:"], ["error:", "hint: "])
    return said[0].removeprefix("error: ")


PLAN_FLAGS = ("--plan", "PLAN", "--index", "1", "--state", "STATE")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no federation to join"),
        (["--plan", "PLAN"], "--plan needs --index"),
        (["--plan", "PLAN", "--index", "1", "--bootstrap", "127.0.0.1:1"], "exclude each other"),
        (["--plan", "UNKNOWN", "--index", "1", "--state", "STATE"], "unknown key matching.kk"),
        (["--plan", "NOTOML", "--index", "1", "--state", "STATE"], "is not valid TOML"),
        ([*PLAN_FLAGS, "--listen", "nonsense"], "'nonsense' is not an address"),
        ([*PLAN_FLAGS, "--listen", "ADDRESS"], "cannot listen on"),
        ([*PLAN_FLAGS, "--listen", "nonsense", "--replicas", "2"], "'nonsense' is not an address"),
        ([*PLAN_FLAGS, "--peer", "127.0.0.1:99999"], "99999 is not a port"),
        (["--plan", "missing.toml", "--index", "0", "--peer", "x:y"], "'x:y' is not an address"),
        (["--bootstrap", "127.0.0.1:0"], "0 is not a port that can be dialled"),
        ([*PLAN_FLAGS, "--replicas", "0"], "replicas"),
        ([*PLAN_FLAGS, "--mqtt", "mqtts://me:hunter2@broker"], "holds a password"),
        ([*PLAN_FLAGS, "--mqtt", "mqtts://broker", "--mqtt-ca", "missing"], "cannot use the CA"),
        (["watch"], "no broker is named"),
        (["watch", "--mqtt", "mqtts://broker"], "what this federation runs is not known"),
        ([*PLAN_FLAGS, "--data", "nothing"], "there is no data source 'nothing'"),
        ([*PLAN_FLAGS, "--model", "m:f"], "sklearn-sgd, not custom"),
        ([*PLAN_FLAGS, "--device", "abacus"], "device"),
        ([*PLAN_FLAGS, "--config", "CONFIG"], "colour"),
        ([*PLAN_FLAGS, "--config", "NOTOML"], "cannot read the configuration"),
    ],
)
def test_mistakes_are_told_in_a_line(
    waiting: Worker, tmp_path: Path, flags: list[str], message: str
) -> None:
    (tmp_path / "unknown.toml").write_text("n = 3\n[matching]\nkk = 3\n")
    (tmp_path / "no.toml").write_text("n is three\n")
    (tmp_path / "config.toml").write_text('colour = "blue"\n')
    names = {
        "PLAN": str(waiting.directory.parent / "plan.toml"),
        "ADDRESS": (waiting.directory.parent / "address").read_text(),
        "STATE": str(tmp_path / "state"),
        "UNKNOWN": str(tmp_path / "unknown.toml"),
        "NOTOML": str(tmp_path / "no.toml"),
        "CONFIG": str(tmp_path / "config.toml"),
    }
    assert message in mistake(*(names.get(flag, flag) for flag in flags))


@pytest.mark.parametrize("flags", [["--plan", "missing.toml", "--index", "0"], ["--colour", "red"]])
def test_what_is_not_there(tmp_path: Path, flags: list[str]) -> None:
    ended = command(*flags, "--state", str(tmp_path))
    assert ended.returncode == 2
    assert flags[1] in ended.stderr or flags[0] in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_state_directory_serves_one_process_and_one_plan(
    waiting: Worker, done: Path, tmp_path: Path
) -> None:
    plan = str(waiting.directory.parent / "plan.toml")
    using = ("--plan", plan, "--index", "0", "--state")
    assert "in use by another process" in mistake(*using, str(waiting.directory))
    other = tmp_path / "other.toml"
    other.write_text(PLAN.model_copy(update={"seed": 7}).to_toml())
    flags = ("--plan", str(other), "--index", "0", "--state", str(done))
    assert "another plan" in mistake(*flags)
    assert "give another --state" in command(*flags).stderr
    assert "belongs to peer 0" in mistake("--plan", plan, "--index", "1", "--state", str(done))


def test_a_damaged_state_directory_is_no_fresh_start(done: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.to_toml())
    flags = ("--plan", str(plan), "--index", "0", "--state", str(tmp_path))
    for file in done.glob("checkpoint-*"):
        (tmp_path / file.name).write_bytes(file.read_bytes()[:-1])
    assert "no identity.json" in mistake(*flags)
    (tmp_path / "identity.json").write_bytes((done / "identity.json").read_bytes())
    assert "every checkpoint" in mistake(*flags)
    (tmp_path / "identity.json").write_text("{}")
    assert "identity.json is damaged" in mistake(*flags)


def test_a_service_tells_that_it_trains_and_that_it_has_finished(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    quick = small(n=2, rounds=2, method="random", matching={}, partition={})
    plan.write_text(quick.to_toml())
    flags = ("--plan", str(plan), "--index", "0", "--replicas", "2", "--state", str(tmp_path / "s"))
    first = command(*flags)
    assert first.returncode == 0, first.stderr
    for line in ("peer 0  round 1/2", "peer 1  round 2/2"):
        assert line in first.stderr
    assert "precision" not in first.stderr
    again = command(*flags)
    assert again.stderr.count("already finished: round 2 of 2") == 2
    assert "joining" not in first.stdout + again.stdout


def joining(waiting: Worker, plan: Plan, folder: Path, index: int, *flags: str) -> tuple[str, ...]:
    file = folder / "plan.toml"
    file.write_text(plan.to_toml())
    where = ("--peer", (waiting.directory.parent / "address").read_text())
    state = ("--state", str(folder / "state"))
    return ("--plan", str(file), "--index", str(index), *state, *where, *flags)


def test_an_index_that_another_holds_is_refused(waiting: Worker, tmp_path: Path) -> None:
    begun = time.monotonic()
    message = mistake(*joining(waiting, PLAN, tmp_path, 0))
    assert "index" in message
    assert time.monotonic() - begun < 20


def test_another_plan_or_model_is_refused(waiting: Worker, tmp_path: Path) -> None:
    other = PLAN.model_copy(update={"seed": 7})
    assert "another plan" in mistake(*joining(waiting, other, tmp_path, 1))
    # The state of the refused plan, in which nothing has run, does not stand in the way.
    data = tmp_path / "own.csv"
    data.write_text("a,b,y\n" + "".join(f"{i},1,{i % 10}\n" for i in range(60)))
    flags = joining(waiting, PLAN, tmp_path, 1, "--data", f"csv:{data}#label=y")
    assert "another model" in mistake(*flags)


def shown(*arguments: str, **environment: str) -> dict[str, object]:
    ended = command(*arguments, "config", "show", **environment)
    assert ended.returncode == 0, ended.stderr
    settings: dict[str, object] = json.loads(ended.stdout)
    return settings


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "peer.toml"
    file.write_text('threads = 2\ndata = "digits"\nbootstrap = ["a:1", "b:2"]\nlog = "json"\n')
    settings = shown(
        *("--config", str(file), "--threads", "4", "--bootstrap", "d:4, g:7", "--bootstrap", "h:8"),
        PANMESH_THREADS="3",
        PANMESH_DATA="mnist",
        PANMESH_PEER="e:5, f:6",
        PANMESH_MQTT="mqtts://me:hunter2@broker/town",
        PANMESH_MQTT_PASSWORD="hunter2",
    )
    assert settings["threads"] == 4
    assert settings["data"] == "mnist"
    assert settings["log"] == "json"
    assert settings["bootstrap"] == ["d:4", "g:7", "h:8"]
    assert settings["peer"] == ["e:5", "f:6"]
    assert settings["device"] == "cpu"
    assert settings["mqtt"] == "…@broker/town"
    assert settings["mqtt_password"] == "**********"
    assert shown(PANMESH_CONFIG=str(file))["bootstrap"] == ["a:1", "b:2"]


def test_health_is_that_of_the_event_loop(waiting: Worker, tmp_path: Path) -> None:
    wait_for((waiting.directory / "health.json").exists, 10)
    alive = command("health", "--state", str(waiting.directory))
    assert (alive.returncode, alive.stdout.split(":")[0]) == (0, "alive")
    assert command("health", PANMESH_STATE=str(waiting.directory)).returncode == 0
    told = json.loads((waiting.directory / "health.json").read_text())
    assert (told["known"], told["left_out"]) == ([], [])
    assert min(told["tasks"], told["open_files"]) > 5
    assert 10e6 < told["memory"] < 1e9
    nobody = command("health", "--state", str(tmp_path))
    assert (nobody.returncode, nobody.stdout) == (1, f"no peer has run in {tmp_path}\n")
    unready = command("health", "--ready", "--state", str(waiting.directory))
    assert unready.returncode == 1
    assert unready.stdout.startswith("alive, but it has found no other peer: heard of ")
    report = {"time": time.time() - 90, "ready": True, "status": {"finished": 7}}
    (tmp_path / "health.json").write_text(json.dumps(report))
    silent = command("health", "--state", str(tmp_path))
    assert silent.returncode == 1
    assert re.fullmatch(r"silent: heard of 9\d s ago, after round 7\n", silent.stdout)


def test_replicas_are_healthy_when_all_are(tmp_path: Path) -> None:
    now = {"time": time.time() + 10, "ready": True, "status": {"finished": 7}}
    for number, report in enumerate([now, now, now | {"time": time.time() - 90}]):
        state = tmp_path / f"replica-{number}"
        state.mkdir()
        (state / "health.json").write_text(json.dumps(report))
    some = command("health", "--state", str(tmp_path))
    assert some.returncode == 1
    assert some.stdout.startswith("2 of 3 replicas are alive\nreplica-2 silent: heard of 9")
    (tmp_path / "replica-2" / "health.json").write_text(json.dumps(now))
    every = command("health", "--state", str(tmp_path))
    assert (every.returncode, every.stdout) == (0, "3 of 3 replicas are alive\n")
    every = command("health", "--ready", "--state", str(tmp_path))
    assert (every.returncode, every.stdout) == (0, "3 of 3 replicas are ready\n")
    (tmp_path / "replica-1" / "health.json").write_text(json.dumps(now | {"ready": False}))
    some = command("health", "--ready", "--state", str(tmp_path))
    assert some.returncode == 1
    assert some.stdout.startswith("2 of 3 replicas are ready\nreplica-1 alive, but it has found")


def test_a_key_is_made_once(tmp_path: Path) -> None:
    made = command("keys", "new", "--state", str(tmp_path / "p"))
    assert made.returncode == 0, made.stderr
    file = tmp_path / "p" / "identity.pem"
    before = file.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o600
    shown = command("keys", "show", "--state", str(tmp_path / "p"))
    assert made.stdout.splitlines()[-1] == shown.stdout.splitlines()[0]
    assert "exists" in mistake("keys", "new", "--state", str(tmp_path / "p"))
    assert file.read_bytes() == before
    file.chmod(0o644)
    assert "others can read" in mistake("keys", "show", "--state", str(tmp_path / "p"))
