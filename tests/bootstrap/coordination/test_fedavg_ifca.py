"""The rules of FedAvg and IFCA, by numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bootstrap.coordination import fedavg, ifca
from peer.cluster_models import best_model, idle, initial_models
from peer.learning.learner import Entry, Manifest, Vector
from peer.plan import DefencePlan


def vector(*values: float) -> Vector:
    return np.array(values, dtype=np.float32)


def test_everybody_or_a_share_takes_part() -> None:
    known = [7, 3, 5, 1, 9]
    assert fedavg.participants(known, 1.0, seed=0, t=1) == [1, 3, 5, 7, 9]
    assert len(fedavg.participants(known, 0.4, seed=0, t=1)) == 2
    assert len(fedavg.participants(known, 0.01, seed=0, t=1)) == 1
    # Halves go to the even number: 0.5 * 5 = 2.5 is 2, 0.7 * 5 = 3.5 is 4.
    assert len(fedavg.participants(known, 0.5, seed=0, t=1)) == 2
    assert len(fedavg.participants(known, 0.7, seed=0, t=1)) == 4
    draws = {tuple(fedavg.participants(known, 0.4, seed=0, t=t)) for t in range(1, 30)}
    assert len(draws) > 5
    assert fedavg.participants(known[::-1], 0.4, 0, 3) == fedavg.participants(known, 0.4, 0, 3)
    for fraction in (0.0, -1.0, 1.5):
        with pytest.raises(ValueError, match="not a share"):
            fedavg.participants(known, fraction, seed=0, t=1)


def test_every_peer_is_drawn_equally_often() -> None:
    counts = np.zeros(10)
    for t in range(1, 501):
        counts[fedavg.participants(range(10), 0.3, seed=4, t=t)] += 1
    # 500 draws of 3 of 10: 150 each, with a standard deviation of 10.2.
    assert counts.sum() == 1500
    assert np.abs(counts - 150).max() < 40


def test_fedavg_is_the_mean_of_what_arrived() -> None:
    received = {4: vector(1, 2), 0: vector(3, 6)}
    assert fedavg.aggregate(vector(9, 9), received).tolist() == [2, 4]
    assert fedavg.aggregate(vector(9, 9), received, {0: 1, 2: 5, 4: 3}).tolist() == [1.5, 3]
    assert fedavg.aggregate(vector(9, 9), {}).tolist() == [9, 9]


def test_the_order_of_arrival_does_not_change_a_bit() -> None:
    rng = np.random.default_rng(0)
    received = {i: rng.normal(size=50).astype(np.float32) for i in range(7)}
    backwards = dict(reversed(received.items()))
    assert np.array_equal(
        fedavg.aggregate(received[0], received), fedavg.aggregate(received[0], backwards)
    )


def test_a_peer_is_of_the_model_with_the_least_loss() -> None:
    assert best_model([2.0, 0.5, 0.7]) == 1
    assert best_model([0.5, 0.5, 0.7]) == 0
    assert best_model([math.nan, math.inf, 3.0]) == 2
    assert best_model([math.nan, math.nan]) == 0


def test_idle_models_are_nobodys() -> None:
    assert idle([2, 0, 2], 4) == [1, 3]
    assert idle([1, 0], 2) == []


def test_each_cluster_averages_its_own_and_an_empty_one_keeps_its_model() -> None:
    models = [vector(0), vector(10), vector(20)]
    received = {0: vector(1), 1: vector(3), 2: vector(12)}
    identities = {0: 0, 1: 0, 2: 1, 3: 2}  # peer 3 did not answer
    means = ifca.aggregate(models, received, identities)
    assert [mean.tolist() for mean in means] == [[2], [12], [20]]
    weighted = ifca.aggregate(models, received, identities, {0: 3, 1: 1, 2: 1, 3: 1})
    assert [mean.tolist() for mean in weighted] == [[1.5], [12], [20]]


def test_each_cluster_is_defended_by_itself() -> None:
    models = [vector(0), None]
    received = {0: vector(1), 1: vector(3), 2: vector(900), 3: vector(-7), 4: vector(-9)}
    identities = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1}
    by_median = ifca.aggregate(models, received, identities, defence=DefencePlan(rule="median"))
    assert [own.tolist() for own in by_median if own is not None] == [[3], [-8]]
    clipped = ifca.aggregate(models, received, identities, defence=DefencePlan(clip=1.0))
    assert [own.tolist() for own in clipped if own is not None] == [
        [pytest.approx((1 + 3 + 3) / 3)], [-8]
    ]  # fmt: skip


def test_initial_models_are_w0_and_shuffles_of_it_by_tensor() -> None:
    manifest = Manifest((Entry("weight", (4, 5)), Entry("bias", (3,)), Entry("mean", (2,), False)))
    initial = np.arange(25, dtype=np.float32)
    initial[23:] = 7  # BatchNorm's buffers, all equal, stay what they are
    before = initial.copy()
    models = initial_models(initial, manifest, 3, seed=1)
    assert models[0] is initial
    for model in models[1:]:
        assert sorted(model[:20]) == list(range(20))
        assert sorted(model[20:23]) == [20, 21, 22]
        assert model[23:].tolist() == [7, 7]
        assert not np.array_equal(model, initial)
    assert not np.array_equal(models[1], models[2])
    again = initial_models(initial, manifest, 3, seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(models, again, strict=True))
    redrawn = initial_models(initial, manifest, 3, seed=1, draw=1)
    assert not any(np.array_equal(a, b) for a in redrawn for b in models)
    assert np.array_equal(initial, before)
