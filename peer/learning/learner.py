"""What a learner is: flat parameters in, flat parameters out.

Everything outside `peer.learning` sees a model as one float32 vector and a `Manifest`; which
library trains it is the learner's own affair. `TorchLearner` and `EstimatorLearner` implement this.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
"""A model as one flat float32 vector, shape [e]."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a model: its name, its shape, and whether it is trained (a weight) or kept
    (a float buffer, such as BatchNorm's running mean)."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True

    @property
    def size(self) -> int:
        """Number of values."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Manifest:
    """The layout of a flat model: trainable entries first, float buffers after them, in order.

    Only the first `trainable` values enter g and h (the cosines of PANM-Grad and CFL).
    """

    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        flags = [entry.trainable for entry in self.entries]
        if flags != sorted(flags, reverse=True):
            raise ValueError("trainable entries come before buffers")

    @cached_property
    def size(self) -> int:
        """e, the number of values of a model."""
        return sum(entry.size for entry in self.entries)

    @cached_property
    def trainable(self) -> int:
        """The number of values that are trained."""
        return sum(entry.size for entry in self.entries if entry.trainable)

    def unflatten(self, vector: Vector) -> dict[str, Vector]:
        """Return {name: view of `vector` [e] in the entry's shape}.

        Raises ValueError on another size.
        """
        if vector.shape != (self.size,):
            raise ValueError(f"a model of this manifest has {self.size} values, not {vector.shape}")
        views, start = {}, 0
        for entry in self.entries:
            views[entry.name] = vector[start : start + entry.size].reshape(entry.shape)
            start += entry.size
        return views

    def flatten(self, arrays: Mapping[str, npt.ArrayLike]) -> Vector:
        """Return the flat vector [e] of named arrays.

        Raises ValueError on missing names or other shapes.
        """
        vector = np.empty(self.size, dtype=np.float32)
        for name, view in self.unflatten(vector).items():
            if name not in arrays or np.shape(arrays[name]) != view.shape:
                raise ValueError(f"no array {name!r} of shape {view.shape}")
            view[...] = arrays[name]
        return vector

    def digest(self, initial: Vector) -> str:
        """Return 32 hex digits that two peers share iff they agree on the layout and on w_0 [e]."""
        layout = json.dumps([[e.name, list(e.shape), e.trainable] for e in self.entries])
        sha = hashlib.sha256(layout.encode())
        sha.update(np.ascontiguousarray(initial, dtype="<f4").tobytes())
        return sha.hexdigest()[:32]


@dataclass(frozen=True)
class ModelCard:
    """What one must know of a model to build it again without its data.

    `model` is the plan's name, `factory` the import path of a custom one. `shape` is that of one
    input and `scale` what stored inputs are multiplied by; `labels` name the `classes`, if they
    have names; `left_out` are the columns of a table that the training took for no features. Of a
    `text`, inputs are token ids, and `labels` the vocabulary.
    """

    model: str
    factory: str | None
    shape: tuple[int, ...]
    classes: int
    labels: tuple[str, ...] | None
    scale: float
    seed: int
    left_out: tuple[str, ...] = ()
    text: bool = False


class Scores(NamedTuple):
    """What an evaluation finds: accuracy in [0, 1] and mean loss (cross-entropy, nats)."""

    accuracy: float
    loss: float


class Learner(Protocol):
    """Trains and judges models on one peer's data.

    Every method is deterministic: randomness comes from (seed, index, t, purpose). No method
    changes a vector it is given. Vectors have shape [manifest.size]; another size raises
    ValueError. The methods may be called from a worker thread, one call at a time.
    """

    @property
    def manifest(self) -> Manifest:
        """The layout of this learner's model."""
        ...

    @property
    def samples(self) -> int:
        """Number of training samples."""
        ...

    def initial(self) -> Vector:
        """Return w_0 [e]: the same at every peer of a federation."""
        ...

    def fit(self, model: Vector, t: int) -> Vector:
        """Return w^{t-1/2} [e]: `model` after the plan's local epochs of round t (1-based)."""
        ...

    def train_losses(self, models: list[Vector], t: int) -> list[float]:
        """Return F_i of each model: mean loss on the round's draw of training samples."""
        ...

    def held_losses(self, models: list[Vector]) -> list[float]:
        """Return each model's mean loss on the samples that are held out for the gate.

        Raises ValueError when there are none.
        """
        ...

    def evaluate(self, model: Vector) -> Scores:
        """Return the scores of `model` on the peer's own test set."""
        ...

    def predict(self, model: Vector, inputs: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the class [m] of each input [m, ...] shaped like the training inputs."""
        ...
