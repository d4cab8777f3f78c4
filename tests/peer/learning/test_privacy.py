"""DP-SGD: exact gradients and noise, the accounting, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from peer.errors import UserError
from peer.plan import Plan, PrivacyPlan

pytest.importorskip("opacus")

from peer.learning.budget import Budget, Spent
from peer.learning.partition import PeerData
from peer.learning.privacy import PrivateSgd, Sampling, standard_normal, system_uniform
from peer.learning.torch_learner import TorchLearner


def plan(**privacy: object) -> Plan:
    table = {"noise": 1.0, "repeatable": True, **privacy}
    return Plan.model_validate(
        {
            "n": 2,
            "model": "custom",
            "data": "own",
            "training": {"batch": 10, "epochs": 2, "momentum": 0.5, "lr": 0.1},
            "privacy": table,
        }
    )


def module() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def data(m: int = 40) -> PeerData:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(m, 4)).astype(np.float32)
    y = rng.integers(3, size=m)
    return PeerData(x, y, x, y, 3, (4,))


def clipped(net: nn.Module, x: torch.Tensor, y: torch.Tensor, norm: float) -> torch.Tensor:
    """Return the sum of the samples' gradients, each clipped, computed one after the other."""
    total = torch.zeros(sum(p.numel() for p in net.parameters()))
    for sample, label in zip(x, y, strict=True):
        net.zero_grad()
        nn.functional.cross_entropy(net(sample[None]), label[None]).backward()
        gradient = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        total += gradient * min(1.0, norm / float(gradient.norm()))
    return total


@pytest.mark.parametrize("norm", [0.05, 0.5, 100.0])
def test_the_gradient_is_the_clipped_sum_and_noise_of_sigma_c(norm: float) -> None:
    told = plan(clip=norm, noise=2.0)
    source = PrivateSgd(net := module(), told, 0, 40)
    x, y = torch.from_numpy(data().train_x[:7]), torch.from_numpy(data().train_y[:7])
    expected = clipped(module(), x, y, norm)
    source.begin(1, Budget(told.privacy))
    found = torch.stack([source.gradient(x, y) for _ in range(400)]) * 10
    e = sum(p.numel() for p in net.parameters())
    assert found.shape == (400, e)
    torch.testing.assert_close(found.mean(0), expected, atol=6 * 2 * norm / 400**0.5, rtol=0)
    noise = (found - expected) / (2 * norm)
    assert stats.kstest(noise.flatten().numpy()[:20_000], "norm").pvalue > 1e-6


def test_a_step_without_samples_is_noise_alone() -> None:
    source = PrivateSgd(module(), told := plan(), 0, 40)
    source.begin(1, Budget(told.privacy))
    none = torch.empty(0, dtype=torch.int64)
    gradient = source.gradient(torch.empty(0, 4), none)
    assert gradient.shape == (51,)
    assert 0.02 < float(gradient.std()) < 0.5


def test_batches_are_poisson_samples() -> None:
    source = PrivateSgd(module(), told := plan(), 0, 40)
    sizes, seen = [], np.zeros(40)
    for t in range(1, 21):
        source.begin(t, Budget(told.privacy.model_copy(update={"epsilon": 1e9})))
        steps = list(source.batches())
        assert len(steps) == 8
        for batch in steps:
            sizes.append(len(batch))
            seen[batch] += 1
    assert np.mean(sizes) == pytest.approx(10, abs=1.2)
    assert np.var(sizes) == pytest.approx(40 * 0.25 * 0.75, rel=0.6)
    assert seen.min() > 12
    assert Sampling.of(told, 7) == (1.0, 2)


def test_the_systems_generator_is_uniform_and_its_normals_normal() -> None:
    numbers = system_uniform(20_000)
    assert 0 < numbers.min() < numbers.max() < 1
    assert stats.kstest(numbers, "uniform").pvalue > 1e-9
    assert stats.kstest(standard_normal(system_uniform, 20_000).numpy(), "norm").pvalue > 1e-9


def learner(told: Plan, net: Callable[[], nn.Module] = module, **more: Budget) -> TorchLearner:
    return TorchLearner(net(), data(), told, 0, **more)


