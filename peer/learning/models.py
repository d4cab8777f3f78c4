"""Built-in torch models, and models that a person names by import path.

Every built-in but `lstm` is an `nn.Sequential` of plain layers, so that a trainer of many models at
once can be composed from the same layers. Pooling comes before ReLU: ReLU is monotonic, so the
result is the same, on a quarter of the data.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch
from torch import nn

from peer.errors import UserError
from peer.learning.local_import import import_callable
from peer.randomness import Purpose, integer_seed

GLOBAL_RNG = threading.Lock()
"""Held while torch's global generator is seeded: several peers may live in one process."""

Shape = tuple[int, ...]
Factory = Callable[[Shape, int], nn.Module]
"""(shape of one input, classes) -> a module that maps [m, *shape] to logits [m, classes]."""


def mlp(shape: Shape, classes: int, hidden: int = 200) -> nn.Sequential:
    """One hidden layer."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.ReLU(), nn.Linear(hidden, classes)
    )


def lenet(shape: Shape, classes: int) -> nn.Sequential:
    """LeNet-5 (LeCun et al. 1998), padded as there, with max-pooling and ReLU."""
    channels, height, width = _image_shape("lenet", shape, smallest=12)
    features = 16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(),
        nn.Linear(features, 120), nn.ReLU(),
        nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, classes),
    )  # fmt: skip


def cnn(shape: Shape, classes: int) -> nn.Sequential:
    """Three 3 x 3 convolutions (32, 64, 64), each pooled, and a hidden layer of 64."""
    channels, height, width = _image_shape("cnn", shape, smallest=8)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * (height // 8) * (width // 8), 64), nn.ReLU(),
        nn.Linear(64, classes),
    )  # fmt: skip


class NextWord(nn.Module):
    """Token ids [m, L] -> logits [m, words] of the word that follows."""

    def __init__(self, words: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.output = nn.Linear(hidden, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        states, _ = self.lstm(self.embedding(tokens))
        logits: torch.Tensor = self.output(states[:, -1])
        return logits


def lstm(shape: Shape, classes: int) -> nn.Module:
    """Embedding of 64, one LSTM layer of 128, and a linear layer on its last state."""
    if len(shape) != 1:
        raise UserError(f"lstm needs windows of words, not inputs of shape {shape}")
    return NextWord(classes, embedding=64, hidden=128)


MODELS: dict[str, Factory] = {"mlp": mlp, "lenet": lenet, "cnn": cnn, "lstm": lstm}
"""The built-in models by their name in a plan."""


def build_model(
    name: str, shape: Shape, classes: int, seed: int, *, factory: str | None = None
) -> nn.Module:
    """Return the model of a plan with w_0 of `seed`, the same at every peer.

    It is the built-in `name`, or what a person's own `factory`, an import path, makes. Raises
    UserError when there is no such model, or inputs of `shape` do not fit it.
    """
    if factory is not None:
        return instantiate(load_factory(factory), shape, classes, seed)
    if name not in MODELS:
        raise UserError(f"there is no built-in model {name!r}", f"built in are {', '.join(MODELS)}")
    return instantiate(MODELS[name], shape, classes, seed)


def instantiate(factory: Factory, shape: Shape, classes: int, seed: int) -> nn.Module:
    """Call `factory` with torch seeded for the initial weights; torch's global state is kept.

    Raises UserError when the factory fails or does not return a module.
    """
    with GLOBAL_RNG, torch.random.fork_rng(devices=[]):
        torch.manual_seed(integer_seed(seed, Purpose.INITIAL_WEIGHTS))
        try:
            module = factory(shape, classes)
        except UserError:
            raise
        except Exception as error:  # a person's factory may raise anything
            raise UserError(f"the model factory failed: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"the model factory returned {type(module).__name__}, not an nn.Module")
    return module


def load_factory(path: str) -> Factory:
    """Return the factory `module:function` that a person names on this machine.

    Raises UserError when it cannot be had.
    """
    return import_callable(path, "model")


def _image_shape(model: str, shape: Shape, smallest: int) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise UserError(
            f"{model} needs images (channels, height, width), not inputs of shape {shape}",
            "use the model mlp",
        )
    channels, height, width = shape
    if min(height, width) < smallest:
        raise UserError(
            f"{model} needs images of at least {smallest} x {smallest}, not {height} x {width}",
            "use the model mlp" + (", or cnn" if min(height, width) >= 8 else ""),
        )
    return channels, height, width
