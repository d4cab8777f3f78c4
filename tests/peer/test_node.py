"""Peers in one process, over real sockets: they find each other, learn, and repeat exactly."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer import Peer, PeerSettings, Plan, Result, run
from peer.errors import StateError, UserError
from peer.learning.build import prepare
from peer.learning.learner import Learner, Vector
from peer.rundir import MetricRow, read_metrics, read_topology
from simulations.population import Population


def small(**changes: Any) -> Plan:
    """Six peers in two clusters, on digits: large enough to choose, small enough to be quick."""
    table: dict[str, Any] = {
        "n": 6,
        "rounds": 6,
        "method": "panm-grad",
        "matching": {"l": 3, "k": 2, "t1": 3, "tau": 2},
        "partition": {"kind": "rotation", "clusters": 2, "train_per_peer": 60},
        "training": {"batch": 20, "lr": 0.1},
        "network": {"linger": 10.0},
    }
    return Plan.model_validate(table | changes)


PAIR = Plan.model_validate(
    {"n": 2, "rounds": 2, "method": "random", "partition": {"train_per_peer": 20}}
)


def choices(results: list[Result]) -> list[list[tuple[int, list[int], list[int]]]]:
    return [
        [(row.t, row.neighbours, row.bag) for row in read_topology(result.state)]
        for result in results
    ]


def test_a_lockstep_run_repeats_bit_by_bit(tmp_path: Path) -> None:
    first = run(small(), state=tmp_path / "first")
    second = run(small(), state=tmp_path / "second")
    assert choices(first) == choices(second)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.model, other.model)
    assert all(result.rounds == 6 for result in first)


@pytest.mark.parametrize(
    "method", ["panm-loss", "pens", "random", "fixed", "oracle", "local", "panm-grad"]
)
def test_every_method_runs_to_the_last_round(tmp_path: Path, method: str) -> None:
    results = run(small(method=method, rounds=4), state=tmp_path)
    for result in results:
        rows = read_topology(result.state)
        assert [row.t for row in rows] == [1, 2, 3, 4]
        assert all(len(row.neighbours) == (0 if method == "local" else 2) for row in rows)
        if method == "oracle":
            assert all(j % 2 == row.index % 2 for row in rows for j in row.neighbours)


@pytest.mark.parametrize("staleness", [1, "async"])
def test_bounded_and_asynchronous_runs_finish(tmp_path: Path, staleness: int | str) -> None:
    # Rounds enough that it hardly counts by how many one begins before another.
    plan = small(rounds=30, network={"staleness": staleness, "linger": 10.0})
    results = run(plan, state=tmp_path)
    assert all(result.rounds == 30 for result in results)
    averaged = [len(row.neighbours) for r in results for row in read_topology(r.state)]
    assert sum(averaged) > len(averaged)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_half_precision_halves_the_models_on_the_wire(tmp_path: Path, precision: str) -> None:
    def model_bytes(name: str, **network: Any) -> int:
        plan = small(method="random", rounds=3, network={"linger": 10.0, **network})
        results = run(plan, state=tmp_path / name)
        return sum(
            json.loads((r.state / "traffic.json").read_text())["sent"]["model"]["payload_bytes"]
            for r in results
        )

    assert model_bytes("half", precision=precision) * 2 == model_bytes("full")


def test_sketches_save_the_payload_that_they_promise(tmp_path: Path) -> None:
    def received(evidence: str) -> list[int]:
        matching = {"l": 3, "k": 1, "t1": 4, "evidence": evidence}
        results = run(small(rounds=4, matching=matching), state=tmp_path / evidence)
        rows = [read_metrics(result.state) for result in results]
        return [row[-1].payload_received - row[0].payload_received for row in rows]

    promised = (1 + 0.2 * 3) / (2 * (3 + 1))
    for sketched, exact in zip(received("sketch"), received("exact"), strict=True):
        assert sketched <= promised * exact


class Diverging:
    """A learner whose training of round 3 ends in NaN as long as it starts from a mixed model."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self.own: list[Vector] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def fit(self, model: Vector, t: int) -> Vector:
        if t == 3 and not any(np.array_equal(model, own) for own in self.own):
            return np.full_like(model, np.nan)
        self.own.append(self._learner.fit(model, t))
        return self.own[-1]


def test_training_that_diverges_starts_again_from_ones_own_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = PAIR.model_copy(update={"rounds": 4})
    results = run(
        plan,
        state=tmp_path,
        make_learner=lambda plan, index: Diverging(prepare(plan, index)[0]),
    )
    for result in results:
        assert result.rounds == 4
        assert np.isfinite(result.model).all()
    assert caplog.text.count("training diverged in round 3") == 2


def test_alone_means_alone_for_a_late_one_too(tmp_path: Path) -> None:
    """It comes when the others are far ahead: no model of theirs, no round of its own left out."""
    plan = small(method="local", n=3, min_peers=2, rounds=60)

    async def federation() -> Result:
        address = asyncio.get_running_loop().create_future()
        ahead = [asyncio.Event() for _ in range(3)]

        def on_round(_plan: Plan, row: MetricRow) -> None:
            if row.t == 10:
                ahead[row.index].set()

        async def peer(index: int, others: list[str]) -> Result:
            settings = PeerSettings(state=tmp_path / str(index), index=index, peer=others)
            listening = None if index else address.set_result
            member = Peer(settings, plan=plan, on_listening=listening, on_round=on_round)
            return await member.run()

        async with asyncio.TaskGroup() as group:
            group.create_task(peer(0, []))
            first = await address
            group.create_task(peer(1, [first]))
            await asyncio.gather(*(event.wait() for event in ahead[:2]))
            late = group.create_task(peer(2, [first]))
        return late.result()

    late = asyncio.run(federation())
    assert [row.t for row in read_metrics(late.state)] == list(range(1, 61))
    population = Population(plan, "local")
    list(population.run())
    np.testing.assert_array_equal(late.model, population.models[2])


def test_a_state_directory_of_another_plan_is_refused(tmp_path: Path) -> None:
    run(PAIR, state=tmp_path)
    with pytest.raises(StateError, match="another plan"):
        run(PAIR.model_copy(update={"seed": 1}), state=tmp_path)


def test_a_finished_peer_that_is_started_again_ends_at_once(tmp_path: Path) -> None:
    first = run(PAIR, state=tmp_path)
    again = run(PAIR, state=tmp_path)
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.model, other.model)
        assert one.scores == other.scores


def test_a_model_that_does_not_fit_the_plan_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="digest"):
        run(small(model_digest="0" * 32), state=tmp_path)
