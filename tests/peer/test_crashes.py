"""Crashes, damaged files, full disks and wrong clocks.

A peer and a coordinator go on from what they had, or say in one line what is wrong; they never
begin again as if nothing had been.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest
from damage import copied, damage, damages, killed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from town import Target

from bootstrap.coordination.rounds import ClusterRounds, ModelRounds, new_method
from bootstrap.coordinator_rows import RoundRows
from bootstrap.coordinator_store import CoordinatorStore, Layout, Saved
from bootstrap.registry import Registry
from peer.errors import StateError, UserError
from peer.files import hold_directory
from peer.hosting import run
from peer.learning.learner import Vector
from peer.network.messages import PeerRecord
from peer.node import Peer
from peer.plan import Plan
from peer.rounds import Result
from peer.rundir import MetricRow, RunWriter, TopologyRow, read_json, read_metrics
from peer.settings import PeerSettings
from peer.standing import Standing
from peer.state import Checkpoint, Identity, StateDirectory, newest_checkpoint

PLAN = Plan.model_validate(
    {
        "n": 2,
        "rounds": 4,
        "method": "local",
        "model": "custom",
        "data": "own",
        "network": {"request_timeout": 0.1, "linger": 0.1},
    }
)


class Halfway(Target):
    """That learner as one of peers among themselves."""

    def held_losses(self, models: list[Vector]) -> list[float]:
        raise NotImplementedError


RECORD = PeerRecord(
    peer="1" * 32,
    index=1,
    control="tcp://127.0.0.1:7000",
    data="tcp://127.0.0.1:7001",
    incarnation=5,
    first_round=1,
    model="f" * 32,
)


def one_line(error: UserError | StateError) -> None:
    """Fail unless an error is one line that tells a person something."""
    assert len(str(error)) > 20
    assert "\n" not in str(error)


# A peer that is killed.


def model(t: int) -> np.ndarray:
    return np.full(5, t, dtype=np.float32)


def life(directory: Path) -> None:
    """Write all that a peer writes, from where its earlier life ended."""
    with StateDirectory(directory) as state:
        identity = state.identity()
        found = state.newest()
        with RunWriter(directory, PLAN) as rows:
            state.keep_identity(identity.model_copy(update={"index": 0, "ports": (7000, 7001)}))
            state.remember([RECORD])
            for t in range(1 if found is None else found.t + 1, PLAN.rounds + 1):
                rows.append(MetricRow(t=t, index=0), TopologyRow(t=t, index=0))
                state.save(Checkpoint(PLAN.digest, 0, t, model(t), {}, {}))
            rows.write_traffic({})
            rows.write_summary(wall_s=1.0)


def test_killed_before_any_file_operation_a_peer_goes_on(tmp_path: Path) -> None:
    lives = 0
    for operation in count():
        directory = tmp_path / f"{operation}"
        if not killed(operation, directory, lambda: life(directory)):  # noqa: B023
            break
        lives += 1
        held = newest_checkpoint(directory)
        written = directory / "identity.json"
        before = Identity.load(written) if written.exists() else None
        # Killed in its second life, too.
        killed(operation // 2, directory, lambda: life(directory))  # noqa: B023
        newest = newest_checkpoint(directory)
        assert (newest.t if newest else 0) >= (held.t if held else 0)
        life(directory)
        found = newest_checkpoint(directory)
        assert found is not None
        assert found.t == PLAN.rounds
        np.testing.assert_array_equal(found.model, model(PLAN.rounds))
        after = Identity.load(written)
        assert before is None or (before.peer, after.learned) == (after.peer, True)
        assert [row.t for row in read_metrics(directory)] == [1, 2, 3, 4]
        assert not list(directory.rglob("*.new"))
    assert lives > 30


# A peer whose files are damaged.


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state of a peer that has run to its end."""
    state = tmp_path_factory.mktemp("finished")
    run(PLAN, make_learner=Halfway, state=state)
    with StateDirectory(state / "replica-0") as directory:
        directory.remember(
            [RECORD]
        )  # a run of milliseconds may be over before it remembers anybody
    return state / "replica-0"


def resumed(directory: Path) -> Result:
    """Run a peer on a state directory as the command does. Raises UserError and StateError."""
    given_settings = PeerSettings.gather(config=None, index=0, state=directory)
    return asyncio.run(Peer(given_settings, plan=PLAN, make_learner=Halfway).run())


