"""Local training with differential privacy: DP-SGD, and what of epsilon it has spent.

Abadi et al., "Deep Learning with Differential Privacy" (2016), algorithm 1: every sample of a batch
drawn by Poisson sampling has its gradient clipped to norm C, and Gaussian noise of standard
deviation sigma C is added to their sum. Two data sets are neighbours here when one has a sample
more. Gradients by sample and the accounting (Mironov's Renyi differential privacy) are Opacus's.

Which samples are drawn must be as secret as the noise: otherwise the plan's seed, which everybody
knows, undoes both. They come from the operating system's generator.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from peer.errors import UserError
from peer.learning.budget import Budget
from peer.plan import Plan
from peer.randomness import Purpose, generator

Uniform = Callable[[int], npt.NDArray[np.float64]]
"""Draws so many numbers, uniform in the open interval (0, 1)."""

_BITS = 52


class Sampling(NamedTuple):
    """How a round draws: each of N samples with probability `rate` (q), in each of `steps`."""

    rate: float
    steps: int

    @classmethod
    def of(cls, plan: Plan, samples: int) -> Sampling:
        """Return what draws `training.batch` of `samples` at a mean, and E times all of them."""
        batch = min(plan.training.batch, samples)
        return cls(batch / samples, plan.training.epochs * math.ceil(samples / batch))


class PrivateSgd:
    """Draws the batches of a peer's rounds and returns their noisy gradients.

    Raises UserError when a module's samples cannot be told apart (BatchNorm mixes them).
    """

    def __init__(self, module: nn.Module, plan: Plan, index: int, samples: int) -> None:
        from opacus import GradSampleModule
        from opacus.validators import ModuleValidator

        # That inputs need no gradient is as it should be.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        module.train()  # as Opacus wants to see it
        for error in ModuleValidator.validate(module, strict=False):
            raise UserError(
                f"privacy: the model cannot be trained by DP-SGD: {str(error).partition('. ')[0]}",
                "GroupNorm or LayerNorm do what BatchNorm does, sample by sample",
            )
        try:
            self._module = GradSampleModule(module, loss_reduction="sum")
        except NotImplementedError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"privacy: the model cannot be trained by DP-SGD: {reason}") from None
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._plan, self._index, self._samples = plan, index, samples
        self._sampling = Sampling.of(plan, samples)
        self._uniform: Uniform = system_uniform

    def begin(self, t: int, budget: Budget) -> bool:
        """Begin round t and return whether the budget allows it; then it is booked."""
        if self._plan.privacy.repeatable:
            self._uniform = _repeatable_uniform(self._plan.seed, self._index, t)
        return budget.spend(*self._sampling)

    def batches(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the samples of each step: any number of them, none too."""
        for _ in range(self._sampling.steps):
            yield np.flatnonzero(self._uniform(self._samples) < self._sampling.rate)

    def gradient(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the noisy mean gradient [trainable] of the samples x [m, *shape] and labels y [m].

        (sum_i g_i min(1, C / ||g_i||) + sigma C N(0, I)) / (q N): what it is divided by is the mean
        size of a batch, since its own would tell of the data.
        """
        privacy = self._plan.privacy
        assert privacy.noise is not None
        total = self._clipped_sum(x, y)
        noise = standard_normal(self._uniform, len(total)).to(total.device)
        total.add_(noise, alpha=privacy.noise * privacy.clip)
        return total.div_(self._sampling.rate * self._samples)

    def _clipped_sum(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not len(y):
            size = sum(p.numel() for p in self._trained)
            return torch.zeros(size, device=x.device)
        self._module.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(self._module(x), y, reduction="sum").backward()  # type: ignore[no-untyped-call]
        parts = [p.grad_sample.flatten(1) for p in self._trained]  # type: ignore[attr-defined]
        self._module.zero_grad(set_to_none=True)
        norms = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(part, dim=1) for part in parts]), dim=0
        )
        kept = (self._plan.privacy.clip / norms.clamp(min=1e-12)).clamp(max=1.0)
        return torch.cat([kept @ part for part in parts])


def system_uniform(size: int) -> npt.NDArray[np.float64]:
    """Draw from the operating system's cryptographic generator."""
    bits = np.frombuffer(os.urandom(8 * size), dtype=np.uint64) >> np.uint64(64 - _BITS)
    return _between_0_and_1(bits)


def _repeatable_uniform(seed: int, index: int, t: int) -> Uniform:
    rng = generator(seed, Purpose.PRIVACY, index=index, t=t)
    return lambda size: _between_0_and_1(rng.integers(1 << _BITS, size=size, dtype=np.uint64))


def _between_0_and_1(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    return (bits.astype(np.float64) + 0.5) * 2.0**-_BITS


def standard_normal(uniform: Uniform, size: int) -> torch.Tensor:
    """Return so many independent standard normal numbers, float32 [size], by inversion."""
    from scipy.special import ndtri

    return torch.from_numpy(ndtri(uniform(size)).astype(np.float32))
