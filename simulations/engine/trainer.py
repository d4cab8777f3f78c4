"""Local training, evaluation and losses of many models, by the definition of the live peer.

Orders, batches and learning rates come from `peer.learning.schedule`, as on a device. Clients of a
chunk take their steps side by side: those with the most steps first, so that the clients which
still have a batch are always the first few rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from peer.learning.schedule import batches, epoch_orders, learning_rate
from peer.plan import Plan
from peer.randomness import Purpose, integer_seed
from simulations.engine.layers import (
    Context,
    Stack,
    image_batch,
    loss_gradient,
    losses,
)

Indices = npt.NDArray[np.int64]

PART = 200
"""Samples a forward pass when nothing is trained: bounds the memory of activations."""


@dataclass(frozen=True)
class Table:
    """Samples that peers draw on: inputs as stored [m, *shape], labels [m], and the inputs' scale.

    For a stack of images the rows are [H, W, C]: channels last, as the layers want them.
    """

    x: Tensor
    y: Tensor
    scale: float

    def inputs(self, rows: Tensor, stack: Stack) -> Tensor:
        """Return scaled inputs of rows [c, b], as `stack` takes them.

        Rows that are alike for all clients (expanded, of stride 0) are read and scaled once.
        """
        c, read = len(rows), rows if rows.stride(0) else rows[:1]
        x = self.x.index_select(0, read.flatten()).view(*read.shape, *self.x.shape[1:])
        if not stack.images:
            return self._scaled(x.flatten(2).to(stack.dtype)).expand(c, -1, -1)
        x = x.permute(0, 1, 4, 2, 3).expand(c, -1, -1, -1, -1)
        return self._scaled(image_batch(x, stack.dtype))

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1 else x.mul_(self.scale)


class StackTrainer:
    """Trains clients of one stack on the rows of a table, at most `chunk` of them side by side."""

    def __init__(
        self, stack: Stack, table: Table, plan: Plan, trainable: int, *, chunk: int
    ) -> None:
        self.chunk = chunk
        self._stack = stack
        self._table = table
        self._plan = plan
        self._trainable = trainable

    def fit(self, models: Tensor, peers: Sequence[int], rows: Sequence[Indices], t: int) -> None:
        """Train `models` [c, e] of `peers` in place: E local epochs of round t on their `rows`."""
        schedules = [self._schedule(peer, own, t) for peer, own in zip(peers, rows, strict=True)]
        for places in self._chunks(schedules):
            chunk = [schedules[place] for place in places]
            seeds = [
                integer_seed(self._plan.seed, Purpose.DROPOUT, index=peers[place], t=t)
                for place in places
            ]
            start = places[0]
            if places == list(range(start, start + len(places))):
                self._train(models[start : start + len(places)], chunk, seeds, t)
            else:
                index = torch.tensor(places, device=models.device)
                copies = models[index]
                self._train(copies, chunk, seeds, t)
                models[index] = copies

    def _schedule(self, peer: int, rows: Indices, t: int) -> list[Indices]:
        """Return the table's rows of every batch of a peer's round."""
        fewest = 2 if self._stack.alike_sizes else 1
        return [
            rows[batch]
            for order in epoch_orders(self._plan, peer, t, len(rows))
            for batch in batches(order, self._plan.training.batch, fewest=fewest)
        ]

    def _chunks(self, schedules: Sequence[Sequence[Indices]]) -> Iterator[list[int]]:
        """Yield the places of the clients that work side by side, those of most steps first.

        Clients of one schedule stay in order.
        """
        sizes = [tuple(map(len, schedule)) for schedule in schedules]
        order = sorted(range(len(sizes)), key=lambda i: (-len(sizes[i]), sizes[i]))
        groups = [order]
        if self._stack.alike_sizes:
            cuts = [i for i in range(1, len(order)) if sizes[order[i]] != sizes[order[i - 1]]]
            groups = [part.tolist() for part in np.split(np.array(order, dtype=np.int64), cuts)]
        for group in groups:
            yield from balanced(group, self.chunk)

    def _train(
        self, models: Tensor, schedules: Sequence[Sequence[Indices]], seeds: list[int], t: int
    ) -> None:
        """Run the clients' schedules, the longest first.

        As on a device (`TorchLearner.fit`), momentum starts at zero every round.
        """
        training, device = self._plan.training, models.device
        lr = learning_rate(self._plan, t)
        steps = np.array([len(schedule) for schedule in schedules])
        velocity = torch.empty(len(models), self._trainable, device=device)
        generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        bound = 0
        for step in range(steps[0]):
            active = int((steps > step).sum())
            if active != bound:
                rows, speed = models[:active], velocity[:active]
                self._stack.bind(rows, speed)
                trained, bound = rows[:, : self._trainable], active
            places, sizes = _padded([schedule[step] for schedule in schedules[:active]])
            batch = torch.from_numpy(places).to(device)
            context = Context(sizes, generators[:active])
            logits = self._stack.forward(self._table.inputs(batch, self._stack), context)
            labels = self._table.y[batch]
            weights = _weights(sizes, places.shape[1], device)
            self._stack.backward(
                loss_gradient(logits, labels, weights), training.momentum if step else 0.0
            )
            if training.weight_decay:
                speed.add_(trained, alpha=training.weight_decay)
            trained.add_(speed, alpha=-lr)


def balanced(members: Sequence[int], chunk: int) -> Iterator[list[int]]:
    """Yield `members` in parts of at most `chunk`, as equal as can be.

    A single client left over would take other kernels, and other roundings.
    """
    count = -(-len(members) // chunk)
    for place in range(count):
        yield list(members[place * len(members) // count : (place + 1) * len(members) // count])


def evaluate(
    stack: Stack, models: Tensor, table: Table, rows: Indices
) -> list[tuple[float, float]]:
    """Return (accuracy, mean loss) of each of `models` [c, e] on the same rows [m] of the table."""
    c = len(models)
    stack.bind(models)
    right, total = (torch.zeros(c, device=models.device) for _ in range(2))
    for part in torch.split(torch.from_numpy(rows).to(table.y.device), PART):
        labels = table.y[part].expand(c, -1)
        logits = stack.forward(table.inputs(part.expand(c, -1), stack))
        right += (logits.argmax(dim=2) == labels).sum(dim=1)
        total += losses(logits, labels).sum(dim=1)
    return list(zip((right / len(rows)).tolist(), (total / len(rows)).tolist(), strict=True))


def mean_losses(
    stack: Stack, model: Tensor, table: Table, samples: Sequence[Indices]
) -> list[float]:
    """Return the mean loss of one `model` [e] on each peer's `samples`, rows of the table.

    The peers that received the same model share its products: its weights are read once.
    """
    stack.bind(model[None])
    rows = torch.from_numpy(np.concatenate(samples)).to(table.y.device)
    found = []
    for part in torch.split(rows, PART):
        logits = stack.forward(table.inputs(part[None], stack))
        found.append(losses(logits[0], table.y[part]))
    return [float(part.mean()) for part in torch.split(torch.cat(found), [len(s) for s in samples])]


def _padded(rows: Sequence[Indices]) -> tuple[Indices, list[int]]:
    """Return the clients' batches as one array [c, longest], and their sizes."""
    sizes = [len(row) for row in rows]
    if min(sizes) == max(sizes):
        return np.stack(rows), sizes
    padded = np.zeros((len(rows), max(sizes)), dtype=np.int64)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return padded, sizes


def _weights(sizes: Sequence[int], longest: int, device: torch.device) -> Tensor | float:
    """Return what makes each client's sum of losses its mean: 1 / size, and 0 for padding."""
    if min(sizes) == longest:
        return 1 / longest
    size = torch.tensor(sizes, device=device)[:, None, None]
    real = torch.arange(longest, device=device)[None, :, None] < size
    return real / size
