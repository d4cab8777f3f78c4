"""Local training by torch, against torch's own optimiser."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from peer.errors import UserError
from peer.learning.learner import Learner, Vector
from peer.learning.models import build_model
from peer.learning.partition import PeerData
from peer.learning.schedule import batches, epoch_orders, learning_rate, loss_sample
from peer.learning.torch_learner import TorchLearner, find_device
from peer.plan import MatchingPlan, Plan, TrainingPlan

torch.set_num_threads(1)


def make_data(m: int = 61, shape: tuple[int, ...] = (1, 8, 8), classes: int = 4) -> PeerData:
    rng = np.random.default_rng(0)
    y = rng.integers(classes, size=m + 30)
    x = rng.normal(size=(m + 30, *shape)).astype(np.float32)
    x += y.reshape(-1, *[1] * len(shape)) / 2
    return PeerData(x[:m], y[:m], x[m:], y[m:], classes, shape)


def make_plan(**training: Any) -> Plan:
    return Plan(n=4, seed=2, training=TrainingPlan(**({"batch": 20, "lr": 0.05} | training)))


class Tied(nn.Module):
    """Two layers that share their weight, and one frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(64), requires_grad=False)
        self.last = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(torch.relu(self.first(x.flatten(1)) * self.frozen))
        out: torch.Tensor = self.last(hidden)
        return out


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(192, 4)
    )


def make_module(name: str) -> nn.Module:
    if name in ("tied", "normed"):
        torch.manual_seed(1)
        return Tied() if name == "tied" else normed()
    return build_model(name, (1, 8, 8), 4, seed=0)


def train_plainly(module: nn.Module, data: PeerData, plan: Plan, index: int, t: int) -> nn.Module:
    """Train as anyone would with torch.optim, on the plan's batches."""
    training = plan.training
    optimiser = torch.optim.SGD(
        module.parameters(),
        lr=learning_rate(plan, t),
        momentum=training.momentum,
        weight_decay=training.weight_decay,
    )
    module.train()
    x, y = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)
    for order in epoch_orders(plan, index, t, len(y)):
        for batch in batches(order, training.batch, fewest=2):
            optimiser.zero_grad()
            chosen = torch.from_numpy(batch)
            loss = nn.functional.cross_entropy(module(x[chosen]), y[chosen])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return module


@pytest.mark.parametrize("name", ["mlp", "cnn", "tied", "normed"])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.01)])
def test_agrees_with_torch_optim(name: str, momentum: float, decay: float) -> None:
    data = make_data(62)
    plan = make_plan(momentum=momentum, weight_decay=decay, lr_decay=0.9)
    learner = TorchLearner(make_module(name), data, plan, 1)
    expected = train_plainly(make_module(name), data, plan, 1, t=3).state_dict()
    got = learner.manifest.unflatten(learner.fit(learner.initial(), t=3))
    for entry, values in got.items():
        np.testing.assert_allclose(values, expected[entry].numpy(), atol=1e-5)


def test_vectors_are_copies_and_rounds_do_not_leak() -> None:
    learner: Learner = TorchLearner(make_module("normed"), make_data(), make_plan(), 0)
    initial = learner.initial()
    model = initial.copy()
    model.flags.writeable = False  # as vectors are that come from the network
    first = learner.fit(model, 1)
    kept = first.copy()
    learner.train_losses([first, model], 1)
    learner.evaluate(model)
    other = learner.fit(first, 2)
    assert np.array_equal(first, kept)
    assert np.array_equal(model, initial)
    assert np.array_equal(learner.initial(), initial)
    assert not np.array_equal(other, first)
    assert np.array_equal(learner.fit(model, 1), first), "a round depends on its model and t alone"
    first[:] = 0
    assert np.array_equal(learner.fit(kept, 2), other)


def test_manifest() -> None:
    learner = TorchLearner(make_module("tied"), make_data(), make_plan(), 0)
    entries = [(e.name, e.shape, e.trainable) for e in learner.manifest.entries]
    assert entries == [
        ("first.weight", (64, 64), True),
        ("first.bias", (64,), True),
        ("second.bias", (64,), True),
        ("last.weight", (4, 64), True),
        ("last.bias", (4,), True),
        ("frozen", (64,), False),
    ]
    normed_entries = TorchLearner(normed(), make_data(), make_plan(), 0).manifest.entries
    assert [e.name for e in normed_entries if not e.trainable] == [
        "1.running_mean",
        "1.running_var",
    ]


def test_every_peer_starts_from_the_same_model() -> None:
    learners = [
        TorchLearner(make_module("mlp"), make_data(30 + i), make_plan(), i) for i in range(2)
    ]
    first, second = (learner.manifest.digest(learner.initial()) for learner in learners)
    assert first == second


def test_scores_exactly() -> None:
    data = make_data()
    learner = TorchLearner(make_module("mlp"), data, make_plan(), 0)
    model = learner.fit(learner.initial(), 1)
    reference = make_module("mlp")
    reference.load_state_dict(
        {k: torch.from_numpy(v) for k, v in learner.manifest.unflatten(model).items()}
    )
    with torch.no_grad():
        logits = reference(torch.from_numpy(data.test_x))
    y = torch.from_numpy(data.test_y)
    scores = learner.evaluate(model)
    assert scores.accuracy == pytest.approx(float((logits.argmax(1) == y).float().mean()))
    assert scores.loss == pytest.approx(float(nn.functional.cross_entropy(logits, y)), rel=1e-5)
    assert np.array_equal(learner.predict(model, data.test_x), logits.argmax(1).numpy())
    assert learner.predict(model, data.test_x[:0]).shape == (0,)
    with torch.no_grad():
        assert torch.equal(learner.module(model)(torch.from_numpy(data.test_x)), logits)


