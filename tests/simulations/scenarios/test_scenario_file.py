"""Scenario files: each kind of mistake has one clear line that names the line and the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.errors import UserError
from peer.plan import Plan
from simulations.scenarios.lines import line_of
from simulations.scenarios.scenario import find, is_scenario, load, shipped
from simulations.scenarios.tables import Population, select

BASE = """\
name = "small"

[plan]
n = 10
rounds = 12

[plan.partition]
kind = "rotation"
clusters = 2

[topology]
kind = "ring"

[links]
latency = 0.1

[peers]
speed = 100

[[peers.classes]]
name = "phone"
peers = ["every 5"]
speed = 10

[[script]]
round = 3
do = "kill"
peers = [1]

[[script]]
round = 9
do = "restart"
peers = [1]
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(text)
    return path


def test_a_scenario_is_what_its_file_says(tmp_path: Path) -> None:
    scenario = load(write(tmp_path, BASE))
    assert scenario.plan == Plan.model_validate(
        {"n": 10, "rounds": 12, "partition": {"kind": "rotation", "clusters": 2}}
    )
    assert [own.speed for own in scenario.equipment] == [10, 100, 100, 100, 100] * 2
    assert sorted(scenario.graph.neighbors(0)) == [1, 9]
    assert scenario.people.classes[:2] == ["phone", "usual"]
    again = load(write(tmp_path, scenario.to_toml()))
    assert again == scenario
    assert again.digest == scenario.digest
    other = scenario.changed({"links.latency": 0.2, "script.1.round": 4, "name": None})
    assert (other.links.latency.a, other.script[0].round) == (0.2, 4)
    assert other.digest != scenario.digest


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("speed = 100", "speed = 100\npace = 3", "line 19: peers.pace: there is no such key"),
        ("rounds = 12", "rouds = 12", "line 5: plan.rouds: there is no such key"),
        ("n = 10", "n = 1", "line 4: plan.n: Input should be greater than or equal to 2"),
        ("clusters = 2", "clusters = 3", "line 7: plan.partition: rotation knows clusters = 1, 2"),
        ("n = 10\n", "", "line 3: plan.n: is missing"),
        ("latency = 0.1", "latency = -0.1", "line 15: links.latency: -0.1 is negative"),
        ("latency = 0.1", 'latency = "fast"', "line 15: links.latency: write a number, {"),
        (
            "latency = 0.1",
            "latency = { uniform = [3, 1] }",
            "line 15: links.latency: from 3 to 1 is no range",
        ),
        ("latency = 0.1", "bandwidth = 0", "line 15: links.bandwidth: Input should be greater"),
        ("latency = 0.1", "loss = 0.9", "line 15: links.loss: Input should be less than or equal"),
        ('"ring"', '"torus"', "line 12: topology.kind: there is no 'torus'; there are complete"),
        ('kind = "ring"', "degree = 2", "line 11: topology: say which: 'kind' is missing"),
        (
            'kind = "ring"',
            'kind = "ring"\ndegree = 2',
            "line 13: topology.degree: there is no such key",
        ),
        ('"ring"', '"k-regular"', "line 11: topology.degree: is missing"),
        (
            'kind = "ring"',
            'kind = "k-regular"\ndegree = 10',
            "line 13: topology.degree: 10 is too many: 10 peers have 9 others",
        ),
        (
            'kind = "ring"',
            'kind = "edges"\nedges = [[0, 1], [2, 3]]',
            "line 11: topology: the graph falls into 8 parts of 2, 2, 1, 1, ... peers; "
            "6 can reach nobody",
        ),
        (
            'kind = "ring"',
            'kind = "edges"\nedges = [[0, 10]]',
            "line 13: topology.edges: there is no peer 10: the last is 9",
        ),
        (
            'kind = "ring"',
            'kind = "graphml"\nfile = "none.graphml"',
            "line 13: topology.file: cannot read ",
        ),
        (
            '["every 5"]',
            '["0-12"]',
            "line 22: peers.classes[1].peers: there is no peer 12: with n = 10 the last is 9",
        ),
        ('["every 5"]', '["some"]', "line 22: peers.classes[1].peers: 'some' names no peers"),
        ('["every 5"]', '["cluster 7"]', "peers.classes[1].peers: 'cluster 7' names no peer"),
        ("speed = 10\n", "speed = 0\n", "line 23: peers.classes[1].speed: a peer that trains 0"),
        (
            "speed = 10\n",
            'attack = "shouting"\n',
            "line 23: peers.classes[1].attack: there is no attack 'shouting'",
        ),
        (
            "speed = 10\n",
            'attack = "alie"\n',
            "line 23: peers.classes[1].attack: alie needs all honest models of the round, which",
        ),
        (
            "speed = 10\n",
            'attack = "sybil"\n',
            "line 23: peers.classes[1].attack: sybil needs the first one's model, which a peer of",
        ),
        (
            '"kill"\npeers = [1]',
            '"kill"\npeers = [12]',
            "line 28: script[1].peers: there is no peer",
        ),
        (
            'do = "kill"',
            'do = "explode"',
            "line 27: script[1].do: there is no 'explode'; there are",
        ),
        ("round = 3\n", "", "line 25: script[1]: say when: either round = R or second = S"),
        ("round = 3\n", "round = 3\nsecond = 4\n", "line 25: script[1]: say when: either round"),
        (
            "round = 3\n",
            "round = 30\n",
            "line 26: script[1].round: there are 12 rounds, none is 30",
        ),
        ("round = 9\n", "round = 2\n", "line 33: script[2].peers: peer 1 was neither killed nor"),
        (
            'do = "kill"\npeers = [1]',
            'do = "drift"\npeers = [1]\ncluster = 2',
            "line 29: script[1].cluster: there is no cluster 2: the last is 1",
        ),
        (
            'do = "kill"\npeers = [1]',
            'do = "partition"\ngroups = [["0-9"]]',
            "line 28: script[1].groups: all peers are on one side: this parts nobody",
        ),
        (
            'do = "kill"\npeers = [1]',
            'do = "partition"\ngroups = [["0-4"], ["4-9"]]',
            "line 28: script[1].groups: peer 4 is on two sides",
        ),
        (
            'do = "kill"\npeers = [1]',
            'do = "slow"\npeers = [1]\nfactor = 0',
            "line 29: script[1].factor: Input should be greater than 0",
        ),
        ("[links]", "[links", "is not valid TOML: Expected ']' at the end of a table declaration"),
        (
            "latency = 0.1",
            "[[links.between]]\nedge = [0, 5]",
            "line 16: links.between[1].edge: the topology does not link [0, 5]",
        ),
        (
            "latency = 0.1",
            '[[links.between]]\nclasses = ["phone", "car"]',
            "line 16: links.between[1].classes: there are no peers of class 'car'",
        ),
    ],
)
def test_a_mistake(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert BASE.count(old) >= 1
    path = write(tmp_path, BASE.replace(old, new, 1))
    with pytest.raises(UserError) as raised:
        load(path)
    assert message in raised.value.message
    assert raised.value.message.startswith(str(path))
    assert "\n" not in raised.value.message


def test_a_plan_of_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "p.toml").write_text("n = 4\n")
    path = write(tmp_path, '# mine\nplan = "plans/p.toml"\n')
    assert load(path).plan == Plan(n=4)
    (tmp_path / "plans" / "p.toml").write_text("m = 4\n")
    with pytest.raises(UserError, match=r"own.toml, line 2: plan: .*p.toml: n: .*unknown key m"):
        load(path)