def goes_on_or_says(directory: Path, model_at: dict[int, np.ndarray], peer: str) -> None:
    """Fail unless a peer goes on from a model that it had, or says in one line what is wrong."""
    held = {file.name for file in directory.glob("checkpoint-*")}
    try:
        result = resumed(directory)
    except (UserError, StateError) as error:
        one_line(error)
        return
    assert held
    assert result.rounds == PLAN.rounds
    np.testing.assert_array_equal(result.model, model_at[PLAN.rounds])
    assert Identity.load(directory / "identity.json").peer == peer


FILES = (
    "identity.json", "checkpoint-0.safetensors", "checkpoint-1.safetensors", "peers.json",
    "plan.toml", "metrics.jsonl", "topology.jsonl", "summary.json", "traffic.json", "health.json",
    "models/peer-000.safetensors", "lock",
)  # fmt: skip


def test_every_file_is_damaged_in_these_tests(finished: Path) -> None:
    there = {str(path.relative_to(finished)) for path in finished.rglob("*") if path.is_file()}
    assert there == set(FILES)


def check_damages(
    finished: Path, directory: Path, harms: list[tuple[str, tuple[str, int, bytes]]]
) -> None:
    target = Target(PLAN, 0)
    models = {0: target.initial()}
    for t in range(1, PLAN.rounds + 1):
        models[t] = target.fit(models[t - 1], t)
    copied(finished, directory)
    for name, harm in harms:
        damage(directory / name, *harm)
    goes_on_or_says(directory, models, Identity.load(finished / "identity.json").peer)


one_file = st.tuples(st.sampled_from(FILES), damages()).map(lambda harm: [harm])
two_files = st.lists(
    st.tuples(st.sampled_from(FILES), damages()),
    min_size=2,
    max_size=2,
    unique_by=lambda harm: harm[0],
)
calm = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(calm, max_examples=40)
@given(harms=one_file)
def test_a_damaged_file_is_no_fresh_start(
    finished: Path, tmp_path: Path, harms: list[tuple[str, tuple[str, int, bytes]]]
) -> None:
    check_damages(finished, tmp_path / "state", harms)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(calm, max_examples=1500)
@given(harms=st.one_of(one_file, two_files))
def test_damaged_files_are_no_fresh_start_at_length(
    finished: Path, tmp_path: Path, harms: list[tuple[str, tuple[str, int, bytes]]]
) -> None:
    check_damages(finished, tmp_path / "state", harms)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (
            ("checkpoint-0.safetensors", "checkpoint-1.safetensors"),
            "the checkpoints in .* are gone",
        ),
        (("identity.json",), "holds a run but no identity.json"),
        (
            ("identity.json", "checkpoint-0.safetensors", "checkpoint-1.safetensors"),
            "holds a run but no identity.json",
        ),
    ],
)
def test_lost_files_are_missed(
    finished: Path, tmp_path: Path, lost: tuple[str, ...], message: str
) -> None:
    directory = copied(finished, tmp_path / "state")
    for name in lost:
        (directory / name).unlink()
    with pytest.raises(StateError, match=message) as caught:
        resumed(directory)
    assert "another --state" in caught.value.hint


