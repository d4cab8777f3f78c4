"""Peers with a coordinator, over real sockets: secrets, restarts, newcomers, and what it sees."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from town import BUFFERS, SECRET, SIZE, Target, Town, laboratory, live, small, town

from bootstrap.coordination.cfl import ClusteredServer
from bootstrap.coordination.rounds import ClusterRounds
from bootstrap.coordinator import Coordinator
from peer import run
from peer.errors import RefusedError, StateError, UserError
from peer.learning.learner import Vector
from peer.network.limits import Allowance
from peer.network.messages import Fetch, Reply, Request
from peer.network.transport import Buffer, Transport
from peer.permutation import Permutation
from peer.plan import Plan
from peer.rounds import Result
from peer.rundir import read_metrics, read_topology
from peer.state import Checkpoint, StateDirectory
from simulations.clustered import ClusteredPopulation


def models_of(results: Sequence[Result]) -> list[Vector]:
    return [result.model for result in results]


async def test_the_coordinator_never_sees_an_update_in_order_or_a_permuted_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = small("cfl", cfl={"patience": 2, "permute": True})
    received: list[dict[int, Vector]] = []
    nodes: list[Vector] = []

    class Spy(ClusteredServer):
        def step(self, t: int, updates: Any, weights: Any = None) -> Any:
            received.append(dict(updates))
            attempts = super().step(t, updates, weights)
            nodes.extend(node.update for node in self.tree.nodes)
            return attempts

    wire: list[Vector] = []
    pull = Coordinator._pull

    async def listen(self: Coordinator, record: Any, task: Any) -> Vector:
        wire.append(await pull(self, record, task))
        return wire[-1]

    # The laboratory below takes the same class, and is not to be listened to.
    with monkeypatch.context() as patch:
        patch.setattr("bootstrap.coordination.rounds.ClusteredServer", Spy)
        patch.setattr(Coordinator, "_pull", listen)
        results = await live(plan, tmp_path, secret=SECRET)

    plain = laboratory(plan)
    assert isinstance(plain, ClusteredPopulation)
    p = Permutation(SECRET.encode(), plan.digest, Target.manifest)
    initial = plain.crew.initial
    expected: list[Vector] = []
    for updates in received:
        before = plain.models
        for i, update in updates.items():
            in_order = Target(plan, i).fit(before[i], plain.t + 1) - before[i]
            assert not np.array_equal(update, in_order)
            np.testing.assert_array_equal(update, p.apply(in_order))
        plain.step(evaluate=False)
        expected += [node.update for node in plain.server.tree.nodes]
    assert len(received) == plan.rounds
    assert len(wire) == sum(map(len, received))
    for held, update in zip(nodes, expected, strict=True):
        if update.any():
            assert not np.array_equal(held, update)
        np.testing.assert_array_equal(held, p.apply(update))
    in_reach = [*wire, *nodes]
    for model in models_of(results):
        assert not any(np.allclose(vector, p.apply(model)) for vector in in_reach)
        assert not any(np.allclose(vector, model - initial) for vector in in_reach)


async def test_a_secret_is_needed_and_must_be_everybodys(tmp_path: Path) -> None:
    plan = small("cfl", n=4, min_peers=2, cfl={"permute": True})
    async with town(plan, tmp_path) as made:
        await made.open()
        with pytest.raises(UserError, match="has not been given"):
            await made.join("without")
        made.join("first", secret=SECRET)
        await made.until(lambda: bool(made.coordinator._clients))
        file = tmp_path / "secret.txt"
        file.touch(mode=0o600)
        file.write_text("another secret of many bytes\n")
        with pytest.raises(UserError, match="refuses this peer's secret: the others permute"):
            await made.join("second", secret_file=file)
        file.write_text(SECRET + "\n")
        made.join("third", secret_file=file)
        async with asyncio.timeout(20):
            results = [await made.peers[name] for name in ("first", "third")]
        assert all(result.rounds == plan.rounds for result in results)


async def test_another_model_is_refused(tmp_path: Path) -> None:
    class Other(Target):
        def initial(self) -> Vector:
            return super().initial() + self.samples

    async with town(small("fedavg", n=2), tmp_path, Other) as made:
        await made.open()
        made.join("first")
        await made.until(lambda: bool(made.coordinator._clients))
        with pytest.raises(UserError, match=r"another model|refuses this peer's model"):
            await made.join("second")


def test_a_central_method_has_one_coordinator(tmp_path: Path) -> None:
    plan = small("fedavg", n=2)
    with pytest.raises(UserError, match="has one coordinator"):
        run(plan, state=tmp_path)


@pytest.mark.parametrize("method", [pytest.param("fedavg", marks=pytest.mark.slow), "ifca", "cfl"])
async def test_everything_restarted_in_mid_run_ends_the_same(tmp_path: Path, method: str) -> None:
    plan = small(method, rounds=5)
    async with town(plan, tmp_path) as made:
        await made.open()
        names = [f"peer-{i}" for i in range(plan.n)]
        for name in names:
            made.join(name)
        await made.until(lambda: made.coordinator.finished == 2)
        await made.shut()
        await asyncio.gather(*map(made.part, names[:3]))
        await made.open()
        for name in names[:3]:
            made.join(name)
        results = await made.results()
    population = laboratory(plan)
    rows = [row for rows in population.run() for row in rows]
    for result in results:
        np.testing.assert_array_equal(result.model, population.models[result.index])
        bags = [row["bag"] for row in rows if row["index"] == result.index]
        assert [row.bag for row in read_topology(result.state)] == bags
    assert len(read_metrics(made.boot)) == plan.n * plan.rounds


async def test_peers_wait_for_a_coordinator_that_lost_its_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = small("fedavg", n=2)
    caplog.set_level(logging.INFO)
    async with town(plan, tmp_path) as made:
        await made.open()
        for name in ("a", "b"):
            made.join(name)
        await made.until(lambda: made.coordinator.finished == 2)
        await made.shut()
        await made.open(state=tmp_path / "another")
        await made.until(lambda: caplog.text.count("does not know of round") == 2)
        assert "its state was lost or is an old one" in caplog.text
        assert made.coordinator.finished == 0
        await made.shut()
        await made.open()
        results = await made.results()
    for result in results:
        np.testing.assert_array_equal(result.model, laboratory_model(plan, result.index))


def laboratory_model(plan: Plan, index: int) -> Vector:
    population = laboratory(plan)
    for _ in population.run():
        pass
    model: Vector = population.models[index]
    return model


async def test_newcomers_find_their_clusters(tmp_path: Path) -> None:
    plan = small("cfl", n=12, min_peers=8, rounds=8)
    async with town(plan, tmp_path) as made:
        await made.open()
        for number in range(8):
            made.join(f"peer-{number}")
        await made.until(lambda: made.coordinator.finished == 5)
        during = await made.join("during")
        first = await made.results()
        # All rounds are over by now, and those who ran them are gone.
        late = await asyncio.gather(*(made.join(f"late-{i}") for i in range(3)))
        method = made.coordinator._method
        assert isinstance(method, ClusterRounds)
        places = method.places
    clusters = {result.index: plan.cluster_of(result.index) for result in [*first, *late]}
    for cluster in (0, 1):
        assert len({places[i] for i, own in clusters.items() if own == cluster}) == 1
    assert len(set(places.values())) == 2
    for result in late:
        (row,) = read_metrics(result.state)
        assert (row.t, row.notes["node"]) == (plan.rounds, places[result.index])
        like = next(other for other in first if places[other.index] == places[result.index])
        np.testing.assert_array_equal(result.model, like.model)
        assert row.precision == 1.0
    assert during.rounds == plan.rounds
    assert [row.t for row in read_metrics(during.state)] == [6, 7, 8][
        -len(read_metrics(during.state)) :
    ]


@pytest.mark.parametrize("method", ["ifca", pytest.param("fedavg", marks=pytest.mark.slow)])
async def test_a_newcomer_to_other_methods_gets_a_model(tmp_path: Path, method: str) -> None:
    plan = small(method, n=9, min_peers=8, rounds=4)
    async with town(plan, tmp_path) as made:
        await made.open()
        for number in range(8):
            made.join(f"peer-{number}")
        first = await made.results()
        late = await made.join("late")
    (row,) = read_metrics(late.state)
    same = [other for other in first if other.index % 2 == late.index % 2]
    np.testing.assert_array_equal(late.model, same[0].model)
    assert row.notes["took_part"] is False


async def test_a_cluster_whose_members_are_gone_keeps_its_model(tmp_path: Path) -> None:
    plan = small("cfl", rounds=8)
    async with town(plan, tmp_path) as made:
        await made.open()
        for number in range(plan.n):
            made.join(f"peer-{number}")
        await made.until(lambda: made.coordinator.finished == 4)
        method = made.coordinator._method
        assert isinstance(method, ClusterRounds)
        odd = [name for name in made.peers if indices(made)[name] % 2]
        await asyncio.gather(*map(made.part, odd))
        t = made.coordinator.finished
        await made.until(lambda: made.coordinator.finished >= t + 1)
        tree = method.server.tree
        left = next(v for v in tree.leaves if all(i % 2 for i in tree.members(v)))
        before = tree.nodes[left].update
        results = [await task for name, task in made.peers.items() if name not in odd]
        assert np.array_equal(tree.nodes[left].update, before)
        assert tree.members(left) == [1, 3, 5, 7]
        # They come back to their model.
        back = [await made.join(name) for name in odd]
    for result in back:
        assert result.rounds == plan.rounds
        np.testing.assert_array_equal(result.model, Target(plan, 0).initial() + before)
    assert len({result.model.tobytes() for result in results}) == 1


def indices(made: Town) -> dict[str, int]:
    """Return the index of each peer by its name."""
    found = {}
    for name in made.peers:
        found[name] = read_metrics(made.directory / name)[0].index
    return found


@pytest.mark.parametrize("method", ["ifca", "cfl"])
async def test_the_limit_on_bytes_fits_the_models(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody knows the models yet hardly a byte is allowed; where all do, all that it takes:
    what a peer asks for in a round must not keep it from being heard."""
    tiny = partial(Allowance, bytes=0.01, byte_burst=1.0)
    monkeypatch.setattr("peer.network.transport.Allowance", tiny)
    plan = small(method, rounds=2)
    async with town(plan, tmp_path) as made:
        await made.open()
        for number in range(plan.n):
            made.join(f"peer-{number}")
        assert [result.rounds for result in await made.results()] == [2] * plan.n
        assert made.node is not None
        assert "limited" not in made.node.traffic.snapshot()["faults"]


