"""Every stacked layer against autograd, client by client."""

from __future__ import annotations

import copy
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from peer.learning.learner import Entry, Manifest
from peer.learning.models import cnn, lenet
from simulations.engine import layers
from simulations.engine.layers import (
    Context,
    NotStackableError,
    Stack,
    compose,
    image_batch,
    loss_gradient,
    losses,
)

C, B, CLASSES = 3, 4, 5
IMAGE, VECTOR = (2, 8, 8), (7,)


def head(features: int) -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(features, CLASSES)]


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(7, CLASSES)), VECTOR),
    "linear without bias": (lambda: nn.Sequential(nn.Linear(7, CLASSES, bias=False)), VECTOR),
    "bare linear": (lambda: nn.Linear(7, CLASSES), VECTOR),
    "flatten first": (lambda: nn.Sequential(*head(128)), IMAGE),
    "relu": (lambda: nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, CLASSES)), VECTOR),
    "relu first": (lambda: nn.Sequential(nn.ReLU(), nn.Linear(7, CLASSES)), VECTOR),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), *head(108)), IMAGE),
    "two convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, (3, 2)), *head(168)
        ),
        IMAGE,
    ),
    "strided, dilated": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=2, dilation=2), *head(48)),
        IMAGE,
    ),
    "grouped": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 3, groups=2, bias=False), *head(144)
        ),
        IMAGE,
    ),
    "one channel": (lambda: nn.Sequential(nn.Conv2d(1, 3, 3), *head(108)), (1, 8, 8)),
    "pooling": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.MaxPool2d(2), *head(48)),
        IMAGE,
    ),
    "pooling with overlap": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 1), nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True), *head(75)
        ),
        IMAGE,
    ),
    "batch norm of vectors": (
        lambda: nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES)),
        VECTOR,
    ),
    "batch norm of images": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), *head(108)),
        IMAGE,
    ),
    "batch norm without weights": (
        lambda: nn.Sequential(
            nn.Linear(7, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, CLASSES)
        ),
        VECTOR,
    ),
    "nested": (
        lambda: nn.Sequential(
            nn.Sequential(nn.Conv2d(2, 3, 3), nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))),
            nn.Identity(),
            nn.Sequential(*head(27)),
        ),
        IMAGE,
    ),
    "dropout": (
        lambda: nn.Sequential(
            nn.Linear(7, 9), nn.Dropout(0.4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(9, CLASSES)
        ),
        VECTOR,
    ),
    "dropout of images": (
        lambda: nn.Sequential(nn.Dropout(0.3), nn.Conv2d(2, 3, 3), *head(108)),
        IMAGE,
    ),
    "dropout of all and none": (
        lambda: nn.Sequential(
            nn.Dropout(0.0), nn.Linear(7, 9), nn.Dropout(1.0), nn.Linear(9, CLASSES)
        ),
        VECTOR,
    ),
}


def manifest_of(module: nn.Module) -> Manifest:
    trained = [Entry(name, tuple(p.shape)) for name, p in module.named_parameters()]
    kept = [
        Entry(name, tuple(b.shape), False)
        for name, b in module.named_buffers()
        if b.is_floating_point()
    ]
    return Manifest((*trained, *kept))


def row_of(module: nn.Module, manifest: Manifest) -> Tensor:
    state = module.state_dict()
    return torch.cat([state[entry.name].reshape(-1) for entry in manifest.entries])


def clients(name: str, dtype: torch.dtype) -> tuple[list[nn.Module], Stack, Tensor, Manifest]:
    """Return C modules of different weights, their stack and their rows [C, e]."""
    torch.manual_seed(1)
    build, shape = MODULES[name]
    modules = [build().to(dtype) for _ in range(C)]
    for module in modules:
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.data.add_(torch.rand_like(tensor), alpha=0.2)
    manifest = manifest_of(modules[0])
    rows = torch.stack([row_of(module, manifest) for module in modules])
    return modules, compose(modules[0], manifest, shape), rows, manifest


