"""The rounds of central methods, driven by hand: no network, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from bootstrap.coordination.rounds import (
    Answers,
    ClusterRounds,
    Exchange,
    Exchanges,
    Method,
    ModelRounds,
    Outcome,
    Round,
)
from bootstrap.coordination.tree import ParameterTree
from peer.learning.learner import Vector
from peer.network.messages import Work
from peer.plan import Plan


def vector(*values: float) -> Vector:
    return np.array(values, dtype=np.float32)


def plan(method: str, **changes: Any) -> Plan:
    table: dict[str, Any] = {"n": 4, "method": method, "central": {"clusters": 2, "redraws": 2}}
    return Plan.model_validate(table | changes)


def drive(exchanges: Round | Exchanges, *answers: Answers) -> tuple[list[Exchange], Outcome | None]:
    """Give a round its answers, all of them; return what it asked, and how it ended."""
    asked = [next(exchanges)]
    for number, answer in enumerate(answers, start=1):
        try:
            asked.append(exchanges.send(answer))
        except StopIteration as end:
            assert number == len(answers)
            return asked, end.value
    raise AssertionError(f"{asked[-1]} was not answered")


def models(asked: Exchange) -> Mapping[int, int | None]:
    return {i: task.model for i, task in asked.tasks.items()}


def held(method: Method) -> dict[int, Any]:
    return {j: None if m is None else m.tolist() for j, m in method.models().items()}


def test_fedavg_averages_what_came_and_keeps_what_nobody_knows() -> None:
    method = ModelRounds(plan("fedavg"))
    assert held(method) == {0: None}
    (asked,), outcome = drive(
        method.round(1, [0, 1, 2, 3], [0, 2, 3], None),
        {0: vector(1, 2), 2: vector(3, 4), 3: None},
    )
    assert models(asked) == {0: 0, 2: 0, 3: 0}
    assert asked.tasks[0].version == 0
    assert outcome == Outcome({0: 0, 2: 0, 3: 0})
    assert held(method) == {0: [2, 3]}
    # All who are there are of the one model, whether they took part or not.
    assert method.places == dict.fromkeys(range(4), 0)
    _, outcome = drive(method.round(2, [0], [0], {0: 5}), {0: None})
    assert outcome is not None
    assert (method.version, held(method)) == (2, {0: [2, 3]})


def test_a_round_without_an_answer_has_not_been() -> None:
    for method in (ModelRounds(plan("fedavg")), ModelRounds(plan("ifca"))):
        method.restore(3, 0, {0: 0, 1: 0}, [vector(1, 2)] * method.c)
        answers: list[Answers] = [{}] * (1 if method.c == 1 else 2)
        _, outcome = drive(method.round(4, [0, 1], [0, 1], None), *answers)
        assert outcome is None
        assert method.version == 3


def test_ifca_takes_the_first_draw_with_the_fewest_idle() -> None:
    ifca = plan("ifca", central={"clusters": 3, "redraws": 2})
    method = ModelRounds(ifca)
    there = [0, 1, 2, 3]
    asked, outcome = drive(
        method.round(1, there, [1, 2], None),
        dict.fromkeys(there, 0),
        {0: 1, 1: 2, 2: 1, 3: None},
        {0: 0, 1: 1, 2: 1, 3: 0},
        {1: vector(5), 2: vector(7)},
        {0: 2, 3: 2},
    )
    assert [(one.work, one.tasks[1].draw) for one in asked[:3]] == [
        (Work.DRAW, 0), (Work.DRAW, 1), (Work.DRAW, 2),
    ]  # fmt: skip
    # Two models each in draws 1 and 2; peer 3, which did not choose then, was not to take part.
    assert models(asked[3]) == {1: 2, 2: 1}
    assert (method.draw, asked[3].tasks[1].draw) == (1, 1)
    assert outcome == Outcome({1: 2, 2: 1})
    assert held(method) == {0: None, 1: [7], 2: [5]}
    assert (asked[4].work, asked[4].tasks[0].version, models(asked[4])) == (
        Work.CHOOSE, 1, dict.fromkeys(there),
    )  # fmt: skip
    assert method.places == {0: 2, 1: 2, 2: 1, 3: 2}


def test_in_later_rounds_those_who_take_part_choose_first() -> None:
    method = ModelRounds(plan("ifca"))
    method.restore(4, 1, {0: 0, 1: 1}, [vector(0), None])
    asked, outcome = drive(
        method.round(5, [0, 1, 2], [0, 2], None),
        {0: 1},  # peer 2, a newcomer, does not choose: it cannot train
        {0: vector(4)},
        {0: 1, 1: 0, 2: 0},
    )
    assert models(asked[0]) == {0: None, 2: None}
    assert models(asked[1]) == {0: 1}
    assert outcome == Outcome({0: 1})
    assert held(method) == {0: [0], 1: [4]}
    assert method.places == {0: 1, 1: 0, 2: 0}


def grown() -> ClusterRounds:
    """Peers 0 and 1 in node 1, peer 2 in node 2; peer 3 was away when they were split."""
    tree = ParameterTree.planted(2, 2)
    for i in range(4):
        tree.admit(i)
    tree.split(0, 3, [{0: vector(1, 0), 1: vector(1, 0.1)}, {2: vector(0, 1)}])
    return ClusterRounds(plan("cfl"), tree, 3)


def test_cfl_routes_those_who_were_away_before_they_train() -> None:
    method = grown()
    asked, outcome = drive(
        method.round(4, [0, 2, 3], [0, 2, 3], None),
        {3: vector(0.1, 2)},
        {0: vector(2, 0), 2: vector(0, 4), 3: vector(0, 6)},
    )
    assert [models(one) for one in asked] == [{3: 0}, {0: 1, 2: 2, 3: 2}]
    assert outcome is not None
    assert outcome.trained == {0: 1, 2: 2, 3: 2}
    assert [attempt.node for attempt in outcome.attempts] == [1, 2]
    assert held(method) == {0: [0, 0], 1: [2, 0], 2: [0, 5]}


@pytest.mark.parametrize("answer", [{}, {3: None}])
def test_one_who_cannot_be_routed_stays(answer: Answers) -> None:
    method = grown()
    asked, outcome = drive(method.round(4, [3], [3], None), answer, {})
    assert models(asked[1]) == {}
    assert (outcome is None) == (not answer)
    assert (method.places[3], method.settled(3)) == (0, False)


def test_a_newcomer_is_settled_without_a_round() -> None:
    method = grown()
    asked, _ = drive(method.settle(9, [5]), {5: vector(3, 0.2)})
    assert (asked[0].tasks[5].round, asked[0].tasks[5].version) == (9, 3)
    assert method.places[5] == 1
    assert held(method)[1] == [0, 0]
    ifca = ModelRounds(plan("ifca"))
    ifca.restore(4, 0, {}, [vector(0), vector(1)])
    drive(ifca.settle(4, [2]), {2: 1})
    assert ifca.places == {2: 1}