def test_what_is_a_scenario(tmp_path: Path) -> None:
    assert is_scenario(write(tmp_path, BASE))
    assert not is_scenario(write(tmp_path, "n = 4\n"))
    assert not is_scenario(write(tmp_path, "n = = 4\n"))
    assert not is_scenario(tmp_path / "nowhere.toml")
    with pytest.raises(UserError, match="cannot read the scenario") as refused:
        load(tmp_path / "nowhere.toml")
    assert "simulate list" in refused.value.hint


def test_those_that_ship() -> None:
    names = [own.name for own in shipped()]
    assert names == [
        "churn", "coordinator", "drift", "panm", "partition-heals", "slow-links", "sparse",
        "stragglers",
    ]  # fmt: skip
    for own in shipped():
        scenario = load(find(own.name))
        assert scenario.name == own.name
        assert scenario.claim == own.claim
        assert 10 < len(own.claim) < 110


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (("plan", "n"), 4),
        (("plan", "partition", "kind"), 8),
        (("peers", "classes", 0, "speed"), 23),
        (("script", 1, "peers"), 33),
        (("script", 1, "peers", 0), 33),
        (("script", 1, "nothing"), 30),
        (("nothing",), 1),
    ],
)
def test_lines_of_keys(key: tuple[str | int, ...], line: int) -> None:
    assert line_of(BASE, key) == line


def test_lines_among_dotted_keys_and_long_texts() -> None:
    text = 'a.b = 1\nt = """\nc = 2\n"""\nc = 3\n[d."e"]\nf = 1 # [g]\n[d]\nh = [\n1,\n]\n'
    assert [line_of(text, key) for key in (("a", "b"), ("c",), ("d", "e", "f"), ("d", "h"))] == [
        1, 5, 7, 9,
    ]  # fmt: skip


def test_selectors() -> None:
    people = Population(10, [i % 2 for i in range(10)], ["fast"] * 4 + ["slow"] * 6)
    for chosen, found in (
        ([3, 1], [1, 3]),
        (["2-4", 4], [2, 3, 4]),
        (["cluster 1"], [1, 3, 5, 7, 9]),
        (["class fast"], [0, 1, 2, 3]),
        (["every 4"], [0, 4, 8]),
        (["all"], list(range(10))),
    ):
        assert select(chosen, people, ()) == found
