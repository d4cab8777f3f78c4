"""Local training of one torch module by momentum SGD.

The module's parameters are views of one flat tensor, so a model enters and leaves in one copy and
an optimiser step is two or three operations, however many layers there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from peer.errors import UserError
from peer.learning.budget import Budget
from peer.learning.learner import Entry, Manifest, Scores, Vector
from peer.learning.models import GLOBAL_RNG
from peer.learning.partition import PeerData
from peer.learning.privacy import PrivateSgd, Sampling
from peer.learning.schedule import batches, epoch_orders, held_out, learning_rate, loss_sample
from peer.plan import Plan
from peer.randomness import Purpose, integer_seed

_CHUNK = 200
"""Samples a forward pass when nothing is trained: bounds the memory of activations."""


class TorchLearner:
    """A `peer.learning.learner.Learner` of any `nn.Module` that maps [m, *shape] to logits.

    The vector holds the trained parameters (shared ones once), then frozen parameters and the
    persistent float buffers; integer buffers stay in the module. Takes the module over: it is moved
    to `device`, and its weights are those of whatever vector was used last.
    """

    def __init__(
        self,
        module: nn.Module,
        data: PeerData,
        plan: Plan,
        index: int,
        *,
        device: str = "cpu",
        budget: Budget | None = None,
    ) -> None:
        """Where the plan asks for privacy, `budget` is what may still be spent: all if not given.

        Raises UserError when `device` is not there or the module does not fit the data or the
        plan's privacy.
        """
        self._device = find_device(device)
        self._module = module.to(self._device, torch.float32)
        self._plan = plan
        self._index = index
        self._classes = data.classes
        self._train = self._tensors(data.train_x, data.train_y)
        self._check_output(data.shape)
        self._test = self._tensors(data.test_x, data.test_y)
        self._fewest = self._fewest_in_batch()
        self._draws = True  # whether training draws from torch's generator; known after a round

        trained, kept = _vector_tensors(self._module)
        self._manifest = Manifest(
            tuple(Entry(name, tuple(p.shape), True) for name, p in trained.items())
            + tuple(Entry(name, tuple(b.shape), False) for name, b in kept.items())
        )
        self._flat = torch.empty(self._manifest.size, device=self._device)
        self._trained = self._flat[: self._manifest.trainable]
        self._velocity = torch.zeros_like(self._trained)
        _move_into(self._flat, [*trained.values(), *kept.values()])
        start = 0
        for parameter in trained.values():
            stop = start + parameter.numel()
            parameter.grad = self._velocity[start:stop].view(parameter.shape)
            start = stop
        self._initial = self._vector()
        self._private: PrivateSgd | None = None
        if plan.privacy.acts:
            self._budget = budget or Budget(plan.privacy)
            self._budget.check(*Sampling.of(plan, self.samples))
            self._private = PrivateSgd(self._module, plan, index, self.samples)

    @property
    def manifest(self) -> Manifest:
        """The layout of the vector."""
        return self._manifest

    @property
    def samples(self) -> int:
        """Number of training samples."""
        return len(self._train[1])

    def initial(self) -> Vector:
        """Return w_0 [e]."""
        return self._initial.copy()

    def fit(self, model: Vector, t: int) -> Vector:
        """Return `model` [e] after E local epochs of round t; as it is when that would cost more
        epsilon than is left.

        [choice] Momentum starts at zero every round: what was averaged in has no velocity.
        """
        if self._private is not None and not self._private.begin(t, self._budget):
            return model.copy()
        self._load(model)
        self._velocity.zero_()
        self._module.train()
        lr = learning_rate(self._plan, t)
        with self._seeded(t):
            for batch in self._batches(t):
                self._step(torch.from_numpy(batch).to(self._device), lr)
        return self._vector()

    def _batches(self, t: int) -> Iterator[npt.NDArray[np.int64]]:
        if self._private is not None:
            yield from self._private.batches()
            return
        for order in epoch_orders(self._plan, self._index, t, self.samples):
            yield from batches(order, self._plan.training.batch, fewest=self._fewest)

    def train_losses(self, models: list[Vector], t: int) -> list[float]:
        """Return each model's mean cross-entropy on round t's draw of training samples.

        A loss that is not finite comes as infinity: such a model resembles nobody's.
        """
        return self._losses(models, loss_sample(self._plan, self._index, t, self.samples))

    def held_losses(self, models: list[Vector]) -> list[float]:
        """Return each model's mean cross-entropy on the samples held out; infinity as above."""
        held = held_out(self._plan, self._index, self.samples)
        if not len(held):
            raise ValueError("no samples are held out")
        return self._losses(models, held)

    def _losses(self, models: list[Vector], samples: npt.NDArray[np.int64]) -> list[float]:
        chosen = torch.from_numpy(samples).to(self._device)
        x, y = self._train[0][chosen], self._train[1][chosen]
        losses = [self._scores(model, x, y).loss for model in models]
        return [loss if math.isfinite(loss) else math.inf for loss in losses]

    def evaluate(self, model: Vector) -> Scores:
        """Return the scores of `model` [e] on the peer's own test set."""
        return self._scores(model, *self._test)

    def predict(self, model: Vector, inputs: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the class [m] of each input [m, *shape], scaled as the training inputs are.

        Raises ValueError when the inputs have another shape.
        """
        shape = tuple(self._train[0].shape[1:])
        if inputs.shape[1:] != shape:
            raise ValueError(f"inputs have shape {inputs.shape[1:]}, not {shape}")
        x = torch.tensor(inputs, dtype=self._train[0].dtype, device=self._device)
        self._load(model)
        classes = [logits.argmax(dim=1) for logits in self._logits(x)]
        return torch.cat(classes).cpu().numpy() if classes else np.empty(0, dtype=np.int64)

    def module(self, model: Vector) -> nn.Module:
        """Return the learner's own module, in evaluation mode, with the weights of `model` [e].

        For export; the next call of another method changes its weights.
        """
        self._load(model)
        return self._module.eval()

    def _step(self, batch: torch.Tensor, lr: float) -> None:
        """One step of torch.optim.SGD: v <- mu v + (g + lambda w); w <- w - lr v.

        The parameters' gradients *are* views of v: the backward pass adds g to mu v by itself.
        """
        training = self._plan.training
        x, y = self._train[0][batch], self._train[1][batch]
        self._velocity.mul_(training.momentum)
        if self._private is not None:
            self._velocity.add_(self._private.gradient(x, y))
        else:
            nn.functional.cross_entropy(self._module(x), y).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            if training.weight_decay:
                self._velocity.add_(self._trained, alpha=training.weight_decay)
            self._trained.add_(self._velocity, alpha=-lr)

    @contextmanager
    def _seeded(self, t: int) -> Iterator[None]:
        """Seed torch for round t (dropout), leaving its global state as it was.

        A module that drew nothing in its first round trains without the lock afterwards, side by
        side with other learners of this process. On a GPU it always takes it.
        """
        if not self._draws:
            yield
            return
        cuda = self._device.type == "cuda"
        with GLOBAL_RNG, torch.random.fork_rng(devices=[self._device] if cuda else []):
            seed = integer_seed(self._plan.seed, Purpose.DROPOUT, index=self._index, t=t)
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            yield
            self._draws = cuda or not torch.equal(before, torch.get_rng_state())

    def _logits(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        self._module.eval()
        for part in torch.split(x, _CHUNK):
            with torch.inference_mode():
                logits = self._module(part)
            yield logits

    def _scores(self, model: Vector, x: torch.Tensor, y: torch.Tensor) -> Scores:
        self._load(model)
        right, loss = 0.0, 0.0
        for logits, labels in zip(self._logits(x), torch.split(y, _CHUNK), strict=True):
            right += float((logits.argmax(dim=1) == labels).sum())
            loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
        return Scores(right / len(y), loss / len(y))

    def _load(self, model: Vector) -> None:
        if model.shape != (self._manifest.size,):
            raise ValueError(f"the model has {self._manifest.size} values, not {model.shape}")
        with torch.no_grad():
            self._flat.copy_(torch.tensor(model))

    def _vector(self) -> Vector:
        return self._flat.cpu().numpy().copy()

    def _tensors(
        self, x: npt.NDArray[Any], y: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(x).to(self._device), torch.from_numpy(y).to(self._device)

    def _check_output(self, shape: tuple[int, ...]) -> None:
        """Run one input through; this also creates the parameters of torch's lazy layers."""
        self._module.eval()
        with GLOBAL_RNG, torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(integer_seed(self._plan.seed, Purpose.INITIAL_WEIGHTS))
            try:
                output = self._module(self._train[0].new_zeros(2, *shape))
            except Exception as error:  # a person's module may raise anything
                reason = str(error).partition("\n")[0]
                raise UserError(
                    f"the model cannot take inputs of shape {shape}: {reason}"
                ) from error
        given = tuple(getattr(output, "shape", ())) or type(output).__name__
        if given != (2, self._classes):
            raise UserError(
                f"the model gives {given} for two inputs, not logits of shape (2, {self._classes})",
                f"its last layer must have {self._classes} outputs, one a class",
            )

    def _fewest_in_batch(self) -> int:
        """Return 2 for a module with BatchNorm, which cannot be trained on one sample, else 1."""
        norm = nn.modules.batchnorm._BatchNorm
        if not any(isinstance(part, norm) for part in self._module.modules()):
            return 1
        if min(self.samples, self._plan.training.batch) < 2:
            raise UserError("a model with BatchNorm needs 2 training samples and a batch of 2")
        return 2


def find_device(name: str) -> torch.device:
    """Return the device of a name, cpu or cuda, ready for products in float32.

    TF32, which torch lets cuDNN's convolutions take by default, is switched off in this process:
    of an operand it keeps ten bits, and no GPU would agree with a CPU any more. Raises UserError
    when there is no such device.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"there is no device {name!r}", "use cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"the device {name!r} is not supported", "use cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"the device {name} is not there: torch finds no such GPU", "use cpu")
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    return device


def _vector_tensors(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors of a model's vector by name: (trained, kept), each tensor once."""
    parameters = dict(module.named_parameters())
    persistent = module.state_dict().keys()
    trained: dict[str, torch.Tensor] = {n: p for n, p in parameters.items() if p.requires_grad}
    if not trained:
        raise UserError("the model has no parameters to train")
    kept: dict[str, torch.Tensor] = {n: p for n, p in parameters.items() if not p.requires_grad}
    for name, buffer in module.named_buffers():
        if name in persistent and buffer.is_floating_point():
            kept[name] = buffer
    return trained, kept


def _move_into(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Make every tensor a view of `flat`, one after another, keeping its values."""
    start = 0
    for tensor in tensors:
        view = flat[start : start + tensor.numel()].view(tensor.shape)
        view.copy_(tensor.detach())
        tensor.data = view
        start += tensor.numel()
