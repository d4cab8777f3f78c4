"""Coordinated federations on the virtual network: against the laboratory, by hand, by script."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import Spread, coordinate, make_scenario
from softmax import MODEL_BYTES

from peer.coordinated import IDLE
from peer.rundir import MetricRow, TopologyRow
from simulations.central import CentralPopulation, LearnerCrew
from simulations.clustered import ClusteredPopulation
from simulations.scenarios.coordinated import DELAYS, CoordinatedFederation
from simulations.scenarios.scenario import Scenario

METHODS = ["fedavg", "ifca", "cfl"]
NETWORK = {
    "topology": {"kind": "ring"},
    "links": {"latency": {"uniform": [0.01, 0.3]}, "jitter": {"uniform": [0, 0.1]},
              "bandwidth": 0.01, "loss": 0.05},
    "peers": {"speed": {"lognormal": [100, 0.5]}},
    "coordinator": {"upload": 0.05, "latency": 0.2},
}  # fmt: skip
SECOND = MODEL_BYTES / 125_000
"""Mbit/s by which a model takes a second."""

Rows = list[tuple[MetricRow, TopologyRow]]


def run(scenario: Scenario) -> tuple[CoordinatedFederation, Rows]:
    federation = coordinate(scenario)
    return federation, list(federation.run())


def ends(rows: Rows, t: int) -> dict[int, float]:
    """Return when each peer ended round t."""
    return {metric.index: metric.time for metric, _ in rows if metric.t == t}


# Without faults it is the laboratory


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"central": {"fraction": 0.5, "redraws": 2}, "matching": {"weighting": "samples"}},
        {"network": {"precision": "bfloat16"}},
    ],
    ids=["all", "half", "bfloat16"],
)
def test_over_any_network_it_is_the_laboratory_bit_by_bit(
    method: str, changes: dict[str, Any]
) -> None:
    tables = {"cfl": {"patience": 2, "eps1": 1.0}, **changes}
    scenario = make_scenario(NETWORK, method=method, **tables)
    plan = scenario.plan
    federation, rows = run(scenario)
    crew = LearnerCrew([Spread(plan, i) for i in range(plan.n)])
    population = (
        ClusteredPopulation(plan, crew)
        if method == "cfl"
        else CentralPopulation(plan, method, crew)
    )
    expected = {(row["t"], row["index"]): row for rows in population.run() for row in rows}
    assert len(rows) == len(expected)
    sent = dict.fromkeys(range(plan.n), 0)
    for metric, topology in rows:
        row = expected[metric.t, metric.index]
        sent[metric.index] += row["payload_sent"]
        assert (topology.neighbours, topology.bag) == (row["neighbours"], row["bag"])
        for name in ("accuracy", "loss", "precision", "recall", "notes"):
            assert getattr(metric, name) == row[name]
        assert metric.payload_sent == sent[metric.index]
    for own, other in zip(federation.models, population.models, strict=True):
        np.testing.assert_array_equal(own, other)


def test_bytes_received_are_those_of_the_laboratory_but_for_what_live_peers_know() -> None:
    """Every round each peer gets the standing of all, 8 n bytes. Of CFL the zeros of the root are
    fetched, which the laboratory does not count; of IFCA initial models are computed, not sent."""
    for method, more in (("fedavg", 0), ("cfl", MODEL_BYTES)):
        scenario = make_scenario(NETWORK, method=method)
        federation, _ = run(scenario)
        rounds, n = scenario.plan.rounds, scenario.plan.n
        received = rounds * (MODEL_BYTES + 8 * n) + more
        assert [peer.received for peer in federation.peers] == [received] * n
    scenario = make_scenario(NETWORK, method="ifca", rounds=3, seed=2)
    federation, rows = run(scenario)
    assert {metric.notes["model"] for metric, _ in rows} == {0, 1}
    received = 3 * (2 * MODEL_BYTES + 8 * 10)
    assert [peer.received for peer in federation.peers] == [received] * 10


# Times by hand: a task, a request and a report take 0.1 s each, training 1 s


def test_two_peers_by_hand() -> None:
    """The coordinator sends a model in a second, and the standing of a round in s."""
    tables = {
        "links": {"latency": 0.1},
        "peers": {"speed": 60},
        "coordinator": {"upload": SECOND},
    }
    _, rows = run(make_scenario(tables, n=2, rounds=2, method="fedavg"))
    s = 16 / MODEL_BYTES
    # Reports are there at 0.1, tasks at 0.2; that the model is the initial one is known at 0.4.
    # Trained at 1.4, reported at 1.5, asked for at 1.6, there at 1.7: the round is finished. The
    # standing has left for peer 0 at 1.7 + s and for peer 1 at 1.7 + 2 s, and arrives 0.1 later.
    # They ask for the new model at 1.9 + s and 1.9 + 2 s; it leaves until 2.9 + s and 3.9 + s.
    assert ends(rows, 1) == pytest.approx({0: 3.0 + s, 1: 4.0 + s})
    # Reported 0.1 later, told to train 0.1 later, and the model is there: the same again from
    # 3.2 + s and 4.2 + s, in 1.3 seconds; the round is finished at 5.5 + s.
    assert ends(rows, 2) == pytest.approx({0: 6.8 + 2 * s, 1: 7.8 + 2 * s})
    metric = next(metric for metric, _ in rows if (metric.t, metric.index) == (2, 0))
    assert metric.seconds.train == pytest.approx(1.2)
    assert metric.seconds.round == pytest.approx(3.8 + s)


def test_four_pulls_at_a_time() -> None:
    """Nine updates, each of which a peer sends in a second: three turns, asked for 0.1 later."""
    tables = {"links": {"latency": 0.1}, "peers": {"speed": 60, "upload": SECOND}}
    _, rows = run(make_scenario(tables, n=9, rounds=1, method="fedavg"))
    # The first four are asked for at 1.5 and there at 2.7; so is the last at 1.5 + 3 * 1.2. Then
    # the standing comes in 0.1, and the model in 0.2.
    assert ends(rows, 1) == pytest.approx(dict.fromkeys(range(9), 1.5 + 3.6 + 0.3))


def test_ifca_fetches_its_models_one_after_the_other() -> None:
    tables = {"links": {"latency": 0.1}, "peers": {"speed": 60}}
    scenario = make_scenario(tables, rounds=1, method="ifca", central={"redraws": 0})
    _, rows = run(scenario)
    # Drawn models are compared at 0.2, known at 0.3; the task to train is there at 0.4, that the
    # model is an initial one known at 0.6. Trained at 1.6, reported at 1.7, fetched in three turns
    # of 0.2 until 2.3. The task to choose is there at 2.4, the models at 2.6 and 2.8, the choice at
    # 2.9; the standing at 3.0, and the model is there already.
    assert ends(rows, 1) == pytest.approx(dict.fromkeys(range(10), 3.0))


# Who is waited for


def test_the_late_are_left_behind_and_not_waited_for_again() -> None:
    tables = {"peers": {"speed": 60, "classes": [{"name": "slow", "peers": [0], "speed": 5}]}}
    scenario = make_scenario(tables, method="fedavg", rounds=4, network={"round_timeout": 5.0})
    _, rows = run(scenario)
    # Training takes peer 0 twelve seconds. Round 1 ends at its deadline, the others after theirs.
    others = {t: {end for i, end in ends(rows, t).items() if i} for t in range(1, 5)}
    assert others == {1: {5.0}, 2: {6.0}, 3: {7.0}, 4: {8.0}}
    took_part = {m.index for m, _ in rows if m.t == 1 and m.notes["took_part"]}
    assert took_part == set(range(1, 10))
    # It delivers at 12 and is told of the last round alone.
    assert [m.t for m, _ in rows if m.index == 0] == [4]


def test_without_a_quorum_the_deadline_does_not_count() -> None:
    slow = {"name": "slow", "peers": ["0-5"], "speed": 5}
    tables = {"peers": {"speed": 60, "classes": [slow]}}
    plan = {"method": "fedavg", "rounds": 1, "network": {"round_timeout": 5.0}}
    _, rows = run(make_scenario(tables, **plan))
    assert set(ends(rows, 1).values()) == {12.0}
    _, rows = run(make_scenario(tables, **plan, central={"quorum": 0.4}))
    assert min(ends(rows, 1).values()) == 5.0


def test_a_killed_peer_is_missed_soon_and_goes_on_after_its_return() -> None:
    script = [
        {"round": 3, "do": "kill", "peers": [4]},
        {"second": 9.5, "do": "restart", "peers": [4]},
    ]
    tables = {"peers": {"speed": 60}, "script": script}
    federation, rows = run(make_scenario(tables, method="fedavg"))
    # Round 3 ends when it is noticed that the killed one is gone; others trained for a second.
    assert max(ends(rows, 2).values()) == 2.0
    assert {end for i, end in ends(rows, 3).items() if i != 4} == {2.0 + DELAYS.death}
    assert [m.t for m, _ in rows if m.index == 4] == [1, 2, *range(8, 13)]
    took_part = [m.t for m, _ in rows if m.index == 4 and m.notes["took_part"]]
    assert took_part == [1, 2, *range(10, 13)]
    np.testing.assert_array_equal(federation.models[4], federation.models[0])


def test_one_that_is_back_before_it_is_missed_does_its_task_again() -> None:
    script = [
        {"second": 0.5, "do": "kill", "peers": [4]},
        {"second": 1.5, "do": "restart", "peers": [4]},
    ]
    tables = {"peers": {"speed": 60}, "script": script}
    _, rows = run(make_scenario(tables, method="fedavg", rounds=2))
    assert set(ends(rows, 1).values()) == {2.5}
    assert all(metric.notes["took_part"] for metric, _ in rows)


def test_one_that_leaves_is_not_waited_for_at_all() -> None:
    script = [{"second": 1.5, "do": "leave", "peers": [4]}]
    tables = {"peers": {"speed": 60}, "script": script}
    _, rows = run(make_scenario(tables, method="fedavg", rounds=3))
    assert [set(ends(rows, t).values()) for t in (1, 2, 3)] == [{1.0}, {2.0}, {3.0}]
    assert [m.t for m, _ in rows if m.index == 4] == [1]


@pytest.mark.parametrize("method", METHODS)
def test_newcomers_take_part_and_late_ones_are_sent_to_their_cluster(method: str) -> None:
    script = [
        {"round": 5, "do": "join", "peers": [6]},
        {"second": 40.0, "do": "join", "peers": [7]},
    ]
    tables = {"peers": {"speed": 60}, "script": script}
    plan = {"seed": 2, "rounds": 9, "cfl": {"patience": 2, "eps1": 1.0}}
    federation, rows = run(make_scenario(tables, method=method, **plan))
    assert [m.t for m, _ in rows if m.index == 6] == list(range(6, 10))
    (last,) = [(m, choice) for m, choice in rows if m.index == 7]
    assert last[0].t == 9
    assert not last[0].notes["took_part"]
    if method != "fedavg":  # it has the model of the one cluster that is like it
        assert last[0].precision == 1.0
    np.testing.assert_array_equal(federation.models[7], federation.models[1])


# Partitions


def parted(groups: list[list[int | str]], healed: float) -> dict[str, Any]:
    script: list[dict[str, Any]] = [
        {"second": 2.5, "do": "partition", "groups": groups},
        {"second": healed, "do": "heal"},
    ]
    return {"peers": {"speed": 60}, "script": script}


@pytest.mark.parametrize("groups", [[["coordinator"]], [["all"], ["coordinator"]]])
def test_peers_that_are_parted_from_the_coordinator_wait(groups: list[list[int | str]]) -> None:
    _, rows = run(make_scenario(parted(groups, 10.0), method="fedavg", rounds=4))
    back = 10.0 + DELAYS.reunion
    assert [set(ends(rows, t).values()) for t in range(1, 5)] == [{1}, {2}, {back}, {back + 1}]
    assert all(metric.notes["took_part"] for metric, _ in rows)


def test_the_first_to_return_to_a_coordinator_that_is_alone_begin() -> None:
    _, rows = run(make_scenario(parted([["coordinator"]], 100.0), method="fedavg", rounds=4))
    # Its training of round 3 is done; it is asked for it again, and says so after a pause.
    back = 100.0 + DELAYS.reunion + IDLE
    assert [set(ends(rows, t).values()) for t in (3, 4)] == [{back}, {back + 1}]
    assert [m.index for m, _ in rows if m.t == 3 and m.notes["took_part"]] == [0]
    assert all(metric.notes["took_part"] for metric, _ in rows if metric.t == 4)


def test_a_side_without_the_coordinator_is_given_up_and_returns() -> None:
    _, rows = run(make_scenario(parted([["0-2"], ["3-9", "coordinator"]], 60.0), method="fedavg"))
    there = {t: end for t in range(1, 13) for i, end in ends(rows, t).items() if i == 9}
    # The parted count as there until nothing was heard of them for long.
    assert there[3] == 2.5 + DELAYS.partition
    assert there[12] == there[3] + 9
    assert [m.t for m, _ in rows if m.index == 0] == [1, 2, 12]
    assert ends(rows, 12)[0] == 60.0 + DELAYS.reunion


def test_a_coordinator_that_no_group_names_is_on_a_side_with_peers() -> None:
    def sides(groups: list[list[int | str]]) -> list[int]:
        scenario = make_scenario(parted(groups, 60.0), n=4)
        return scenario.script[0].sides(scenario.people, ())  # type: ignore[union-attr]

    assert sides([["0-1"]]) == [1, 1, 0, 0, 0]
    assert sides([["0-1"], ["2-3"]]) == [1, 1, 2, 2, 1]
    assert sides([["0-1"], ["2-3", "coordinator"]]) == [1, 1, 2, 2, 2]


# What else a script does


def test_a_drifted_peer_trains_with_its_new_data_from_then_on() -> None:
    script = [{"round": 3, "do": "drift", "peers": [0], "cluster": 1}]
    federation, rows = run(make_scenario({"script": script}, method="fedavg", rounds=4))
    scenario = make_scenario(method="fedavg", rounds=4)
    plan = scenario.plan
    learners = [Spread(plan, i) for i in range(plan.n)]
    population = CentralPopulation(plan, "fedavg", LearnerCrew(learners))
    population.step()
    population.step()
    learners[0] = Spread(plan, 0, 1)
    population.step()
    population.step()
    np.testing.assert_array_equal(federation.models[0], population.models[0])
    assert [metric.cluster for metric, _ in rows if metric.index == 0] == [0, 0, 1, 1]


def test_who_turns_malicious_sends_something_else_from_then_on() -> None:
    script = [{"round": 3, "do": "attack", "peers": [0], "attack": "sign-flip"}]
    _, honest = run(make_scenario(method="cfl", rounds=4))
    _, rows = run(make_scenario({"script": script}, method="cfl", rounds=4))
    for (metric, _), (other, _) in zip(rows, honest, strict=True):
        assert ("attack" in metric.notes) == (metric.index == 0 and metric.t >= 3)
        assert (metric.loss == other.loss) == (metric.t < 3)


def test_what_diverges_is_not_sent_and_left_out() -> None:
    scenario = make_scenario(method="fedavg", rounds=2)
    federation = coordinate(scenario)
    learner = federation.learning._learners[3]  # type: ignore[attr-defined]
    learner.fit = lambda model, _: np.full_like(model, np.nan)
    list(federation.run())
    assert [peer.sent // MODEL_BYTES for peer in federation.peers] == [2] * 3 + [0] + [2] * 6
    assert np.isfinite(federation.models[3]).all()


@given(
    method=st.sampled_from(METHODS),
    fraction=st.sampled_from([0.5, 1.0]),
    latency=st.floats(0, 0.5),
    bandwidth=st.floats(0.005, 1),
    loss=st.sampled_from([0.0, 0.1]),
    upload=st.floats(0.005, 1),
    timeout=st.floats(1, 30),
)
@settings(max_examples=25, deadline=None)
def test_bytes_are_conserved_and_runs_end_and_repeat(
    *,
    method: str,
    fraction: float,
    latency: float,
    bandwidth: float,
    loss: float,
    upload: float,
    timeout: float,
) -> None:
    tables = {
        "links": {"latency": latency, "bandwidth": bandwidth, "loss": loss},
        "peers": {"speed": {"lognormal": [60, 0.4]}},
        "coordinator": {"upload": upload},
        "script": [
            {"round": 2, "do": "kill", "peers": [3]},
            {"round": 2, "do": "slow", "peers": [1], "factor": 30},
            {"round": 3, "do": "partition", "groups": [["0-4"], ["5-9", "coordinator"]]},
            {"second": 9.0, "do": "restart", "peers": [3]},
            {"round": 4, "do": "join", "peers": [9]},
            {"round": 5, "do": "heal"},
            {"round": 5, "do": "degrade", "peers": [6], "latency": 3, "bandwidth": 0.5},
        ],
    }
    plan = {
        "rounds": 6, "central": {"fraction": fraction, "redraws": 1},
        "network": {"round_timeout": timeout},
    }  # fmt: skip
    scenario = make_scenario(tables, method=method, **plan)
    federation, rows = run(scenario)
    alive = [peer for peer in federation.peers if federation.world.alive[peer.index]]
    assert {peer.finished for peer in alive} == {6}
    while federation.clock.step():  # what was under way when the last peer ended
        pass
    sent = federation.served + sum(peer.sent for peer in federation.peers)
    received = federation.collected + sum(peer.received for peer in federation.peers)
    assert sent == received + federation.lost
    times = [metric.time for metric, _ in rows]
    assert times == sorted(times)
    again = run(scenario)[1]
    assert [repr(row) for row in again] == [repr(row) for row in rows]
