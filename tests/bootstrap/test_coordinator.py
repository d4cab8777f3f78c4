"""The coordinator over real sockets, its peers played by the tests."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bootstrap import coordinator as module
from bootstrap import server
from bootstrap.coordination.rounds import ClusterRounds, new_method
from bootstrap.coordinator_store import CoordinatorStore, Layout, Saved
from bootstrap.server import BootstrapNode
from peer.errors import RefusedError, StateError, UserError
from peer.learning.learner import Vector
from peer.network.messages import (
    Announce,
    Assignment,
    Enrol,
    Enrolled,
    Fetch,
    Leave,
    Parcel,
    PeerRecord,
    Reason,
    Reply,
    Report,
    Request,
    State,
    Status,
    Task,
    Update,
    Work,
)
from peer.network.traffic import Traffic
from peer.network.transport import Buffer, Transport
from peer.network.vectors import decode_vector, encode_vector
from peer.plan import Plan
from peer.rundir import read_metrics
from peer.standing import Standing

SIZE = 4
MODEL = "e" * 32


def vector(*values: float) -> Vector:
    return np.array(values, dtype=np.float32)


class Puppet:
    """A peer that says what a test tells it to; `offers` is what it answers to a fetch."""

    def __init__(self, node: BootstrapNode, number: int) -> None:
        self.node = node
        self.peer = f"{number:032x}"
        self.index = -1
        self.status = Status()
        self.offers: dict[tuple[int, int], tuple[Reply, Sequence[Buffer]]] = {}
        self.said: dict[str, Any] = {"size": SIZE, "trainable": SIZE, "samples": 1}
        self.model = MODEL
        self.transport: Transport

    async def _handle(self, request: Request) -> tuple[Reply, Sequence[Buffer]]:
        assert isinstance(request, Fetch)
        offer = self.offers.get((request.round, request.number))
        if offer is None:
            raise RefusedError(Reason.GONE)
        return offer

    async def ask(self, request: Request, payload: int = 0) -> tuple[Reply, list[memoryview]]:
        return await self.transport.request(
            self.node.address, request, timeout=5, max_payload=payload
        )

    async def enrol(self) -> None:
        reply, _ = await self.ask(Enrol())
        assert isinstance(reply, Enrolled)
        self.index = reply.index
        self.transport.introduce(sender=self.peer, plan=self.node.plan.digest)

    def update(self) -> Update:
        record = PeerRecord(
            peer=self.peer,
            index=self.index,
            control=self.transport.control,
            data=self.transport.data,
            incarnation=1,
            first_round=1,
            model=self.model,
        )
        return Update(record=record, state=State.ALIVE, status=self.status)

    async def report(
        self, done: Task | None = None, *, wait: float = 0.0, **more: Any
    ) -> tuple[Task | None, list[memoryview]]:
        request = Report(update=self.update(), done=done, wait=wait, **{**self.said, **more})
        reply, chunks = await self.ask(request, 8 * self.node.plan.n)
        assert isinstance(reply, Assignment)
        self.data = self.node.address.rpartition(":")[0] + f":{reply.data_port}"
        return reply.task, chunks

    async def refusal(self, **more: Any) -> RefusedError:
        with pytest.raises(RefusedError) as error:
            await self.report(**more)
        return error.value

    async def task(self, work: Work, seconds: float = 5.0) -> Task:
        """Report until there is a task of the work; close rounds on the way there."""
        async with asyncio.timeout(seconds):
            while True:
                task, _ = await self.report(wait=1.0)
                if task is not None and task.work is work:
                    return task
                if task is not None and task.work is Work.CLOSE:
                    self.status = Status(finished=task.round, accuracy=0.5)

    async def fetch(self, version: int, number: int) -> Vector | None:
        reply, chunks = await self.transport.request(
            self.data, Fetch(round=version, number=number), timeout=5, max_payload=4 * SIZE
        )
        assert isinstance(reply, Parcel)
        return decode_vector(chunks, SIZE, "float32", 1e6) if reply.size else None

    def offer(self, task: Task, values: Vector, **changes: Any) -> None:
        """Keep a vector for the coordinator to fetch, its header changed as told."""
        content = encode_vector(values, "float32")
        assert task.model is not None
        parcel = Parcel(round=task.round, number=task.model, size=len(content))
        self.offers[task.round, task.model] = (
            parcel.model_copy(update=changes), [content] if len(content) else []
        )  # fmt: skip

    async def train(self, *values: float, seconds: float = 5.0) -> Task:
        """Do the next training."""
        task = await self.task(Work.TRAIN, seconds)
        self.offer(task, vector(*values))
        await self.report(task)
        return task

    async def close(self) -> tuple[Task, Standing]:
        """Wait for the end of the round, and close it."""
        async with asyncio.timeout(5):
            while True:
                task, chunks = await self.report(wait=1.0)
                if task is not None and task.work is Work.CLOSE:
                    break
        self.status = Status(finished=task.round, accuracy=0.5)
        return task, Standing.decode(chunks, self.node.plan.n)

    @property
    def faults(self) -> dict[str, int]:
        """What the node has counted."""
        counted: dict[str, int] = self.node.traffic.snapshot()["faults"]
        return counted


@asynccontextmanager
async def puppet(node: BootstrapNode, number: int) -> AsyncIterator[Puppet]:
    made = Puppet(node, number)
    async with Transport(
        listen="127.0.0.1:0", handler=made._handle, traffic=Traffic()
    ) as made.transport:
        made.transport.introduce(sender=made.peer, plan="")
        await made.enrol()
        yield made


@asynccontextmanager
async def theatre(
    plan: Plan, peers: int | None = None, state: Path | None = None
) -> AsyncIterator[list[Puppet]]:
    """A coordinator at work and its puppets, by index."""
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(
            BootstrapNode(plan, listen="127.0.0.1:0", state=state)
        )
        serving = asyncio.create_task(node.serve())
        stack.push_async_callback(_end, serving)
        count = plan.n if peers is None else peers
        puppets = [await stack.enter_async_context(puppet(node, i + 1)) for i in range(count)]
        yield sorted(puppets, key=lambda made: made.index)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def plan(method: str = "fedavg", **changes: Any) -> Plan:
    table: dict[str, Any] = {"n": 2, "rounds": 3, "method": method, "model": "custom"}
    return Plan.model_validate(table | changes)


async def test_a_round_of_fedavg() -> None:
    async with theatre(plan()) as (a, b):
        assert (await a.report())[0] is None  # until all are there
        await b.report()
        task = await a.train(1, 2, 3, 4)
        assert task == Task(work=Work.TRAIN, round=1, version=0, model=0)
        assert await a.fetch(0, 0) is None  # still the initial one
        await b.train(3, 2, 1, 0)
        closing, standing = await a.close()
        assert closing == Task(work=Work.CLOSE, round=1, version=1, model=0)
        assert standing == Standing({0: 0, 1: 0}, {0: 0, 1: 0})
        model = await a.fetch(1, 0)
        assert model is not None
        assert model.tolist() == [2, 2, 2, 2]
        for version, number, reason in ((0, 0, "gone"), (2, 0, "gone"), (1, 1, "bad-request")):
            with pytest.raises(RefusedError, match=reason):
                await a.fetch(version, number)
        # The next training may begin; the round does not end before all have closed: b has not.
        assert await a.task(Work.TRAIN) == Task(work=Work.TRAIN, round=2, version=1, model=0)
        a.offer(Task(work=Work.TRAIN, round=2, version=1, model=0), vector(9, 9, 9, 9))
        await a.report(Task(work=Work.TRAIN, round=2, version=1, model=0))
        assert (await b.close())[0].round == 1


@pytest.mark.parametrize(
    ("values", "changes", "fault"),
    [
        ((1, 2, 3), {}, "content"),
        ((1, 2, 3), {"size": 16}, "content"),
        ((1, 2, 3, 4), {"size": 12}, "content"),
        ((1, 2, 3, float("nan")), {}, "content"),
        ((1, 2, 3, float("inf")), {}, "content"),
        ((1, 2, 3, 1e7), {}, "content"),
        ((1, 2, 3, 4), {"round": 2}, "content"),
        ((1, 2, 3, 4), {"number": 1}, "content"),
        ((1, 2, 3, 4, 5), {}, "bad-reply"),
        ((1, 2, 3, 4, 5), {"size": 16}, "bad-reply"),
        ((), {}, "content"),
        ((1, 2, 3, 4), {"size": 2**40}, "content"),
    ],
)
async def test_a_vector_of_no_use_is_left_out_and_counted(
    values: tuple[float, ...], changes: dict[str, Any], fault: str
) -> None:
    async with theatre(plan()) as (a, b):
        await asyncio.gather(a.report(), b.report())
        await a.train(1, 2, 3, 4)
        task = await b.task(Work.TRAIN)
        b.offer(task, vector(*values), **changes)
        await b.report(task)
        await a.close()
        model = await a.fetch(1, 0)
        assert model is not None
        assert model.tolist() == [1, 2, 3, 4]
        assert a.faults[fault] >= 1
        # It is asked again in the next round, as everybody is.
        await a.train(1, 1, 1, 1)
        assert (await b.train(3, 3, 3, 3)).round == 2
        await a.close()
        assert (await a.fetch(2, 0)) is not None


async def test_one_that_offends_again_and_again_is_neither_asked_nor_waited_for() -> None:
    async with theatre(plan(rounds=5, network={"ban_score": 50})) as (a, b):
        await asyncio.gather(a.report(), b.report())
        for t in (1, 2):
            await a.train(1, 2, 3, 4)
            assert (await b.train(float("nan"), 2, 3, 4)).round == t
            await a.close()
        assert b.faults["left-out"] == 1
        for t in (3, 4):
            assert (await a.train(1, 2, 3, 4)).round == t
            # It may still have the models that it helped to find, and no more.
            task, _ = await b.report()
            assert task is None or task.work is Work.CLOSE
            closing, standing = await a.close()
            assert closing.round == t
            assert standing.trained == {a.index: 0}


async def test_who_reports_in_anothers_name_earns_it_no_points() -> None:
    async with theatre(plan(rounds=5, network={"ban_score": 50})) as (a, b):
        await asyncio.gather(a.report(), b.report())
        async with puppet(b.node, int(b.peer, 16)) as double:
            assert (double.peer, double.index) == (b.peer, b.index)
            for _ in range(2):
                await a.train(1, 2, 3, 4)
                await double.train(float("nan"), 2, 3, 4)
                await a.close()
            assert b.faults["left-out"] == 1
        # The round that has begun is without whoever it was; the next is with the real one.
        training = asyncio.create_task(b.train(3, 4, 5, 6))
        for _ in range(2):
            await a.train(1, 2, 3, 4)
            await a.close()
        assert (await training).round == 4
        model = await a.fetch(4, 0)
        assert model is not None
        assert model.tolist() == [2, 3, 4, 5]


async def test_what_was_not_asked_is_not_heard() -> None:
    async with theatre(plan()) as (a, b):
        await asyncio.gather(a.report(), b.report())
        task = await a.task(Work.TRAIN)
        for change in ({"round": 2}, {"round": 10**9}, {"version": 1}, {"model": 1},
                       {"work": Work.CHOOSE}, {"work": Work.CLOSE}, {"draw": 3}):  # fmt: skip
            odd = task.model_copy(update=change)
            for offered in ((task.round, 0), (odd.round, odd.model or 0)):
                a.offers[offered] = (Parcel(round=1, number=0, size=16), [bytes(16)])
            assert (await a.report(odd))[0] == task
        assert a.faults.get("content", 0) == 0
        await a.train(1, 2, 3, 4)
        await b.train(3, 4, 5, 6)
        await b.close()
        model = await b.fetch(1, 0)
        assert model is not None
        assert model.tolist() == [2, 3, 4, 5]


async def test_who_diverged_says_so_and_one_that_lost_its_work_does_it_again() -> None:
    async with theatre(plan()) as (a, b):
        await asyncio.gather(a.report(), b.report())
        task = await a.task(Work.TRAIN)
        await a.report(task)  # says that it is done, but has nothing to fetch: gone
        assert await a.task(Work.TRAIN) == task
        await a.report(task, failed=True)
        await b.train(1, 2, 3, 4)
        assert (await a.close())[1].trained == {0: 0, 1: 0}
        model = await a.fetch(1, 0)
        assert model is not None
        assert model.tolist() == [1, 2, 3, 4]


async def test_ifca_draws_until_none_is_idle_and_drops_impossible_choices() -> None:
    ifca = plan("ifca", partition={"kind": "rotation", "clusters": 2})
    async with theatre(ifca) as (a, b):
        await asyncio.gather(a.report(), b.report())
        for draw, choices in ((0, (1, 1)), (1, (0, 1))):
            for peer, choice in zip((a, b), choices, strict=True):
                task = await peer.task(Work.DRAW)
                assert (task.draw, task.round, task.model) == (draw, 1, None)
                await peer.report(task, choice=choice)
        assert (await a.train(1, 1, 1, 1)).model == 0
        task = await b.train(2, 2, 2, 2)
        assert (task.model, task.draw) == (1, 1)
        task = await a.task(Work.CHOOSE)
        assert (task.round, task.version, task.model) == (1, 1, None)
        await a.report(task, choice=1)
        await b.report(task, choice=99_999)
        assert (await a.close())[1].places == {0: 1, 1: 1}
        assert a.faults["content"] == 1


async def test_models_and_secrets_must_agree() -> None:
    permuted = plan("cfl", n=3, cfl={"permute": True})
    async with theatre(permuted) as (a, b, c):
        a.said["fingerprint"] = b.said["fingerprint"] = "a" * 16
        assert (await a.refusal(fingerprint="")).reason == Reason.PERMUTATION_MISMATCH
        assert (await a.refusal(size=2**30)).reason == Reason.MODEL_MISMATCH
        assert (await a.refusal(trainable=SIZE + 1)).reason == Reason.MODEL_MISMATCH
        await a.report()
        refusal = await b.refusal(fingerprint="b" * 16)
        assert refusal.reason == Reason.PERMUTATION_MISMATCH
        assert refusal.detail == "the others permute by another secret than this peer"
        assert (await b.refusal(size=SIZE + 1)).reason == Reason.MODEL_MISMATCH
        assert (await b.refusal(trainable=SIZE - 1)).reason == Reason.MODEL_MISMATCH
        # One that was wrong, and went, does not decide for the others.
        await a.ask(Leave(update=a.update()))
        b.said["fingerprint"] = "b" * 16
        await b.report()
        c.said["fingerprint"] = "a" * 16
        assert (await c.refusal()).reason == Reason.PERMUTATION_MISMATCH
    async with theatre(plan("cfl")) as (a, _):
        assert (await a.refusal(fingerprint="a" * 16)).reason == Reason.PERMUTATION_MISMATCH


async def test_the_late_are_left_behind_at_the_deadline() -> None:
    slow = plan(n=4, network={"round_timeout": 0.5}, central={"quorum": 0.75})
    async with theatre(slow) as peers:
        await asyncio.gather(*(peer.report() for peer in peers))
        *quick, late = peers
        await quick[0].train(1, 1, 1, 1)
        await quick[1].train(3, 3, 3, 3)
        # Two of four are no quorum, however late it is.
        await asyncio.sleep(0.8)
        assert (await quick[0].report())[0] is None
        await quick[2].train(5, 5, 5, 5)
        await quick[0].close()
        model = await quick[0].fetch(1, 0)
        assert model is not None
        assert model.tolist() == [3, 3, 3, 3]
        assert late.faults["overdue"] == 1
        # From now on nobody waits for the late one.
        began = asyncio.get_running_loop().time()
        for peer in quick:
            await peer.train(1, 1, 1, 1)
        await quick[0].close()
        assert asyncio.get_running_loop().time() < began + 0.4
        # It may take part all the same, and is waited for again once it did.
        first = asyncio.create_task(late.train(9, 9, 9, 9))
        await asyncio.sleep(0.1)
        for peer in quick:
            await peer.train(1, 1, 1, 1)
        assert (await first).round == 3
        model = await quick[0].fetch((await quick[0].close())[0].round, 0)
        assert model is not None
        assert model.tolist() == [3, 3, 3, 3]


async def test_the_overdue_do_not_keep_those_who_deliver_waiting() -> None:
    table = {"round_timeout": 0.5, "request_timeout": 20.0}
    crowd = plan(n=6, network=table, central={"quorum": 0.1})
    asked = 0
    first = asyncio.Event()

    async def never(_: Request) -> tuple[Reply, Sequence[Buffer]]:
        nonlocal asked
        asked += 1
        first.set()
        return await asyncio.Future()

    async with theatre(crowd) as (quick, *slow):
        await asyncio.gather(*(peer.report() for peer in (quick, *slow)))
        await quick.train(1, 1, 1, 1)
        await quick.close()
        # All five are overdue. Now they say that they have trained, and never hand it over.
        for peer in slow:
            peer.transport._handler = never
            await peer.report(await peer.task(Work.TRAIN))
        await asyncio.wait_for(first.wait(), 2)
        began = asyncio.get_running_loop().time()
        await quick.train(3, 3, 3, 3)
        await quick.close()
        assert asyncio.get_running_loop().time() < began + 2
        assert asked == 1


async def test_it_ends_only_when_all_have_closed_the_last_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SWEEP", 0.02)
    async with BootstrapNode(
        plan(rounds=1), listen="127.0.0.1:0", state=tmp_path, exit_when_done=True
    ) as node:
        serving = asyncio.create_task(node.serve())
        async with puppet(node, 1) as a, puppet(node, 2) as b:
            await asyncio.gather(a.report(), b.report())
            await asyncio.gather(a.train(1, 1, 1, 1), b.train(3, 3, 3, 3))
            for each in (a, b):
                await each.close()
                each.status = Status(finished=1, done=True, accuracy=0.5)
                await each.ask(Announce(update=each.update()))
            # That they are done is known, but their reports are still under way.
            await asyncio.sleep(0.1)
            assert not serving.done()
            await asyncio.gather(a.report(), b.report())
            await asyncio.wait_for(serving, 2)
    assert [row.accuracy for row in read_metrics(tmp_path)] == [0.5, 0.5]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["finished"] == 2
    # Two vectors of four values came.
    assert summary["bytes_received"] == 2 * 4 * 4
    assert summary["wire_sent"] > summary["bytes_sent"] > 0
    assert (
        json.loads((tmp_path / "traffic.json").read_text())["received"]["parcel"]["messages"] == 2
    )


async def test_the_dead_and_those_who_left_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SILENCE", 0.1)
    async with theatre(plan(n=3), 2) as (a, b):
        async with puppet(a.node, 9) as c:
            await asyncio.gather(*(peer.report() for peer in (a, b, c)))
            await a.train(1, 2, 3, 4)
            await b.ask(Leave(update=b.update()))
            assert (await a.report())[0] is None  # c is still there
        closing, standing = await a.close()
        assert closing.round == 1
        assert standing == Standing({0: 0, 1: 0, 2: 0}, {a.index: 0})
        # One that returns goes on where the others are.
        await a.task(Work.TRAIN)
        assert (await b.close())[0].round == 1


async def test_a_round_in_which_nobody_answers_is_run_again() -> None:
    async with theatre(plan()) as (a, b):
        await asyncio.gather(a.report(), b.report())
        await a.task(Work.TRAIN)
        for peer in (a, b):
            await peer.ask(Leave(update=peer.update()))
        await asyncio.sleep(0.5)
        assert (await a.train(1, 1, 1, 1)).round == 1
        assert (await a.close())[0].round == 1


async def test_peers_that_are_ahead_are_told_that_the_state_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with theatre(plan()) as (a, b):
        for peer in (a, b):
            peer.status = Status(finished=2)
            refusal = await peer.refusal()
            assert refusal.reason == Reason.BEHIND
        assert "has finished round 2, this coordinator knows of 0" in caplog.text
        assert caplog.text.count("knows of 0") == 1
        await asyncio.sleep(0.1)
        # Nothing was started over.
        assert a.node._coordinator is not None
        assert a.node._coordinator._method is None


async def test_nothing_is_started_over_while_a_peer_is_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "AHEAD", 0.5)
    async with theatre(plan(n=3, min_peers=2)) as (a, b, ahead):
        ahead.status = Status(finished=1)
        assert (await ahead.refusal()).reason == Reason.BEHIND
        # Two are all that a start needs.
        await asyncio.gather(a.report(), b.report())
        assert (await a.report(wait=0.2))[0] is None
        # It came for the last time: the others begin.
        assert (await a.task(Work.TRAIN)).round == 1


@pytest.mark.parametrize("method", ["fedavg", "ifca", "cfl"])
async def test_a_restart_goes_on_after_the_last_finished_round(tmp_path: Path, method: str) -> None:
    one = plan(method, min_peers=2, n=3)
    async with theatre(one, 2, tmp_path) as (a, b):
        await asyncio.gather(a.report(), b.report())
        await a.train(1, 1, 1, 1)
        await b.train(3, 3, 3, 3)
        await a.close()
        await a.report()
    assert [(row.t, row.index) for row in read_metrics(tmp_path)][-1] == (1, 0)
    async with theatre(one, 2, tmp_path) as (a, b):
        a.status = Status(finished=1)
        assert (await a.report())[0] is None  # b was there before, and is waited for
        task, standing = await b.close()
        assert task == Task(work=Work.CLOSE, round=1, version=1, model=0)
        assert standing == Standing({0: 0, 1: 0}, {0: 0, 1: 0})
        model = await b.fetch(1, 0)
        assert model is not None
        assert model.tolist() == [2, 2, 2, 2]
        assert (await a.train(1, 1, 1, 1)).round == 2


async def test_a_state_that_cannot_be_trusted_is_refused(tmp_path: Path) -> None:
    async with theatre(plan("ifca"), state=tmp_path) as (a, b):
        await asyncio.gather(a.report(), b.report())
        await a.train(1, 1, 1, 1)
        await b.train(3, 3, 3, 3)
        await a.close()
    with pytest.raises(StateError, match="another plan"):
        BootstrapNode(plan("ifca", seed=1), listen="127.0.0.1:0", state=tmp_path)._coordinate()
    file = tmp_path / "coordinator.json"
    saved = json.loads(file.read_text())
    good = file.read_text()
    for key, value in (("t", 2), ("checksum", "0"), ("models", []), ("more", 1)):
        file.write_text(json.dumps({**saved, key: value}))
        with pytest.raises(StateError, match=r"damaged|does not hold"):
            BootstrapNode(plan("ifca"), listen="127.0.0.1:0", state=tmp_path)._coordinate()
    file.write_text(good)
    # A damaged row comes to light now rather than in the last round, when all are summed up.
    rows = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(b"?\n" + rows)
    with pytest.raises(UserError, match=r"metrics.jsonl line 1"):
        BootstrapNode(plan("ifca"), listen="127.0.0.1:0", state=tmp_path)._coordinate()
    (tmp_path / "metrics.jsonl").write_bytes(rows)
    (tensor,) = (tmp_path / "cluster-models").iterdir()
    tensor.write_bytes(tensor.read_bytes()[:-1])
    with pytest.raises(StateError, match="damaged"):
        BootstrapNode(plan("ifca"), listen="127.0.0.1:0", state=tmp_path)._coordinate()


async def test_an_index_that_goes_to_another_is_a_new_peer_to_be_routed() -> None:
    async with theatre(plan("cfl")) as (a, b):
        await asyncio.gather(a.report(), b.report())
        await a.train(1, 1, 1, 1)
        await b.train(1, -1, 1, -1)
        await asyncio.gather(a.close(), b.close())
        await a.train(1, 1, 1, 1)
        await b.train(1, -1, 1, -1)
        await asyncio.gather(a.close(), b.close())
        assert a.node._coordinator is not None
        method = a.node._coordinator._method
        assert isinstance(method, ClusterRounds)
        method.server.tree.split(0, 2, [{0: vector(1, 1, 1, 1)}, {1: vector(1, -1, 1, -1)}])
        await b.ask(Leave(update=b.update()))
        a.node._registry._reclaim_after = 0
        await a.report()
        async with puppet(a.node, 9) as other:
            assert other.index == 1
            # The round that is under way is not the newcomer's.
            assert (await other.report())[0] is None
            await a.train(1, 1, 1, 1)
            await a.close()
            await a.report()
            # It came after the last round: the tree takes it to the cluster that it is like.
            assert (await other.train(2, 2, 2, 2)).model == 0
            task, standing = await other.close()
            assert (task.round, task.model) == (3, 1)
            assert standing.places == {0: 1, 1: 1}
            assert await other.fetch(3, 1) is not None


async def test_without_a_state_it_warns(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with theatre(plan()):
        assert "without --state" in caplog.text


async def test_a_peer_of_another_plan_is_refused() -> None:
    async with theatre(plan()) as (a, _):
        a.transport.introduce(sender=a.peer, plan="0" * 32)
        assert (await a.refusal()).reason == Reason.PLAN_MISMATCH
        with pytest.raises(RefusedError, match="plan-mismatch"):
            await a.ask(Fetch(round=0, number=0))
    decentral = Plan(n=2, method="random")
    async with theatre(decentral) as (a, _):
        assert (await a.refusal()).reason == Reason.BAD_REQUEST


async def test_attempts_outlive_a_restart_and_one_that_returns_holds_nobody_up(
    tmp_path: Path,
) -> None:
    cfl = plan("cfl", rounds=4)
    async with theatre(cfl, 2, tmp_path) as (a, b):
        await asyncio.gather(a.report(), b.report())
        await a.train(1, 1, 1, 1)
        await b.train(3, 3, 3, 3)
        await a.close()
    # The row of the first member is there before that has closed the round.
    (row,) = read_metrics(tmp_path)
    assert (row.accuracy, row.notes["attempt"]["members"]) == (None, [0, 1])
    async with theatre(cfl, 2, tmp_path) as (a, b):
        a.status = Status(finished=1, accuracy=0.25)
        await asyncio.gather(a.report(), b.report())
        (row,) = read_metrics(tmp_path)
        assert (row.accuracy, row.notes["attempt"]["members"]) == (0.25, [0, 1])
    async with theatre(cfl, 2, tmp_path) as (a, b):
        a.status = Status(finished=1, accuracy=0.75)
        await a.report()
        await b.close()
        await b.report()
        # Rows that are there are not written again; the other's comes with its report.
        assert [row.accuracy for row in read_metrics(tmp_path)] == [0.25, 0.5]


async def test_one_that_returns_at_the_end_of_a_round_holds_nobody_up() -> None:
    ifca = plan("ifca", n=3, rounds=3, central={"clusters": 2, "redraws": 0})
    async with theatre(ifca) as (a, b, c):
        await asyncio.gather(*(peer.report() for peer in (a, b, c)))
        for peer, choice in ((a, 0), (b, 1), (c, 1)):
            await peer.report(await peer.task(Work.DRAW), choice=choice)
        for peer in (a, b, c):
            await peer.train(1, 1, 1, 1)
        for peer in (a, b, c):
            await peer.report(await peer.task(Work.CHOOSE), choice=0)
        # Round 1 is over; c goes before it has closed it, and comes back at the end of round 2.
        await c.ask(Leave(update=c.update()))
        for peer in (a, b):
            await peer.report(await peer.task(Work.CHOOSE), choice=0)
        for peer in (a, b):
            await peer.train(1, 1, 1, 1)
        task = await a.task(Work.CHOOSE)
        assert (task.round, task.version) == (2, 2)
        for peer in (a, b, c):
            await peer.report(task, choice=0)
        assert (await a.close())[0].round == 2
        assert (await c.close())[0].round == 2


def test_a_crash_between_the_file_and_the_tree_leaves_the_round_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfl, layout = plan("cfl"), Layout(model=MODEL, size=SIZE, trainable=SIZE, fingerprint="")
    store, method = CoordinatorStore(tmp_path, cfl), new_method(cfl, layout.size, layout.trainable)
    assert isinstance(method, ClusterRounds)
    saved = Saved(layout, method, {0: "0" * 32}, Standing({0: 0}, {0: 0}), (0,))
    method.server.tree.admit(0)
    for t in (1, 2):
        method.version = t
        method.server.tree.nodes[0].update = vector(t, t, t, t)
        if t == 2:
            monkeypatch.setattr(store._tree, "save", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                store.save(saved)
        else:
            store.save(saved)
    loaded = CoordinatorStore(tmp_path, cfl).load()
    assert loaded is not None
    assert (loaded.method.version, loaded.standing) == (1, Standing({0: 0}))
    model = loaded.method.models()[0]
    assert model is not None
    assert model.tolist() == [1, 1, 1, 1]
