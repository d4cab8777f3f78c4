"""The one definition of local training's order: learning rate, batches, and the samples of a loss.

Everything that trains (one model at a time on a device, many at once in a laboratory) takes its
numbers from here, so that the results agree.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from peer.plan import Plan
from peer.randomness import Purpose, generator

Indices = npt.NDArray[np.int64]


def learning_rate(plan: Plan, t: int) -> float:
    """Return the learning rate of round t (1-based): lr * lr_decay^(t-1)."""
    return plan.training.lr * plan.training.lr_decay ** (t - 1)


def epoch_orders(plan: Plan, index: int, t: int, samples: int) -> Iterator[Indices]:
    """Yield the order of each of the E local epochs of peer `index` in round t.

    All of its training samples [samples], without those that it holds out.
    """
    rng = generator(plan.seed, Purpose.BATCHES, index=index, t=t)
    trained = np.ones(samples, dtype=np.bool_)
    trained[held_out(plan, index, samples)] = False
    for _ in range(plan.training.epochs):
        order = rng.permutation(samples)
        yield order[trained[order]]


def held_out(plan: Plan, index: int, samples: int) -> Indices:
    """Return which of its training samples peer `index` never trains on: those for the gate.

    [choice] The same in all rounds. With others in every round no sample is lost to training; but a
    peer that refuses everybody a few times then knows the samples by heart that it comes to judge
    by, and refuses everybody for ever. Held out for good, they tell it when it falls behind.
    """
    count = plan.held_out(samples)
    rng = generator(plan.seed, Purpose.HELD_OUT, index=index)
    return rng.choice(samples, size=count, replace=False) if count else np.empty(0, dtype=np.int64)


def batches(order: Indices, size: int, *, fewest: int = 1) -> list[Indices]:
    """Cut an epoch's order [m] into batches of `size`.

    [choice] The last batch, however small, is used too, except that fewer than `fewest` samples
    join the batch before it (BatchNorm cannot train on one).
    """
    cuts = list(range(size, len(order), size))
    if cuts and len(order) - cuts[-1] < fewest:
        cuts.pop()
    return np.split(order, cuts)


def loss_sample(plan: Plan, index: int, t: int, samples: int) -> Indices:
    """Return which of its training samples peer `index` computes losses on in round t.

    min(loss_samples, samples) of them, drawn without replacement.
    """
    rng = generator(plan.seed, Purpose.LOSS_SAMPLES, index=index, t=t)
    return rng.choice(samples, size=min(plan.matching.loss_samples, samples), replace=False)