def test_a_damaged_row_is_told_at_the_start(finished: Path, tmp_path: Path) -> None:
    directory = copied(finished, tmp_path / "state")
    rows = (directory / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_bytes(rows[0] + b"{}\n" + b"".join(rows[1:]))
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2") as caught:
        resumed(directory)
    assert "remove that line" in caught.value.hint


# Disks.

WHOLE = """
n = 2
rounds = 12
method = "local"
model = "sklearn-sgd"
[partition]
train_per_peer = 60
[network]
linger = 0
"""


def two_peers(plan: Path, state: Path) -> list[str]:
    """Return the command of two peers in a process that need nobody else."""
    named = ["--plan", str(plan), "--index", "0", "--replicas", "2", "--state", str(state)]
    return [sys.executable, "-m", "peer", *named]


def whole_run(
    plan: Path, state: Path, prepare: Callable[[], None] | None = None, *, text: str = WHOLE
) -> subprocess.CompletedProcess[str]:
    """Run both to the end; `prepare` is done by their process first."""
    plan.write_text(text)
    return subprocess.run(
        two_peers(plan, state),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        preexec_fn=prepare,
    )


def ends_the_same(states: list[Path], rounds: int = 12) -> None:
    """Fail unless runs have finished with the same models, bit by bit."""
    for replica in ("replica-0", "replica-1"):
        found = [newest_checkpoint(state / replica) for state in states]
        assert all(checkpoint is not None and checkpoint.t == rounds for checkpoint in found)
        first, *others = [checkpoint.model for checkpoint in found if checkpoint is not None]
        for other in others:
            np.testing.assert_array_equal(first, other)


def says_one_line(ended: subprocess.CompletedProcess[str], reason: str) -> None:
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    lines = ended.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert reason in errors[0]
    assert not [line for line in lines if "ignored" in line]


def test_a_disk_that_takes_no_more_ends_a_peer_and_loses_nothing(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"

    def limit() -> None:  # what a full disk is, for this process alone
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

    says_one_line(whole_run(plan, tmp_path / "ill", limit), "File too large")
    assert 1 <= max(row.t for row in read_metrics(tmp_path / "ill" / "replica-0")) < 12
    for state in ("ill", "well"):
        assert whole_run(plan, tmp_path / state).returncode == 0
    ends_the_same([tmp_path / "ill", tmp_path / "well"])


MOUNTED = """
mount -t tmpfs -o size=48k tmpfs {state} || exit 77
{peers} 2> {state}.full; echo $? > {state}.codes
mount -o remount,size=8m,ro {state}
{peers} 2> {state}.readonly; echo $? >> {state}.codes
mount -o remount,rw {state}
{peers} 2> {state}.well; echo $? >> {state}.codes
cp -r {state}/. {state}.kept
"""


@pytest.mark.slow
def test_a_full_and_a_read_only_disk(tmp_path: Path) -> None:
    state, plan = tmp_path / "state", tmp_path / "plan.toml"
    state.mkdir()
    plan.write_text(WHOLE)
    script = MOUNTED.format(state=state, peers=" ".join(two_peers(plan, state)))
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], capture_output=True, check=False, timeout=110
    )
    if ended.returncode in (1, 77):
        pytest.skip("no disk can be mounted here")
    codes = list(map(int, Path(f"{state}.codes").read_text().split()))
    assert codes == [2, 2, 0]
    for name, reason in (("full", "No space left"), ("readonly", "Read-only file system")):
        says_one_line(
            subprocess.CompletedProcess([], 2, "", Path(f"{state}.{name}").read_text()), reason
        )
    assert whole_run(plan, tmp_path / "well").returncode == 0
    ends_the_same([Path(f"{state}.kept"), tmp_path / "well"])


LONG = WHOLE.replace("rounds = 12", "rounds = 104")


def life_until(plan: Path, state: Path, **moment: Any) -> int:
    """Let two peers live until they are killed before a file operation; return the exit code."""
    script = f"import damage; damage.kill_before(directory={str(state)!r}, **{moment!r})\n"
    script += "from peer.cli import main; main()"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", script, *two_peers(plan, state)[3:]],
        capture_output=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert ended.returncode in (-signal.SIGKILL, 0), ended.stderr
    return ended.returncode


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_process_killed_fifty_times_over_its_whole_run_ends_the_same(tmp_path: Path) -> None:
    plan, state, rng = tmp_path / "plan.toml", tmp_path / "ill", random.Random(7)
    plan.write_text(LONG)
    deaths = []
    for number in range(50):
        found = newest_checkpoint(state / "replica-0")
        reached = 0 if found is None else found.t
        if number % 5 < 2:  # in its start, or soon after
            moment: dict[str, Any] = {"operation": rng.randrange(60)}
        else:  # about that round is written down, which is 2 % of the run further each time
            ahead = max(1, 2 * (number + 1) - reached)
            moment = {"operation": rng.randrange(8), "times": ahead}
            moment["name"] = "replica-0/.checkpoint-"
        assert life_until(plan, state, **moment) == -signal.SIGKILL
        deaths.append(reached)
    assert max(later - one for one, later in pairwise([*deaths, 104])) < 15
    for name in ("ill", "well"):
        assert whole_run(plan, tmp_path / name, text=LONG).returncode == 0
    ends_the_same([tmp_path / "ill", tmp_path / "well"], 104)


# Clocks.


