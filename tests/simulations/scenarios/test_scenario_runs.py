"""Scenarios on the engine: as the laboratory has it, into run directories, through the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from peer.errors import FederationError, UserError
from peer.rundir import read_metrics, read_topology
from simulations.cli import app
from simulations.curves import over_time
from simulations.engine.laboratory import Laboratory
from simulations.engine.workers import Engine
from simulations.runs import Equipment
from simulations.scenarios.learning import EngineLearning, Training
from simulations.scenarios.pictures import moments
from simulations.scenarios.runs import run_scenario
from simulations.scenarios.scenario import Scenario, find, load, shipped
from simulations.scenarios.sweep import Cell, make_cells, parse_grid, run_sweep
from simulations.scenarios.virtual import VirtualFederation

HERE = 0
"""Workers: none but this process."""


def make_scenario(tables: dict[str, Any] | None = None, **plan: Any) -> Scenario:
    table: dict[str, Any] = {
        "n": 8,
        "rounds": 6,
        "seed": 5,
        "matching": {"l": 3, "k": 2, "tau": 2},
        "partition": {"kind": "rotation", "clusters": 2, "train_per_peer": 60},
        "training": {"batch": 20},
    }
    for key, value in plan.items():
        table[key] = {**table[key], **value} if isinstance(table.get(key), dict) else value
    network = {
        "links": {"latency": {"uniform": [0.01, 0.3]}, "bandwidth": 10},
        "peers": {"speed": {"lognormal": [100, 0.5]}},
    }
    scenario = Scenario.model_validate({"plan": table, **network, **(tables or {})})
    scenario.check()
    return scenario


def simulate(*arguments: str) -> str:
    """Return what the command prints. Raises what it ends with."""
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(("method", "exact"), [("panm-grad", True), ("panm-loss", False)])
def test_lockstep_is_the_laboratory(method: str, exact: bool) -> None:
    """Bit by bit where both train as a device does; the same bags, and weights to rounding, by the
    stacked path."""
    scenario = make_scenario(method=method)
    equipment = Equipment(exact=exact)
    with (
        EngineLearning(scenario, equipment, workers=HERE) as learning,
        Laboratory(scenario.plan, method, workers=HERE, exact=exact) as laboratory,
    ):
        federation = VirtualFederation(scenario, learning, evaluate_every=6)
        choices = {(c.t, c.index): c for _, c in federation.run()}
        received = dict.fromkeys(range(8), 0)
        for row in (row for rows in laboratory.run(evaluate_every=6) for row in rows):
            choice = choices[row["t"], row["index"]]
            assert (choice.bag, choice.neighbours) == (row["bag"], row["neighbours"])
            received[row["index"]] += row["payload_received"]
        assert {peer.index: peer.received for peer in federation.peers} == received
        models = np.stack(federation.models)
        if exact:
            np.testing.assert_array_equal(models, laboratory.models)
        else:
            np.testing.assert_allclose(models, laboratory.models, rtol=0, atol=1e-4)


def test_some_of_the_peers_train_as_all_do() -> None:
    """The engine trains, sketches and judges a few peers, of different rounds, as it would all."""
    scenario = make_scenario()
    with (
        EngineLearning(scenario, Equipment(), workers=2) as learning,
        Engine(scenario.plan, workers=HERE) as engine,
    ):
        trainings = [Training(i, t, learning.initial) for i, t in ((6, 2), (1, 1), (3, 2))]
        learning.train(trainings)
        for own in trainings:
            engine.train(own.t)
            engine.sketch()
            assert own.after is not None
            assert own.sketches is not None
            np.testing.assert_allclose(own.after, engine.trained[own.index], rtol=0, atol=1e-5)
            np.testing.assert_allclose(
                own.sketches.h, engine.sketches[own.index, 1], rtol=0, atol=1e-4
            )


def test_drift_turns_the_data_and_a_poisoner_its_labels() -> None:
    script = [
        {"round": 6, "do": "drift", "peers": [0], "cluster": 1},
        {"round": 7, "do": "attack", "peers": [1], "attack": "label-flip"},
    ]
    scenario = make_scenario({"script": script, "peers": {"data": 0.5}}, method="local", rounds=9)
    turned = make_scenario({"peers": {"data": 0.5}}, method="local", rounds=9)
    with EngineLearning(scenario, Equipment(), workers=HERE) as learning:
        assert [*learning.samples] == [30] * 8
        rows = [row for row, _ in VirtualFederation(scenario, learning).run()]
    with EngineLearning(turned, Equipment(), workers=HERE) as learning:
        expected = [row for row, _ in VirtualFederation(turned, learning).run()]
    accuracy = {(row.t, row.index): row.accuracy or 0.0 for row in rows}
    plain = {(row.t, row.index): row.accuracy or 0.0 for row in expected}
    for (t, i), value in accuracy.items():
        if i > 1 or t < 6 + i:
            assert value == pytest.approx(plain[t, i], abs=0.011)
    assert accuracy[6, 0] < plain[6, 0] - 0.08
    assert accuracy[9, 1] < plain[9, 1] - 0.15
    assert {row.cluster for row in rows if row.index == 0 and row.t >= 6} == {1}


def test_a_run_directory_of_virtual_time(tmp_path: Path) -> None:
    script = [{"round": 3, "do": "partition", "groups": [["0-3"]]}, {"second": 20.0, "do": "heal"}]
    scenario = make_scenario({"script": script}, method="random")
    summary = run_scenario(scenario, tmp_path / "run", workers=HERE, evaluate_every=2)
    rows = read_metrics(tmp_path / "run")
    assert load(tmp_path / "run" / "scenario.toml") == scenario
    assert summary["virtual_s"] == pytest.approx(max(row.time for row in rows), abs=1e-3)
    assert summary["bytes_sent"] == summary["bytes_received"] + summary["bytes_lost"]
    assert summary["finished"] == 8
    assert [row.accuracy is None for row in rows if row.index == 0] == [True, False] * 3
    times, accuracies, payload = over_time(8, rows)
    assert (np.diff(times) > 0).all()
    assert (np.diff(payload) >= 0).all()
    assert payload[-1] == pytest.approx(sum(r.payload_received for r in rows if r.t == 6) / 8)
    assert np.nanmean(accuracies[-1]) == pytest.approx(summary["accuracy_mean"])
    (_, parted), (_, healed) = moments(scenario, rows)
    third = [row.time - row.seconds.round for row in rows if row.t == 3]
    assert (parted, healed) == (min(third), 20.0)
    assert len(read_topology(tmp_path / "run")) == 48


def test_a_sweep_runs_what_is_not_finished(tmp_path: Path) -> None:
    scenario = make_scenario(rounds=2)
    grid = parse_grid(["plan.method=random", "links.latency=0.1,0.2"])
    cells = make_cells(scenario, grid, tmp_path)
    assert [dict(cell.labels) for cell in cells] == [
        {"plan.method": "random", "links.latency": latency} for latency in ("0.1", "0.2")
    ]
    assert not any(cell.finished for cell in cells)
    run_scenario(cells[0].scenario, cells[0].folder, workers=HERE)
    (cells[1].folder).mkdir(parents=True)
    (cells[1].folder / "plan.toml").write_text("n = 8\n")  # ended before its first row
    made = (cells[0].folder / "summary.json").stat().st_mtime_ns
    results = run_sweep(scenario, grid, tmp_path, processes=2)
    assert [cell.finished for cell in cells] == [True] * 2
    assert (cells[0].folder / "summary.json").stat().st_mtime_ns == made
    short, long = (summary["virtual_s"] for _, summary in results)
    assert short < long
    assert not [*tmp_path.glob("cells/*.log")]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (["plan.method"], "cannot read 'plan.method'"),
        (["plan.n=8", "plan.n=9"], "a key is varied twice"),
        (["plan.method=nothing"], "there is no method nothing"),
        (["links.latency=-1"], "links.latency: -1 is negative"),
        (["links.nothing=1"], "links.nothing: there is no such key"),
        (["script.3.round=1"], "there is no number 3 of 0"),
    ],
)
def test_what_cannot_be_swept(tmp_path: Path, grid: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_sweep(make_scenario(), parse_grid(grid), tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_failing_run_ends_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cell, "rows", property(lambda self: 1))
    scenario = make_scenario()
    cell = make_cells(scenario, [], tmp_path)[0]
    cell.folder.mkdir(parents=True)
    (cell.folder / "thesis.tex").touch()  # not a run: it is not cleared away
    with pytest.raises(FederationError, match="is not a run directory"):
        run_sweep(scenario, [], tmp_path)
    assert (cell.folder / "thesis.tex").exists()


def test_the_command_lists_shows_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [line.split()[0] for line in simulate("list").splitlines()] == [
        own.name for own in shipped()
    ]
    shown = simulate("show", "partition-heals", "--out", "picture.png").splitlines()
    assert "round 5      partition: 0-9 | 10-19" in shown
    assert "complete: 20 peers, 190 links, 19 to 19 a peer, connected" in shown
    assert (tmp_path / "picture.png").stat().st_size > 20_000
    (tmp_path / "own.toml").write_text(make_scenario(rounds=2, n=4).to_toml())
    told = simulate("run", "own.toml", "--method", "random", "--animate")
    assert "Virtual time: " in told
    run = tmp_path / "runs" / "scenario-random"
    assert json.loads((run / "summary.json").read_text())["scenario"] == "scenario"
    assert {path.name for path in (run / "plots").glob("*.png")} >= {"accuracy.png", "cost.png"}
    assert (run / "plots" / "bags.gif").read_bytes()[:6] == b"GIF89a"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("run stragglers --backend one-process", "scenarios do not run by one-process"),
        ("run stragglers --device cuda", "computes with the engine, on the cpu"),
        ("run plan.toml --backend virtual", "plan.toml is a plan, not a scenario"),
        ("show straglers", "cannot read the scenario straglers"),
        ("sweep drift --grid plan.n=0", "plan.n: Input should be greater"),
        ("compare drift --methods nothing", "there is no method nothing"),
        ("compare drift --exact", "scenarios say for themselves who attacks"),
    ],
)
def test_what_the_command_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text("n = 4\n")
    with pytest.raises(UserError, match=message):
        simulate(*command.split())
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_healed_partition_is_made_good_within_ten_rounds(tmp_path: Path) -> None:
    parted = load(find("partition-heals"))
    whole = Scenario.model_validate({**parted.model_dump(), "script": []})
    recall, accuracy = {}, {}
    for name, scenario in (("parted", parted), ("whole", whole)):
        run_scenario(scenario, tmp_path / name)
        for row in read_metrics(tmp_path / name):
            recall.setdefault((name, row.t), []).append(row.recall or 0.0)
            accuracy.setdefault((name, row.t), []).append(row.accuracy or 0.0)
    mean = {key: float(np.mean(values)) for key, values in recall.items()}
    assert max(mean["parted", t] for t in range(6, 21)) <= 4 / 9 + 1e-9
    assert mean["whole", 20] > 0.9
    assert mean["parted", 31] > 0.9
    gap = {t: np.mean(accuracy["whole", t]) - np.mean(accuracy["parted", t]) for t in (20, 31)}
    assert gap[20] > 0.002
    assert gap[31] < 0.003


@pytest.mark.slow
def test_stragglers_hold_up_lockstep_alone(tmp_path: Path) -> None:
    scenario = load(find("stragglers"))
    free = scenario.changed({"plan.network.staleness": "async"})
    ends = []
    for place, own in enumerate((scenario, free)):
        run_scenario(own, tmp_path / str(place), evaluate_every=30)
        rows = read_metrics(tmp_path / str(place))
        usual = [row.time for row in rows if row.t == 30 and row.index % 4]
        ends.append(max(usual))
    assert ends[1] < ends[0] / 3


@pytest.mark.slow
def test_a_drifted_peer_changes_its_bag_by_panm_loss(tmp_path: Path) -> None:
    scenario = load(find("drift"))
    run_scenario(scenario, tmp_path / "run", evaluate_every=50)
    bags = {row.t: row.bag for row in read_topology(tmp_path / "run") if row.index == 0}
    own = bags[50]
    assert sum(j % 2 for j in own) >= 0.9 * 8
    assert sum(j % 2 for j in own) >= 0.9 * len(own)


@pytest.mark.slow
def test_one_coordinator_for_all_sets_the_pace(tmp_path: Path) -> None:
    def seconds(method: str, **coordinator: float) -> float:
        changes: dict[str, Any] = {"plan.method": method, "plan.rounds": 4, "plan.matching.t1": 4}
        scenario = load(find("coordinator")).changed({**changes, "coordinator": coordinator})
        summary = run_scenario(scenario, tmp_path, workers=HERE, evaluate_every=4)
        return float(summary["virtual_s"])

    alone, led = seconds("panm-grad"), seconds("cfl", upload=50, download=50)
    assert led > 2 * alone
    # It is its four fetches at a time more than its connection.
    assert led > seconds("cfl") > 0.8 * led
    assert seconds("cfl", upload=50, download=50, latency=0) < 0.7 * led


@pytest.mark.slow
def test_peers_learn_as_well_as_if_they_knew_their_like(tmp_path: Path) -> None:
    small = {"plan.n": 16, "plan.rounds": 24, "plan.partition.clusters": 2}
    small |= {"plan.matching.l": 6, "plan.matching.k": 3}
    scenario = load(find("panm")).changed(small)
    accuracy = {}
    for method in ("oracle", "panm-grad", "random"):
        own = scenario.changed({"plan.method": method})
        summary = run_scenario(own, tmp_path / method, workers=HERE, evaluate_every=24)
        accuracy[method] = summary["accuracy_mean"]
    assert summary["precision"] < 0.6
    assert accuracy["panm-grad"] > accuracy["oracle"] - 0.01
    assert accuracy["random"] < accuracy["panm-grad"] - 0.02


@pytest.mark.slow
def test_a_peer_must_reach_k_of_its_own(tmp_path: Path) -> None:
    small = {"plan.n": 20, "plan.rounds": 20}
    scenario = load(find("sparse")).changed(small)
    found = {}
    for degree in (4, 10):
        own = scenario.changed({"topology.degree": degree})
        summary = run_scenario(own, tmp_path / str(degree), workers=HERE, evaluate_every=20)
        found[degree] = summary["precision"]
    assert found[10] > 0.95
    assert found[4] < 0.8


@pytest.mark.slow
def test_churn_costs_time_but_no_bag(tmp_path: Path) -> None:
    stirred = load(find("churn"))
    calm = Scenario.model_validate({**stirred.model_dump(), "script": []})
    ends = [
        run_scenario(own, tmp_path / str(place), workers=HERE, evaluate_every=40)
        for place, own in enumerate((stirred, calm))
    ]
    assert ends[0]["virtual_s"] > 2 * ends[1]["virtual_s"]
    assert ends[0]["precision"] > 0.95
    assert ends[0]["accuracy_mean"] > ends[1]["accuracy_mean"] - 0.015


@pytest.mark.slow
def test_sketches_pay_where_links_are_slow(tmp_path: Path) -> None:
    scenario = load(find("slow-links")).changed({"plan.rounds": 16})
    ends = {}
    for evidence in ("sketch", "exact"):
        own = scenario.changed({"plan.matching.evidence": evidence})
        ends[evidence] = run_scenario(own, tmp_path / evidence, workers=HERE, evaluate_every=16)
    assert ends["exact"]["virtual_s"] > 2 * ends["sketch"]["virtual_s"]
    assert ends["exact"]["bytes_received"] > 3 * ends["sketch"]["bytes_received"]
    assert min(end["precision"] for end in ends.values()) == 1.0
    accuracies = [end["accuracy_mean"] for end in ends.values()]
    assert abs(accuracies[0] - accuracies[1]) < 0.015