def test_evaluation_in_chunks_is_the_whole() -> None:
    data = make_data(450)
    learner = TorchLearner(make_module("cnn"), data, make_plan(), 0)
    swapped = PeerData(
        data.test_x, data.test_y, data.train_x, data.train_y, data.classes, data.shape
    )
    model = learner.initial()
    whole = TorchLearner(make_module("cnn"), swapped, make_plan(), 0).evaluate(model)
    reference = make_module("cnn")
    with torch.no_grad():
        loss = nn.functional.cross_entropy(
            reference(torch.from_numpy(data.train_x)), torch.from_numpy(data.train_y)
        )
    assert whole.loss == pytest.approx(float(loss), rel=1e-5)


def test_train_losses() -> None:
    data = make_data()
    plan = make_plan().model_copy(update={"matching": MatchingPlan(loss_samples=25)})
    learner = TorchLearner(make_module("mlp"), data, plan, 3)
    models = [learner.initial(), learner.fit(learner.initial(), 1)]
    chosen = loss_sample(plan, 3, 5, learner.samples)
    reference = make_module("mlp")
    with torch.no_grad():
        expected = nn.functional.cross_entropy(
            reference(torch.from_numpy(data.train_x[chosen])),
            torch.from_numpy(data.train_y[chosen]),
        )
    losses = learner.train_losses(models, 5)
    assert losses[0] == pytest.approx(float(expected), rel=1e-5)
    assert losses[1] < losses[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
def test_a_loss_that_is_not_finite_is_infinite(bad: float) -> None:
    learner = TorchLearner(make_module("mlp"), make_data(), make_plan(), 0)
    model = np.full(learner.manifest.size, bad, dtype=np.float32)
    losses = learner.train_losses([model, learner.initial()], 1)
    assert losses[0] == math.inf
    assert math.isfinite(losses[1])


def test_wrong_sizes_are_value_errors() -> None:
    learner = TorchLearner(make_module("mlp"), make_data(), make_plan(), 0)
    wrong: Vector = np.zeros(3, dtype=np.float32)
    for call in (
        lambda: learner.fit(wrong, 1),
        lambda: learner.evaluate(wrong),
        lambda: learner.train_losses([wrong], 1),
        lambda: learner.predict(learner.initial(), np.zeros((2, 5))),
    ):
        with pytest.raises(ValueError, match="not"):
            call()


def dropping() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 4))


def test_dropout_repeats_and_leaves_the_global_state() -> None:
    learner = TorchLearner(dropping(), make_data(), make_plan(), 0)
    torch.manual_seed(9)
    state = torch.get_rng_state()
    first = learner.fit(learner.initial(), 1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(10)
    assert np.array_equal(learner.fit(learner.initial(), 1), first)
    assert not np.array_equal(learner.fit(learner.initial(), 2), first)


def test_dropout_repeats_in_threads() -> None:
    learners = [TorchLearner(dropping(), make_data(), make_plan(), i) for i in range(4)]
    alone = [learner.fit(learner.initial(), 1) for learner in learners]
    together: dict[int, Vector] = {}

    def work(i: int) -> None:
        together[i] = learners[i].fit(learners[i].initial(), 1)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(alone[i], together[i]) for i in range(4))


def test_batchnorm_never_trains_on_one_sample() -> None:
    plan = make_plan(batch=20)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4))
    learner = TorchLearner(flat, make_data(41), plan, 0)
    assert np.isfinite(learner.fit(learner.initial(), 1)).all()
    for m, batch in ((1, 20), (10, 1)):
        with pytest.raises(UserError, match="BatchNorm"):
            TorchLearner(flat, make_data(m), make_plan(batch=batch), 0)


def test_lazy_layers_start_alike() -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(4))

    torch.manual_seed(1)
    first = TorchLearner(lazy(), make_data(), make_plan(), 0).initial()
    torch.manual_seed(2)
    assert np.array_equal(TorchLearner(lazy(), make_data(), make_plan(), 1).initial(), first)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 5)), r"gives \(2, 5\) for two inputs"),
        (nn.Linear(3, 4), r"cannot take inputs of shape \(1, 8, 8\)"),
        (nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(4)), "no parameters to train"),
    ],
)
def test_modules_that_do_not_fit(module: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TorchLearner(module, make_data(), make_plan(), 0)


def test_products_on_a_gpu_are_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with torch.backends.cudnn.flags(allow_tf32=True):  # as it was, behind the test
        torch.backends.cuda.matmul.allow_tf32 = True
        assert find_device("cpu") == torch.device("cpu")
        assert torch.backends.cudnn.allow_tf32
        assert find_device("cuda") == torch.device("cuda")
        assert not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("device", ["cuda:99", "meta", "toaster"])
def test_devices_that_are_not_there(device: str) -> None:
    with pytest.raises(UserError, match="device"):
        TorchLearner(make_module("mlp"), make_data(), make_plan(), 0, device=device)