def test_only_an_experiment_repeats_itself() -> None:
    first, again = learner(plan(epsilon=1e3)), learner(plan(epsilon=1e3))
    w = first.initial()
    np.testing.assert_array_equal(first.fit(w, 1), again.fit(w, 1))
    assert not np.array_equal(first.fit(w, 2), first.fit(w, 3))
    private = learner(plan(repeatable=False, epsilon=1e3))
    assert not np.array_equal(private.fit(w, 1), private.fit(w, 1))


def test_without_noise_to_speak_of_and_with_all_samples_it_is_sgd() -> None:
    """q = 1 and C out of reach: plain gradient descent with momentum."""
    told = plan(noise=1e-6, clip=1e3, epsilon=1e300)
    training = told.training.model_copy(update={"batch": 40})
    told = told.model_copy(update={"training": training})
    net = module()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    x, y = torch.from_numpy(data().train_x), torch.from_numpy(data().train_y)
    for _ in range(2):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    expected = torch.cat([p.detach().flatten() for p in net.parameters()]).numpy()
    budget = Budget(PrivacyPlan(), ())
    budget.spend = lambda *_: True  # type: ignore[method-assign]
    budget.check = lambda *_: None  # type: ignore[method-assign]
    found = learner(told, budget=budget)
    np.testing.assert_allclose(found.fit(found.initial(), 1), expected, atol=1e-4)


def test_epsilon_is_that_of_the_papers_mechanism() -> None:
    """q = 1, one step: Renyi DP alpha / (2 sigma^2), converted by hand."""
    budget = Budget(PrivacyPlan(noise=4.0, delta=1e-5, epsilon=100.0))
    assert budget.epsilon == 0
    assert budget.spend(1.0, 1)
    by_hand = min(
        a / 32 + math.log((a - 1) / a) - (math.log(1e-5) + math.log(a)) / (a - 1)
        for a in np.linspace(1.01, 100, 5000)
    )
    assert budget.epsilon == pytest.approx(by_hand, rel=0.01)
    subsampled = Budget(PrivacyPlan(noise=4.0, delta=1e-5, epsilon=100.0))
    subsampled.spend(0.1, 1)
    assert subsampled.epsilon < budget.epsilon


def test_the_budget_is_never_exceeded_and_outlives_a_restart() -> None:
    terms = PrivacyPlan(noise=1.0, epsilon=3.0)
    budget = Budget(terms)
    rounds = 0
    while budget.spend(0.05, 20):
        rounds += 1
        assert budget.epsilon <= 3.0
    assert rounds >= 2
    assert budget.exhausted
    assert budget.spent == [Spent(1.0, 0.05, 20 * rounds)]
    again = Budget(terms, budget.spent)
    assert again.epsilon == budget.epsilon
    assert not again.spend(0.05, 20)
    # Data that grew since are drawn at another rate; what was spent stays.
    grown = Budget(terms.model_copy(update={"epsilon": 100.0}), budget.spent)
    grown.spend(0.025, 1)
    assert grown.spent == [*budget.spent, Spent(1.0, 0.025, 1)]
    assert grown.epsilon > budget.epsilon


def test_a_budget_that_allows_no_round_is_refused() -> None:
    with pytest.raises(UserError, match="is too little: one round spends") as caught:
        learner(plan(epsilon=0.5))
    assert "fewer epochs" in caught.value.hint
    spent = Budget(plan(epsilon=100.0).privacy)
    assert spent.spend(0.25, 8)
    learner(plan(epsilon=0.5), budget=Budget(plan(epsilon=0.5).privacy, spent.spent))


def test_training_stops_at_the_budget() -> None:
    budget = Budget((told := plan(epsilon=12.0)).privacy)
    peer = learner(told, budget=budget)
    w = peer.initial()
    trained = 0
    for t in range(1, 30):
        after = peer.fit(w, t)
        if np.array_equal(after, w):
            break
        trained, w = t, after
    assert 1 <= trained < 29
    assert budget.exhausted
    assert 0 < budget.epsilon <= 12.0


@pytest.mark.parametrize(
    "net",
    [
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)),
        lambda: nn.Sequential(nn.Unflatten(1, (4, 1)), nn.LSTM(1, 2), nn.Linear(2, 3)),
    ],
    ids=["batchnorm", "lstm"],
)
def test_models_whose_samples_cannot_be_told_apart_are_refused(
    net: Callable[[], nn.Module],
) -> None:
    with pytest.raises(UserError, match=r"privacy: the model cannot be trained|cannot take inputs"):
        learner(plan(), net)