@pytest.mark.parametrize("method", ["fedavg", "ifca"])
async def test_all_models_of_a_version_may_be_fetched(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.network.limits.MiB", 1)  # as if models were a million times as large
    plan = small(method, rounds=1)
    async with town(plan, tmp_path) as made:
        await made.open()
        with mock.patch.object(Transport, "allow", autospec=True) as allow:
            for number in range(plan.n):
                made.join(f"peer-{number}")
            await made.results()
    size, models = 4 * (SIZE + BUFFERS), plan.c if method == "ifca" else 1
    allowed = {call.args[1] for call in allow.call_args_list}
    expected = {Allowance.of_snapshots(size, 1), Allowance.of_snapshots(models * size, 1)}
    assert allowed == expected


async def test_one_that_diverges_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Diverging(Target):
        def fit(self, model: Vector, t: int) -> Vector:
            return super().fit(model, t) * (np.nan if self.samples == 1 and t == 2 else 1)

    results = await live(small("fedavg", n=2, rounds=3), tmp_path, Diverging)
    assert caplog.text.count("training diverged in round 2") == 1
    population = laboratory(small("fedavg", n=2, rounds=3), Diverging)
    for _ in population.run():
        pass
    np.testing.assert_array_equal(results[0].model, population.models[0])


class Liar:
    """Answers every so many fetches of a coordinator by nonsense."""

    def __init__(self, honest: Any, lies: list[Any]) -> None:
        self.honest = honest
        self.lies = lies
        self.told = 0

    async def __call__(self, request: Fetch) -> tuple[Reply, Sequence[Buffer]]:
        reply, chunks = await self.honest(request)
        if self.lies and chunks:
            self.told += 1
            return self.lies.pop()(reply, chunks)
        return reply, chunks


NAN = np.full(67, np.nan, dtype="<f4").tobytes()
LIES = [
    lambda reply, chunks: (reply, [NAN]),
    lambda reply, chunks: (reply, [bytes(chunks[0])[:-4]]),
    lambda reply, chunks: (reply, [*chunks, bytes(4)]),
    lambda reply, chunks: (reply.model_copy(update={"size": 4}), chunks),
    lambda reply, chunks: (reply.model_copy(update={"round": 0}), chunks),
    lambda reply, chunks: (reply.model_copy(update={"number": 7}), chunks),
    lambda reply, chunks: (reply.model_copy(update={"size": 2**40}), chunks),
    lambda reply, chunks: (reply, []),
    lambda reply, chunks: (reply, [np.full(67, 1e9, dtype="<f4").tobytes()]),
]


async def test_a_coordinator_that_lies_about_models_is_not_believed(tmp_path: Path) -> None:
    plan = small("fedavg", n=2, rounds=4)
    async with town(plan, tmp_path) as made:
        await made.open()
        liar = Liar(made.coordinator.fetch, list(LIES))
        made.coordinator.fetch = liar  # type: ignore[method-assign]
        for name in ("a", "b"):
            made.join(name)
        results = await made.results()
    assert liar.told == len(LIES)
    for result in results:
        np.testing.assert_array_equal(result.model, laboratory_model(plan, result.index))


CLAIMS: list[dict[str, Any]] = [
    {"round": 99},
    {"round": 0},
    {"version": 50},
    {"model": 5},
    {"model": None},
    {"draw": 9999},
    {"work": "choose"},
    {"work": "draw", "model": None},
    {"work": "close", "version": 0},
    {"work": "close", "version": 4, "round": 4},
]


async def test_a_coordinator_that_asks_for_nonsense_is_not_obeyed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = small("fedavg", n=2, rounds=4)
    async with town(plan, tmp_path) as made:
        await made.open()
        honest, claims = made.coordinator.report, list(CLAIMS)

        async def lie(request: Any) -> tuple[Reply, Sequence[Buffer]]:
            reply, chunks = await honest(request)
            task = getattr(reply, "task", None)
            if task is not None and claims:
                table = {**task.model_dump(), **claims.pop()}
                return reply.model_copy(update={"task": type(task)(**table)}), chunks
            return reply, chunks

        made.coordinator.report = lie  # type: ignore[method-assign]
        for name in ("a", "b"):
            made.join(name)
        results = await made.results()
        assert not claims
    for result in results:
        np.testing.assert_array_equal(result.model, laboratory_model(plan, result.index))
    assert "the coordinator: " in caplog.text


async def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    plan = small("fedavg", n=2, rounds=2)
    results = await live(plan, tmp_path)
    state = results[0].state
    assert (await again(plan, tmp_path, state)).rounds == 2
    with StateDirectory(state) as directory:
        good = directory.newest()
        assert good is not None
        directory.save(Checkpoint(**{**vars(good), "matcher": {"standing": "00"}}))
    with pytest.raises(StateError, match="of no use"):
        await again(plan, tmp_path, state)


async def again(plan: Plan, tmp_path: Path, state: Path) -> Result:
    """Start a finished peer once more, with nobody there."""
    async with town(plan, tmp_path) as made:
        return await made.join(state.name)


async def test_a_peer_answers_fetches_of_what_it_made_alone(tmp_path: Path) -> None:
    plan = small("fedavg", n=2, rounds=2)
    asked: list[str] = []

    async with town(plan, tmp_path) as made:
        await made.open()
        made.join("a")
        await made.until(lambda: bool(made.coordinator._clients))
        (client,) = made.coordinator._clients.values()

        async def ask(request: Request) -> None:
            with pytest.raises(RefusedError) as error:
                await made.coordinator._transport.request(
                    client.record.data, request, timeout=5, max_payload=1000
                )
            asked.append(error.value.reason)

        await ask(Fetch(round=1, number=0))
        made.coordinator._transport.introduce(sender="", plan="0" * 32)
        await ask(Fetch(round=1, number=0))
    assert asked == ["gone", "plan-mismatch"]