def stacked(x: Tensor, stack: Stack) -> Tensor:
    return image_batch(x, x.dtype) if stack.images else x.flatten(2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", MODULES)
def test_against_autograd(name: str, dtype: torch.dtype) -> None:
    rtol, atol = (1e-9, 1e-10) if dtype == torch.float64 else (1e-5, 1e-5)
    modules, stack, rows, manifest = clients(name, dtype)
    shape = MODULES[name][1]
    x = torch.randn(C, B, *shape, dtype=dtype)
    labels = torch.randint(CLASSES, (C, B))
    # Ties and exact zeros, as padded images have them.
    x[:, 0] = x[:, 0].round()
    given = stacked(x, stack).clone()
    kept = given.clone()
    velocity = torch.full((C, manifest.trainable), torch.nan, dtype=dtype)
    stack.bind(rows, velocity)
    context = Context([B] * C, [torch.Generator().manual_seed(i) for i in range(C)])
    logits = stack.forward(given, context)
    gradient = loss_gradient(logits, labels, 1 / B)
    stack.backward(gradient, 0.0)
    assert torch.equal(given, kept)
    first = velocity.clone()
    stack.backward(gradient, 0.5)

    for i, module in enumerate(modules):
        module.train()
        torch.manual_seed(i)
        expected = module(x[i])
        torch.testing.assert_close(logits[i], expected.detach(), rtol=rtol, atol=atol)
        loss = nn.functional.cross_entropy(expected, labels[i])
        grads = torch.autograd.grad(loss, list(module.parameters()))
        torch.testing.assert_close(
            losses(logits, labels)[i].mean(), loss.detach(), rtol=rtol, atol=atol
        )
        expected_row = torch.cat([g.reshape(-1) for g in grads])
        torch.testing.assert_close(first[i], expected_row, rtol=rtol, atol=atol)
        torch.testing.assert_close(velocity[i], 1.5 * expected_row, rtol=rtol, atol=atol)
        # Running statistics moved as the module's did.
        torch.testing.assert_close(rows[i], row_of(module, manifest), rtol=rtol, atol=atol)
        module.eval()
        stack.bind(rows[i : i + 1])
        one = stack.forward(stacked(x[i : i + 1], stack))
        torch.testing.assert_close(one[0], module(x[i]).detach(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", MODULES)
def test_mixed_precision_is_autograd_within_rounding(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the median client: where a rounding decides between two paths of a gradient, one is off.

    A significand of bfloat16 has 8 bits; a norm of so many roundings stays within a few of 2^-9.
    """
    monkeypatch.setattr(layers, "_WIDE", 1)
    modules, _, rows, manifest = clients(name, torch.float32)
    shape = MODULES[name][1]
    stack = compose(modules[0], manifest, shape, mixed=True)
    x, labels = torch.randn(C, B, *shape), torch.randint(CLASSES, (C, B))
    velocity = torch.full((C, manifest.trainable), torch.nan)
    stack.bind(rows, velocity)
    context = Context([B] * C, [torch.Generator().manual_seed(i) for i in range(C)])
    logits = stack.forward(stacked(x.to(stack.dtype), stack), context)
    gradient = loss_gradient(logits, labels, 1 / B)
    assert logits.dtype == gradient.dtype == torch.float32
    stack.backward(gradient, 0.0)
    first = velocity.clone()
    stack.backward(gradient, 0.5)
    torch.testing.assert_close(velocity, 1.5 * first, rtol=1e-5, atol=1e-6)
    of_logits, of_gradients = [], []
    for i, module in enumerate(modules):
        torch.manual_seed(i)
        expected = module.train()(x[i])
        loss = nn.functional.cross_entropy(expected, labels[i])
        grads = torch.autograd.grad(loss, list(module.parameters()))
        of_logits.append(relative_error(logits[i], expected.detach()))
        of_gradients.append(relative_error(first[i], torch.cat([g.reshape(-1) for g in grads])))
        torch.testing.assert_close(rows[i], row_of(module, manifest), rtol=0, atol=2e-3)
    assert max(of_logits) < 0.02
    assert median(of_gradients) < 0.02


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_only_the_output_layer_of_mixed_precision_takes_float32() -> None:
    """A weight that bfloat16 does not hold shows in the logits, and one before it does not."""
    fine = 1 + 2.0**-12
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    stack = compose(module, manifest_of(module), (1,), mixed=True)
    assert stack.dtype == torch.bfloat16
    for row, logit in (([fine, 1.0], 1.0), ([1.0, fine], fine)):
        stack.bind(torch.tensor([row]))
        assert stack.forward(torch.ones(1, 1, 1, dtype=torch.bfloat16)).item() == logit


def test_narrow_convolutions_of_mixed_precision_take_float32() -> None:
    for build, dtype in ((lenet, torch.float32), (cnn, torch.bfloat16)):
        module = build((1, 28, 28), CLASSES)
        assert compose(module, manifest_of(module), (1, 28, 28), mixed=True).dtype == dtype


def test_image_batches_are_channels_last_even_with_one_channel() -> None:
    for c, channels in ((1, 1), (3, 1), (2, 3)):
        batch = image_batch(torch.zeros(c, B, channels, 8, 8, dtype=torch.uint8), torch.float32)
        assert batch.stride() == (64 * c * channels, 1, 8 * c * channels, c * channels)
        assert batch.dtype == torch.float32


def test_padding_leaves_no_trace() -> None:
    _, stack, rows, manifest = clients("two convolutions", torch.float64)
    x = torch.randn(C, B, *IMAGE, dtype=torch.float64)
    labels = torch.randint(CLASSES, (C, B))
    sizes = [4, 2, 3]
    weights = torch.zeros(C, B, 1, dtype=torch.float64)
    for i, size in enumerate(sizes):
        weights[i, :size] = 1 / size
    velocity = torch.empty(C, manifest.trainable, dtype=torch.float64)
    stack.bind(rows, velocity)
    logits = stack.forward(stacked(x, stack), Context(sizes, []))
    stack.backward(loss_gradient(logits, labels, weights), 0.0)
    for i, size in enumerate(sizes):
        alone = torch.empty(1, manifest.trainable, dtype=torch.float64)
        stack.bind(rows[i : i + 1], alone)
        logits = stack.forward(stacked(x[i : i + 1, :size], stack), Context([size], []))
        stack.backward(loss_gradient(logits, labels[i : i + 1, :size], 1 / size), 0.0)
        torch.testing.assert_close(velocity[i], alone[0], rtol=1e-10, atol=1e-12)


class OneDevice(TorchDispatchMode):
    """Takes operands of one device only, as a GPU does and `meta` does not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        devices = {operand.device for operand in args if isinstance(operand, Tensor)}
        assert len(devices) <= 1, f"{func} of {devices}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("build", [lenet, cnn])
def test_a_module_may_lie_on_any_device(build: Callable[..., nn.Module]) -> None:
    """A learner may have moved it to a GPU."""
    shape = (1, 28, 28)
    module, x = build(shape, CLASSES), torch.randn(1, B, *shape)
    manifest = manifest_of(module)
    with OneDevice():
        stack = compose(build(shape, CLASSES).to("meta"), manifest, shape)
    stack.bind(row_of(module, manifest)[None])
    logits = stack.forward(stacked(x, stack))[0]
    torch.testing.assert_close(logits, module(x[0]).detach(), rtol=0, atol=1e-5)


class Doubled(nn.Linear):
    """Looks like a Linear and is none."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _tied() -> nn.Module:
    one, two = nn.Linear(7, 7), nn.Linear(7, 7)
    two.weight = one.weight
    return nn.Sequential(one, two)


def _frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, CLASSES))
    module[0].weight.requires_grad_(False)
    return module


def _hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(7, CLASSES))
    module[0].register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("module", "shape", "reason"),
    [
        (nn.Sequential(nn.Linear(7, 7), nn.Tanh()), VECTOR, "Tanh"),
        (nn.Sequential(Doubled(7, CLASSES)), VECTOR, "Doubled"),
        (nn.Sequential(nn.Linear(8, CLASSES)), IMAGE, "Linear on images"),
        (nn.Sequential(nn.Linear(8, CLASSES)), (4, 8), "not flattened"),
        (nn.Sequential(nn.Conv2d(2, 3, 3)), IMAGE, "not vectors"),
        (nn.Sequential(nn.Conv2d(2, 3, 3, padding="same"), *head(192)), IMAGE, "padding by name"),
        (
            nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), *head(192)),
            IMAGE,
            "padding mode circular",
        ),
        (nn.Sequential(nn.BatchNorm1d(7, momentum=None), nn.Linear(7, 5)), VECTOR, "cumulative"),
        (nn.Sequential(nn.Flatten()), VECTOR, "no layer is trained"),
        (_tied(), VECTOR, "share"),
        (_frozen(), VECTOR, "not trained"),
        (_hooked(), VECTOR, "hooks"),
    ],
)
def test_what_cannot_be_stacked(module: nn.Module, shape: tuple[int, ...], reason: str) -> None:
    with pytest.raises(NotStackableError, match=reason):
        compose(copy.deepcopy(module), manifest_of(module), shape)
