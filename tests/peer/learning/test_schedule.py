"""Learning rate, batches and loss samples: the one definition of local training."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.learning.schedule import batches, epoch_orders, learning_rate, loss_sample
from peer.plan import MatchingPlan, Plan, TrainingPlan

PLAN = Plan(n=4, seed=3, training=TrainingPlan(epochs=2, lr=0.1, lr_decay=0.5))


def test_learning_rate_decays_from_round_one() -> None:
    assert [learning_rate(PLAN, t) for t in (1, 2, 3)] == pytest.approx([0.1, 0.05, 0.025])


def test_an_order_an_epoch() -> None:
    orders = list(epoch_orders(PLAN, 1, 5, 30))
    assert len(orders) == 2
    assert [sorted(order) for order in orders] == [list(range(30))] * 2
    assert not np.array_equal(orders[0], orders[1])
    assert all(map(np.array_equal, orders, epoch_orders(PLAN, 1, 5, 30)))
    assert not np.array_equal(orders[0], next(epoch_orders(PLAN, 2, 5, 30)))
    assert not np.array_equal(orders[0], next(epoch_orders(PLAN, 1, 6, 30)))


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 2))
def test_batches_hold_everything_once_and_in_order(m: int, size: int, fewest: int) -> None:
    order = np.random.default_rng(m).permutation(m)
    parts = batches(order, size, fewest=fewest)
    assert np.array_equal(np.concatenate(parts), order)
    assert all(len(part) == size for part in parts[:-1] if part is not parts[-1])
    assert 1 <= len(parts[-1]) < size + fewest
    assert len(parts) == 1 or len(parts[-1]) >= fewest


def test_a_last_batch_of_one_joins_the_one_before() -> None:
    assert [len(part) for part in batches(np.arange(11), 5)] == [5, 5, 1]
    assert [len(part) for part in batches(np.arange(11), 5, fewest=2)] == [5, 6]


def test_loss_samples_are_distinct_and_change_with_the_round() -> None:
    plan = PLAN.model_copy(update={"matching": MatchingPlan(loss_samples=20)})
    first = loss_sample(plan, 0, 1, 50)
    assert len(set(first.tolist())) == 20
    assert set(first.tolist()) != set(loss_sample(plan, 0, 2, 50).tolist())
    assert sorted(loss_sample(plan, 0, 1, 7)) == list(range(7))
