"""Scenarios on real processes, against the same on the virtual network."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from peer.errors import UserError
from peer.rundir import MetricRow, TopologyRow, read_metrics, read_topology
from simulations.cli import app
from simulations.runs import Equipment
from simulations.scenarios.namespaces import TOOLS
from simulations.scenarios.runs import Ground, calibrate, run_real, run_scenario
from simulations.scenarios.scenario import Scenario, load

POSSIBLE = os.geteuid() == 0 and all(map(shutil.which, TOOLS))
"""Whether namespaces can be made here."""
SLOW_ENOUGH = 20.0
"""Samples a second at which a round's training takes longer than all that the virtual network has
no time for: messages, files, averaging and evaluation of twelve peers on two cores."""


@pytest.fixture(autouse=True)
def nobody_stays() -> Any:
    """No test may leave a process behind."""
    yield
    assert psutil.Process().children(recursive=True) == []


def make_scenario(script: list[dict[str, Any]], tables: dict[str, Any], **plan: Any) -> Scenario:
    table: dict[str, Any] = {
        "n": 4,
        "rounds": 4,
        "seed": 5,
        "model": "sklearn-sgd",
        "matching": {"l": 3, "k": 2, "tau": 2},
        "partition": {"kind": "rotation", "clusters": 2, "train_per_peer": 60},
        "network": {"request_timeout": 30},
    }
    for key, value in plan.items():
        table[key] = {**table[key], **value} if isinstance(table.get(key), dict) else value
    scenario = Scenario.model_validate({"plan": table, "script": script, **tables})
    scenario.check()
    return scenario


def rows_of(run: Path) -> tuple[list[MetricRow], list[TopologyRow]]:
    return read_metrics(run), read_topology(run)


def check_equal(real: Path, virtual: Path) -> None:
    """Fail unless two runs in lockstep learned the same, from the same, by the same bytes."""
    live, topology = rows_of(real)
    expected, expected_topology = rows_of(virtual)
    assert topology == expected_topology
    for row, other in zip(live, expected, strict=True):
        assert (row.t, row.index, row.cluster) == (other.t, other.index, other.cluster)
        if row.t > 1:  # peer 0 drifts in round 2 while others may still end their first
            assert (row.precision, row.recall) == (other.precision, other.recall)
        assert row.accuracy == other.accuracy
        assert row.payload_received == other.payload_received
        assert row.notes.get("attack") == other.notes.get("attack")


def test_lockstep_with_a_script_is_the_virtual_network(tmp_path: Path) -> None:
    """On a ring, whose peers never hear of the one across."""
    script = [
        {"round": 2, "do": "drift", "peers": [0], "cluster": 1},
        {"round": 2, "do": "degrade", "peers": [1], "latency": 2.0, "bandwidth": 0.5},
        {"round": 3, "do": "slow", "peers": [2], "factor": 3.0},
        {"round": 3, "do": "attack", "peers": [3], "attack": "sign-flip"},
    ]
    tables = {
        "topology": {"kind": "ring"},
        "links": {"latency": 0.05, "bandwidth": 4},
        "peers": {"speed": 1200, "data": 0.5},
    }
    scenario = make_scenario(script, tables)
    summary = run_real(scenario, tmp_path / "real")
    expected = run_scenario(
        scenario, tmp_path / "virtual", equipment=Equipment(exact=True), workers=0
    )
    check_equal(tmp_path / "real", tmp_path / "virtual")
    assert summary["bytes_received"] == expected["bytes_received"]
    assert summary["accuracy_honest_worst"] == expected["accuracy_honest_worst"]
    # No machine is faster than the devices and links of the scenario.
    assert summary["real_s"] > 0.99 * expected["virtual_s"]
    assert load(tmp_path / "real" / "scenario.toml") == scenario


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_peers_are_killed_and_leave_and_come_in_a_network_that_parts(tmp_path: Path) -> None:
    script = [
        {"round": 3, "do": "kill", "peers": [1]},
        {"round": 4, "do": "leave", "peers": [2]},
        {"round": 5, "do": "join", "peers": [7]},
        {"round": 6, "do": "restart", "peers": [1, 2]},
        {"round": 8, "do": "partition", "groups": [["0-3"], ["4-7"]]},
        {"round": 12, "do": "heal"},
    ]
    tables = {"links": {"latency": 0.02, "bandwidth": 10}, "peers": {"speed": 60}}
    network = {"suspicion": 2.0, "request_timeout": 5.0}
    scenario = make_scenario(script, tables, n=8, rounds=20, method="random", network=network)
    summary = run_real(scenario, tmp_path / "real")
    rows, topology = rows_of(tmp_path / "real")
    rounds = {i: [row.t for row in rows if row.index == i] for i in range(8)}
    assert summary["finished"] == 8
    for i in (0, 3, 4, 5, 6):
        assert rounds[i] == [*range(1, 21)]
    # Those that were away go on from what they had, or with the others where those are.
    assert rounds[1][:2] == [1, 2]
    assert rounds[2][:3] == [1, 2, 3]
    sides = [0] * 4 + [1] * 4
    # Each side goes on at its own pace: the faster one was in round 12 when all was healed.
    parted = [
        [row for row in topology if row.t in (9, 10, 11) and row.index in stayed]
        for stayed in ((0, 3), (4, 5, 6))
    ]
    assert any(
        all(sides[j] == sides[row.index] for row in rows for j in row.neighbours) for rows in parted
    )
    last = [row for row in topology if row.t == 20]
    assert any(sides[j] != sides[row.index] for row in last for j in row.neighbours)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("netns", [False, True])
def test_twelve_peers_take_as_long_as_on_the_virtual_network(tmp_path: Path, netns: bool) -> None:
    """At half the speed that the slowest peer of this machine has, so that it can be kept."""
    if netns and not POSSIBLE:
        pytest.skip("needs root, ip, tc and nft")
    tables = {"links": {"latency": 0.1, "bandwidth": 10}}
    matching = {"l": 5, "k": 3, "tau": 2, "t1": 5}
    changes = {"n": 12, "rounds": 10, "model": "mlp", "method": "panm-grad", "matching": matching}
    scenario = make_scenario([], tables, **changes)
    speed = min(calibrate(scenario).slowest / 2, SLOW_ENOUGH)
    scenario = scenario.changed({"peers.speed": speed})
    ground = Ground.NAMESPACES if netns else Ground.PROCESSES
    real = run_real(scenario, tmp_path / "real", ground=ground)
    virtual = run_scenario(
        scenario, tmp_path / "virtual", equipment=Equipment(exact=True), workers=0
    )
    check_equal(tmp_path / "real", tmp_path / "virtual")
    assert real["bytes_received"] == virtual["bytes_received"]
    assert real["missing"] == 0
    assert real["real_s"] > 0.99 * virtual["virtual_s"]
    assert real["real_s"] < 1.15 * virtual["virtual_s"] + real["overrun_s"]


def test_options_of_the_virtual_network_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    file.write_text("[plan]\nn = 4\n")
    with pytest.raises(UserError, match="for the virtual network"):
        CliRunner().invoke(
            app, ["run", str(file), "--backend", "processes", "--exact"], catch_exceptions=False
        )