def test_a_clock_that_jumps_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Patient by monotonic time, however slow the machine: nobody is left out.
    patient = {"request_timeout": 60, "probe_interval": 30, "probe_timeout": 30, "suspicion": 60}
    changes = {"n": 4, "rounds": 12, "method": "random", "network": {**patient, "linger": 10}}
    plan = Plan.model_validate(PLAN.model_dump() | changes)
    calm_results = run(plan, make_learner=Halfway, state=tmp_path / "calm")
    rng = random.Random(3)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + rng.uniform(-1e9, 1e9))
    results = run(plan, make_learner=Halfway, state=tmp_path / "jumping")
    again = run(plan, make_learner=Halfway, state=tmp_path / "jumping")
    for calm_result, result, restarted in zip(calm_results, results, again, strict=True):
        np.testing.assert_array_equal(calm_result.model, result.model)
        np.testing.assert_array_equal(calm_result.model, restarted.model)
        assert sum(row.late + row.missing for row in read_metrics(result.state)) == 0


class Unhurried(Halfway):
    """That learner, of whose rounds there are some twenty a second."""

    def fit(self, model: Vector, t: int) -> Vector:
        time.sleep(0.05)
        return super().fit(model, t)


class Known:
    """Peers of one process that live until they are stopped, and whom each of them knows."""

    def __init__(self, directory: Path) -> None:
        changes = {"n": 3, "rounds": 100_000, "method": "random", "min_peers": 2}
        self.plan = Plan.model_validate(PLAN.model_dump() | changes)
        self.lives: dict[int, asyncio.Task[Result]] = {}
        self._directory = directory
        self._worker = ThreadPoolExecutor(1)

    async def start(self, index: int, **more: Any) -> str:
        """Start a peer; return its address."""
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        state = self._directory / f"{index}"
        peer = Peer(
            PeerSettings.gather(config=None, index=index, state=state, **more),
            plan=self.plan,
            make_learner=Unhurried,
            on_listening=listening.set_result,
            worker=self._worker,
        )
        self.lives[index] = asyncio.create_task(peer.run(), name=f"peer {index}")
        return await listening

    async def stop(self, index: int) -> None:
        """End a peer's life."""
        life = self.lives.pop(index)
        life.cancel()
        with suppress(asyncio.CancelledError):
            await life

    async def until(self, index: int, known: list[int]) -> None:
        """Wait until a peer knows these others; the failure of any ends the wait."""
        async with asyncio.timeout(60):
            while self._health(index).get("known") != known:
                await asyncio.sleep(0.05)
                for life in self.lives.values():
                    assert not life.done(), life.exception()

    def _health(self, index: int) -> dict[str, Any]:
        path = self._directory / f"{index}" / "health.json"
        return read_json(path) if path.exists() else {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for index in list(self.lives):
            await self.stop(index)
        self._worker.shutdown()


async def test_a_clock_set_on_by_decades_shuts_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.vitals.HEALTH_INTERVAL", 0.1)
    async with Known(tmp_path) as town:
        first = await town.start(0)
        await town.start(1, peer=[first])
        with monkeypatch.context() as unset:  # no battery keeps its clock: it begins in 1970
            unset.setattr("peer.state.time", SimpleNamespace(time=lambda: 100.0))
            before = await town.start(2, peer=[first])
        for index, known in enumerate([[1, 2], [0, 2], [0, 1]]):
            await town.until(index, known)
        await town.stop(2)
        for index in (0, 1):
            await town.until(index, [1 - index])
        # By now its clock has been set. Elsewhere it is known by what it says of itself alone.
        with occupied(before):
            assert await town.start(2, peer=[first]) != before
        for index, known in enumerate([[1, 2], [0, 2], [0, 1]]):
            await town.until(index, known)


@contextmanager
def occupied(address: str) -> Iterator[None]:
    """Take the port of a peer that has ended."""
    host, port = address.removeprefix("tcp://").split(":")
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, int(port)))
        taken.listen()
        yield


# A coordinator.

LAYOUT = Layout(model="e" * 32, size=6, trainable=5, fingerprint="")


def central(method: str) -> Plan:
    clusters = {"kind": "rotation", "clusters": 2}
    return Plan.model_validate({"n": 4, "rounds": 4, "method": method, "partition": clusters})


