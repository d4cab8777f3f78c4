"""The virtual federation against the reference population, by hand, and through its scripts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import federate, make_scenario
from softmax import MODEL_BYTES, Softmax

from peer.rundir import MetricRow, TopologyRow
from simulations.population import Population
from simulations.scenarios.scenario import Scenario
from simulations.scenarios.virtual import Progress, VirtualFederation
from simulations.scenarios.world import REUNION, detection_seconds

METHODS = ["panm-grad", "panm-loss", "pens", "random", "fixed", "oracle", "local"]
NETWORK = {
    "links": {"latency": {"uniform": [0.01, 0.3]}, "jitter": {"uniform": [0, 0.1]},
              "bandwidth": 0.01, "loss": 0.05},
    "peers": {"speed": {"lognormal": [100, 0.5]}},
}  # fmt: skip

Rows = list[tuple[MetricRow, TopologyRow]]


def run(scenario: Scenario, **options: Any) -> tuple[VirtualFederation, Rows]:
    federation = federate(scenario, **options)
    return federation, list(federation.run())


def of_peer(rows: Rows, index: int) -> list[int]:
    """Return the rounds that a peer finished, in order."""
    return [metric.t for metric, _ in rows if metric.index == index]


def test_cosines_of_many_have_the_bits_of_each() -> None:
    from peer.matching.similarity import (
        GradientEvidence,
        gradient_similarities,
        gradient_similarity,
    )

    rng = np.random.default_rng(0)
    for m in (3, 128, 1000, 70_001):
        made = [GradientEvidence(*rng.standard_normal((2, m)).astype(np.float32)) for _ in range(6)]
        made[2].g[0], made[3].h[:] = np.nan, 0
        for fade in (0.0, 3.0):
            expected = [gradient_similarity(made[0], other, 0.3, fade) for other in made]
            assert gradient_similarities(made[0], made, 0.3, fade) == expected
    assert gradient_similarities(made[0], [], 0.5) == []


# Lockstep


@pytest.mark.parametrize("method", METHODS)
def test_lockstep_over_any_network_is_the_population_bit_by_bit(method: str) -> None:
    check_against_population(make_scenario(NETWORK, method=method))


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("evidence", ["exact", "sketch"])
def test_so_do_exact_evidence_and_half_precision(precision: str, evidence: str) -> None:
    changes: dict[str, Any] = {
        "matching": {"evidence": evidence, "weighting": "samples"},
        "network": {"precision": precision},
    }
    check_against_population(make_scenario(NETWORK, **changes))


def check_against_population(scenario: Scenario) -> None:
    plan = scenario.plan
    federation, rows = run(scenario)
    population = Population(plan, plan.method, learners=[Softmax(plan, i) for i in range(plan.n)])
    expected = {(row["t"], row["index"]): row for rows in population.run() for row in rows}
    assert len(rows) == len(expected)
    received = dict.fromkeys(range(plan.n), 0)
    for metric, topology in rows:
        row = expected[metric.t, metric.index]
        received[metric.index] += row["payload_received"]
        assert topology.neighbours == row["neighbours"]
        assert topology.bag == row["bag"]
        assert metric.accuracy == row["accuracy"]
        assert (metric.precision, metric.recall) == (row["precision"], row["recall"])
        assert metric.payload_received == received[metric.index]
    for own, other in zip(federation.models, population.models, strict=True):
        np.testing.assert_array_equal(own, other)


def test_three_peers_by_hand() -> None:
    """A model takes a second, a request 0.1 s, training 1 s; each pulls two and serves two."""
    tables = {
        "links": {"latency": 0.1, "bandwidth": MODEL_BYTES / 125_000},
        "peers": {"speed": 60},
    }
    _, rows = run(make_scenario(tables, n=3, rounds=1, method="random", min_peers=2))
    ends = {metric.index: metric.time for metric, _ in rows}
    # Asked at 1.0, requests are there at 1.1. First answers leave at 1.1, second ones at 2.1, and
    # begin to arrive at 1.2 and 2.2. Peer 0 gets both at 1.2: it takes one until 2.2, one until
    # 3.2. Peer 1 gets one at 1.2 and one at 2.2; peer 2 both at 2.2, until 3.2 and 4.2.
    assert ends == pytest.approx({0: 3.2, 1: 3.2, 2: 4.2})
    assert [metric.payload_received for metric, _ in rows] == [2 * MODEL_BYTES] * 3
    metric = next(metric for metric, _ in rows if metric.index == 2)
    assert metric.seconds.train == 1.0
    assert metric.seconds.match == pytest.approx(3.2)
    assert metric.seconds.round == pytest.approx(4.2)


def test_four_pulls_at_a_time() -> None:
    """Eight candidates and no limit but latency: the second four are asked as the first answer."""
    tables = {"links": {"latency": 0.1}, "peers": {"speed": 60}}
    changes = {"n": 9, "rounds": 1, "method": "panm-loss", "matching": {"l": 8, "k": 2, "t1": 1}}
    _, rows = run(make_scenario(tables, **changes))
    assert [metric.time for metric, _ in rows] == pytest.approx([1.4] * 9)


def test_lockstep_waits_for_the_slowest_and_async_does_not() -> None:
    def ends(staleness: int | str) -> dict[int, float]:
        tables = {
            "links": {"latency": 0.01},
            "peers": {"speed": 60, "classes": [{"name": "slow", "peers": [0], "speed": 6}]},
        }
        scenario = make_scenario(tables, method="random", network={"staleness": staleness})
        _, rows = run(scenario)
        return {metric.index: metric.time for metric, _ in rows if metric.t == 12}

    lockstep, free = ends(0), ends("async")
    assert min(lockstep.values()) > 90
    assert free[0] == pytest.approx(12 * 10.02)
    assert sorted(free.values())[-2] < 12 * 1.1


def test_nobody_in_lockstep_is_further_ahead_than_snapshots_are_kept() -> None:
    """Peers that need nothing of each other still wait for the slow one, as live peers do."""
    slow = {"speed": 600, "classes": [{"name": "slow", "peers": [0], "speed": 6}]}
    scenario = make_scenario({"peers": slow}, method="fixed", matching={"k": 1})
    federation, rows = run(scenario)
    assert any(0 not in peer.matcher.bag for peer in federation.peers)
    finished, ahead = dict.fromkeys(range(10), 0), 0
    for metric, _ in rows:
        finished[metric.index] = metric.t
        ahead = max(ahead, max(finished.values()) - finished[0])
    assert ahead == scenario.plan.network.history
    # Who learns alone waits for nobody.
    _, rows = run(make_scenario({"peers": slow}, method="local"))
    assert [m.time for m, _ in rows if m.index and m.t == 12] == pytest.approx([1.2] * 9)


def test_bounded_staleness_takes_nothing_older() -> None:
    tables = {
        "links": {"latency": 0.01},
        "peers": {"speed": 60, "classes": [{"name": "slow", "peers": [0, 1], "speed": 24}]},
    }
    scenario = make_scenario(tables, method="random", network={"staleness": 2, "history": 8})
    federation = federate(scenario)
    seen: list[tuple[int, int]] = []
    delivered = federation._delivered

    def spy(exchange: Any, snapshot: Any, *rest: Any) -> None:
        seen.append((exchange.t, snapshot.t))
        delivered(exchange, snapshot, *rest)

    federation._delivered = spy  # type: ignore[method-assign]
    assert len(list(federation.run())) > 100
    assert all(got >= wanted - 2 for wanted, got in seen)
    assert any(got != wanted for wanted, got in seen)


# Runs repeat, bytes are conserved, trainings are few batches


@given(
    method=st.sampled_from(METHODS),
    staleness=st.sampled_from([0, 2, "async"]),
    latency=st.floats(0, 0.5),
    bandwidth=st.floats(0.005, 1),
    loss=st.sampled_from([0.0, 0.1]),
    topology=st.sampled_from(
        [
            {"kind": "ring"},
            {"kind": "star"},
            {"kind": "k-regular", "degree": 4},
            {"kind": "complete"},
        ]
    ),
)
@settings(max_examples=25, deadline=None)
def test_bytes_are_conserved_and_time_never_goes_back(
    *,
    method: str,
    staleness: int | str,
    latency: float,
    bandwidth: float,
    loss: float,
    topology: Any,
) -> None:
    tables = {
        "topology": topology,
        "links": {"latency": latency, "bandwidth": bandwidth, "loss": loss},
        "peers": {"speed": {"lognormal": [60, 0.4]}},
        "script": [
            {"round": 2, "do": "kill", "peers": [3]},
            {"round": 3, "do": "partition", "groups": [["0-4"]]},
            {"second": 9.0, "do": "restart", "peers": [3]},
            {"round": 5, "do": "heal"},
        ],
    }
    scenario = make_scenario(tables, method=method, rounds=6, network={"staleness": staleness})
    federation, rows = run(scenario)
    while federation.clock.step():  # what was under way when the last peer ended
        pass
    sent = sum(peer.sent for peer in federation.peers)
    assert sent == sum(peer.received for peer in federation.peers) + federation.lost
    times = [metric.time for metric, _ in rows]
    assert times == sorted(times)
    for metric, choice in rows:
        linked = set(scenario.graph.neighbors(metric.index))
        assert linked.issuperset(choice.neighbours)
    again = run(scenario)[1]
    assert [repr(row) for row in again] == [repr(row) for row in rows]


def test_trainings_are_computed_many_at_once() -> None:
    federation, rows = run(make_scenario(NETWORK, method="random", network={"staleness": "async"}))
    assert federation.backlog.trained == len(rows) == 120
    assert federation.backlog.batches < 40


# Topology


def test_peers_choose_among_those_they_can_reach() -> None:
    scenario = make_scenario({"topology": {"kind": "ring"}}, matching={"l": 9})
    _, rows = run(scenario)
    for metric, choice in rows:
        i = metric.index
        assert set(choice.neighbours) == {(i - 1) % 10, (i + 1) % 10}
        # Two evidences of 2 x 32 buckets and two models a round of search.
    first = next(metric for metric, _ in rows if (metric.t, metric.index) == (1, 0))
    assert first.payload_received == 2 * 256 + 2 * MODEL_BYTES


# The script


def test_a_killed_peer_is_waited_for_until_it_is_called_dead() -> None:
    tables = {
        "links": {"latency": 0.01},
        "peers": {"speed": 60},
        "script": [{"round": 4, "do": "kill", "peers": [3]}],
    }
    scenario = make_scenario(tables, method="random", matching={"k": 9})
    federation, rows = run(scenario)
    assert of_peer(rows, 3) == [1, 2, 3]
    assert all(of_peer(rows, i) == list(range(1, 13)) for i in range(10) if i != 3)
    # It died as it began round 4; the others noticed once its suspicion had run out.
    died = next(metric.time for metric, _ in rows if (metric.t, metric.index) == (3, 3))
    fourth = [metric for metric, _ in rows if metric.t == 4]
    assert all(
        metric.time == pytest.approx(died + detection_seconds(scenario.plan)) for metric in fourth
    )
    assert all(metric.missing == 1 for metric in fourth)
    assert all(3 not in choice.neighbours for metric, choice in rows if metric.t >= 4)
    assert sum(metric.missing for metric, _ in rows) == 9
    assert federation.clock.now < 12 * 1.1 + detection_seconds(scenario.plan) + 1


def test_who_leaves_is_missed_by_nobody() -> None:
    tables = {
        "links": {"latency": 0.01},
        "peers": {"speed": 60},
        "script": [{"round": 4, "do": "leave", "peers": [3]}],
    }
    _, rows = run(make_scenario(tables, method="random", matching={"k": 9}))
    assert of_peer(rows, 3) == [1, 2, 3]
    last = max(metric.time for metric, _ in rows)
    assert last < 12 * 1.1


def test_a_peer_that_is_soon_back_goes_on_where_it_was() -> None:
    """Killed in its fourth round and back before anybody called it dead: nothing is lost."""
    script = [
        {"second": 3.5, "do": "kill", "peers": [3]},
        {"second": 5.0, "do": "restart", "peers": [3]},
    ]
    tables = {"links": {"latency": 0.01}, "peers": {"speed": 60}}
    whole, expected = run(make_scenario(tables))
    federation, rows = run(make_scenario({**tables, "script": script}))
    assert of_peer(rows, 3) == list(range(1, 13))
    assert sum(metric.missing for metric, _ in rows) == 0
    key = lambda row: (row[0].t, row[0].index)  # noqa: E731
    assert [choice for _, choice in sorted(rows, key=key)] == [
        choice for _, choice in sorted(expected, key=key)
    ]
    for own, other in zip(federation.models, whole.models, strict=True):
        np.testing.assert_array_equal(own, other)
    assert federation.clock.now > whole.clock.now


def test_a_peer_that_was_long_away_catches_up() -> None:
    script = [
        {"round": 3, "do": "kill", "peers": [3]},
        {"round": 10, "do": "restart", "peers": [3]},
    ]
    tables = {"links": {"latency": 0.01}, "peers": {"speed": 60}, "script": script}
    _, rows = run(make_scenario(tables))
    assert of_peer(rows, 3) == [1, 2, 10, 11, 12] or of_peer(rows, 3) == [1, 2, 11, 12]
    back = next(m for m, _ in rows if m.index == 3 and m.t > 2)
    assert "caught_up_with" in back.notes
    # From the round that it said, the others reckon with it.
    assert any(3 in choice.neighbours for _, choice in rows if choice.t > 10)
    assert all(of_peer(rows, i)[-1] == 12 for i in range(10))


def test_a_late_comer_takes_over_a_model_and_is_found() -> None:
    script = [{"round": 8, "do": "join", "peers": [6]}]
    tables = {"links": {"latency": 0.01}, "peers": {"speed": 60}, "script": script}
    _, rows = run(make_scenario(tables, method="random", matching={"k": 9}))
    assert of_peer(rows, 6)[0] in (8, 9)
    assert of_peer(rows, 6)[-1] == 12
    first = next(metric for metric, _ in rows if metric.index == 6)
    assert first.notes["caught_up_with"] != 6
    assert all(6 not in choice.neighbours for _, choice in rows if choice.t < 8)
    assert any(6 in choice.neighbours for _, choice in rows if choice.t > 9)
    assert sum(metric.missing for metric, _ in rows) == 0


def test_sides_of_a_partition_do_not_meet_until_it_heals() -> None:
    script = [
        {"round": 4, "do": "partition", "groups": [["0-4"], ["5-9"]]},
        {"round": 8, "do": "heal"},
    ]
    tables = {"links": {"latency": 0.01}, "peers": {"speed": 60}, "script": script}
    federation, rows = run(make_scenario(tables, method="random", matching={"k": 9}))
    began = min(m.time - m.seconds.round for m, _ in rows if m.t == 4)
    healed = min(m.time - m.seconds.round for m, _ in rows if m.t == 8)
    for metric, choice in rows:
        across = any((j < 5) != (metric.index < 5) for j in choice.neighbours)
        # Of round 3 some may have come from across before.
        if metric.t >= 4 and metric.time < healed:
            assert not across
        if metric.time - metric.seconds.round > healed + REUNION:
            assert len(choice.neighbours) == 9
    stuck = [m for m, _ in rows if m.missing]
    assert {m.t for m in stuck} <= {3, 4}
    assert max(m.missing for m in stuck) == 5
    assert min(m.time for m in stuck) == pytest.approx(began + detection_seconds(federation.plan))
    assert all(of_peer(rows, i)[-1] == 12 for i in range(10))


def test_a_drifted_peer_finds_its_new_cluster() -> None:
    script = [{"round": 9, "do": "drift", "peers": [0], "cluster": 1}]
    scenario = make_scenario({"script": script}, method="panm-loss", rounds=30, matching={"t1": 6})
    _, rows = run(scenario)
    own = {metric.t: (metric, choice) for metric, choice in rows if metric.index == 0}
    assert [own[t][0].cluster for t in (8, 9)] == [0, 1]
    assert own[9][0].accuracy < own[8][0].accuracy - 0.1  # type: ignore[operator]
    bag = own[30][1].bag
    assert own[30][0].precision == sum(j % 2 for j in bag) / len(bag)
    assert own[30][0].precision >= 0.9  # type: ignore[operator]
    # The others' figures know of it, too: peer 0 is not of cluster 0 any more.
    other = next(choice for metric, choice in rows if (metric.t, metric.index) == (8, 2))
    assert 0 in other.bag


def test_who_turns_malicious_publishes_something_else_from_then_on() -> None:
    script = [{"round": 5, "do": "attack", "peers": [0], "attack": "sign-flip"}]
    honest, expected = run(make_scenario(method="random", matching={"k": 9}, rounds=6))
    federation, rows = run(
        make_scenario({"script": script}, method="random", matching={"k": 9}, rounds=6)
    )
    for (metric, _), (other, _) in zip(rows, expected, strict=True):
        assert ("attack" in metric.notes) == (metric.index == 0 and metric.t >= 5)
        if metric.t < 5:
            assert metric.accuracy == other.accuracy
    learner = Softmax(federation.plan, 0)
    before = honest.models[0]
    assert not np.array_equal(federation.models[1], honest.models[1])
    assert before.shape == learner.initial().shape


def test_slow_and_degraded_from_a_round_on() -> None:
    script = [
        {"round": 3, "do": "slow", "peers": ["all"], "factor": 5},
        {"round": 5, "do": "slow", "peers": ["all"], "factor": 1},
        {"round": 7, "do": "degrade", "peers": ["all"], "latency": 10},
    ]
    tables = {"links": {"latency": 0.01}, "peers": {"speed": 60}, "script": script}
    _, rows = run(make_scenario(tables, method="random", rounds=8))
    trained = {m.t: m.seconds.train for m, _ in rows if m.index == 4}
    assert trained == pytest.approx({1: 1, 2: 1, 3: 5, 4: 5, 5: 1, 6: 1, 7: 1, 8: 1})
    matched = {m.t: m.seconds.match for m, _ in rows if m.index == 4}
    assert matched[6] == pytest.approx(0.02)
    assert matched[8] == pytest.approx(0.2)


def test_a_run_whose_last_peers_are_killed_ends() -> None:
    script = [{"round": 3, "do": "kill", "peers": ["all"]}]
    _, rows = run(make_scenario({"script": script}))
    assert {metric.t for metric, _ in rows} == {1, 2}


def test_progress_knows_the_least() -> None:
    progress = Progress()
    for i in range(3):
        progress.note(i, 0)
    progress.note(0, 2)
    progress.note(1, 3)
    assert (progress.least, len(progress)) == (0, 3)
    progress.note(2, 5)
    assert progress.least == 2
    progress.drop(0)
    assert progress.least == 3
    progress.note(7, 1)
    assert progress.least == 1