def office(method: str, directory: Path) -> None:
    """Live as a coordinator, from where its earlier life ended."""
    with hold_directory(directory):
        coordinate(central(method), directory)


def coordinate(plan: Plan, directory: Path) -> None:
    """Write all that a coordinator writes."""
    registry, saved = opened(plan, directory)
    for index in range(4):
        registry.enrol(f"{index}" * 32, index, 0.0)
        registry.save(directory)
    store, rows = CoordinatorStore(directory, plan), RoundRows(directory, plan)
    done = 0 if saved is None else saved.method.version
    rounds = new_method(plan, LAYOUT.size, LAYOUT.trainable) if saved is None else saved.method
    owners = {index: f"{index}" * 32 for index in range(4)}
    if saved is None:
        store.save(Saved(LAYOUT, rounds, owners, Standing({}), (0, 1, 2, 3)))
    for t in range(done + 1, 4):
        moved(rounds, t)
        standing = Standing(dict(rounds.places), dict(rounds.places))
        rows.begin(t, standing, ())
        store.save(Saved(LAYOUT, rounds, owners, standing, (0, 1, 2, 3)))
        rows.add(t, 0, 0.5)


def moved(rounds: object, t: int) -> None:
    """Let a round have happened."""
    update = np.full(6, t, dtype=np.float32)
    if isinstance(rounds, ModelRounds):
        rounds.restore(
            t, 1, dict.fromkeys(range(4), 0), [update * (j + 1) for j in range(rounds.c)]
        )
    else:
        assert isinstance(rounds, ClusterRounds)
        tree = rounds.server.tree
        for index in range(4):
            tree.admit(index)
        tree.nodes[0].update, rounds.version = update, t


def opened(plan: Plan, directory: Path) -> tuple[Registry, Saved | None]:
    """Take up a coordinator's state as the node does. Raises UserError and StateError."""
    registry = Registry(n=plan.n, plan=plan.digest, model=None, reclaim_after=60.0)
    registry.load(directory, 0.0)
    registry.save(directory)
    saved = CoordinatorStore(directory, plan).load()
    RunWriter(directory, plan).close()
    return registry, saved


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cfl", "ifca", "fedavg"])
def test_killed_before_any_file_operation_a_coordinator_goes_on(
    tmp_path: Path, method: str
) -> None:
    lives = 0
    for operation in count():
        directory = tmp_path / f"{operation}"
        work: Callable[[], None] = lambda: office(method, directory)  # noqa: B023, E731
        if not killed(operation, directory, work):
            break
        lives += 1
        with hold_directory(directory):
            _, before = opened(central(method), directory)
        office(method, directory)
        _, after = opened(central(method), directory)
        assert after is not None
        assert after.method.version == 3
        assert before is None or before.method.version <= 3
    assert lives > 25


@pytest.fixture(scope="module")
def offices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state of a coordinator of each method."""
    directory = tmp_path_factory.mktemp("offices")
    for method in ("cfl", "ifca"):
        office(method, directory / method)
    return directory


@settings(calm, max_examples=150)
@given(data=st.data(), method=st.sampled_from(["cfl", "ifca"]), harm=damages())
def test_a_coordinators_damaged_file_is_no_fresh_start(
    offices: Path, tmp_path: Path, data: st.DataObject, method: str, harm: tuple[str, int, bytes]
) -> None:
    directory = copied(offices / method, tmp_path / "state")
    files = sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())
    damage(directory / data.draw(st.sampled_from(files)), *harm)
    try:
        registry, saved = opened(central(method), directory)
    except (UserError, StateError) as error:
        one_line(error)
        return
    assert [registry.index_of(f"{index}" * 32) for index in range(4)] == [0, 1, 2, 3]
    assert saved is not None
    assert saved.method.version == 3
    assert saved.owners == {index: f"{index}" * 32 for index in range(4)}
    (first, *_) = saved.method.models().values()
    np.testing.assert_array_equal(first, np.full(6, 3, dtype=np.float32))


@pytest.mark.parametrize("lost", ["registry.json", "coordinator.json", "tree/tree.json"])
def test_a_coordinators_lost_file_is_missed(offices: Path, tmp_path: Path, lost: str) -> None:
    directory = copied(offices / "cfl", tmp_path / "state")
    (directory / lost).unlink()
    with pytest.raises(StateError, match=r"holds a run but no|is lost"):
        opened(central("cfl"), directory)
