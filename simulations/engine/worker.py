"""One worker of an engine: a share of the peers, and of the columns of their models.

`Worker` does the work wherever it is, in this process or in one of its own; `main` is such a
process. It reads commands from a pipe that its parent holds, and ends when the pipe does.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from peer.errors import UserError
from peer.learning import estimator_learner
from peer.learning.learner import Learner, Manifest, Scores, Vector
from peer.learning.models import build_model
from peer.learning.names import ESTIMATORS
from peer.learning.partition import blank_inputs
from peer.learning.schedule import held_out, loss_sample
from peer.learning.sources import is_text
from peer.learning.torch_learner import TorchLearner, find_device
from peer.matching.sketch import CountSketch
from peer.plan import Plan
from simulations.engine import trainer
from simulations.engine.layers import NotStackableError, Stack, compose
from simulations.engine.shares import Arena, Array, Field, peer_data, rows_of
from simulations.engine.trainer import balanced

Rows = npt.NDArray[np.int64]

_MIXED = 1 << 19
"""Values of a column block of all models: they stay in a core's cache while they are mixed."""

_COMPARED = 4096
"""Columns of a block of a Gram matrix."""

_IN_CACHE = 16_000_000
"""Bytes that a chunk may touch in a step: activations once, weights and velocities six times.

Measured: with more, the products wait for memory; with much less, Python's share grows.
"""

_SQUARE = {"cpu": 1024, "cuda": 8192}
"""Rows of the matrices of `peak`: on a GPU smaller ones would measure the way there and back."""

LARGEST = {"float16": 65504.0, "bfloat16": float(torch.finfo(torch.bfloat16).max)}


@dataclass(frozen=True)
class Job:
    """What every worker of an engine is told once."""

    plan: Plan
    shape: tuple[int, ...]
    classes: int
    scale: float
    model: str | None
    stacked: bool
    mixed: bool
    """Whether stacks compute in mixed precision."""
    manifest: Manifest
    device: str
    layout: dict[str, Field]
    peers: tuple[int, int]
    """First and last-but-one of the peers that this worker trains and evaluates."""
    columns: tuple[int, int]
    """The same of the columns that it mixes and compares."""


class Pairs(NamedTuple):
    """Pairs (i, j): peer i wants to know how much peer j resembles it; each [number of pairs]."""

    i: Rows
    j: Rows


class Mixture(NamedTuple):
    """w_i = sum_j weight_ij w_j, the weights by rows (CSR); `own` [n] is their diagonal."""

    starts: Rows
    columns: Rows
    weights: Vector
    own: Vector


class Worker:
    """Trains, compares, mixes and evaluates its share; every command reads and writes the arena.

    On the CPU the matrices are the arena's own memory; on another device they live there, and the
    parent reads them through `fetch`.
    """

    def __init__(self, job: Job, arena: Arena) -> None:
        self._job = job
        self._plan = job.plan
        self._arena = arena
        self._device = find_device(job.device)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._models, self._trained, self._initial = (
            self._matrix(name) for name in ("models", "trained", "initial")
        )
        self._rows: list[Rows] = rows_of(arena.arrays, "train")
        self._test_rows: list[Rows] = rows_of(arena.arrays, "test")
        trainable = job.manifest.trainable
        self._sketch: CountSketch | None = None
        if "sketches" in arena.arrays:
            self._sketch = CountSketch(trainable, arena["sketches"].shape[2], job.plan.seed)
        self._learners: dict[int, Learner] = {}
        self._held: dict[int, int] = {}

    def hold(self, i: int, place: int) -> None:
        """From now on peer i has what holding `place` says, one after the n-th."""
        self._held[i] = place
        self._rows[i], self._test_rows[i] = self._rows[place], self._test_rows[place]
        self._learners.pop(i, None)
        self.__dict__.pop("_tested_alike", None)

    # Training

    def train(self, t: int, peers: Sequence[int] | None = None) -> None:
        """w_i^{t-1/2} from w_i^{t-1}, and its norm, of the worker's peers (those of `peers`)."""
        start, stop = self._job.peers
        own = self._own(peers)
        if not self._job.stacked:
            for i in own:
                self._put("trained", i, self._learner(i).fit(self.fetch("models", i), t))
        elif len(own) == stop - start:
            trained = self._trained[start:stop]
            trained.copy_(self._models[start:stop])
            self._stack_trainer.fit(trained, own, self._rows[start:stop], t)
        elif own:
            trained = self._models[own]  # a copy
            self._stack_trainer.fit(trained, own, [self._rows[i] for i in own], t)
            self._trained[own] = trained
        for i in own:
            self._arena["norms"][i] = self._norm(i)

    def _own(self, peers: Sequence[int] | None) -> Sequence[int]:
        """Return which of `peers` (all if not given) are this worker's, in order."""
        start, stop = self._job.peers
        if peers is None:
            return range(start, stop)
        return [i for i in sorted(peers) if start <= i < stop]

    def sketch(self, peers: Sequence[int] | None = None) -> None:
        """CountSketches of g_i and h_i of the worker's peers, or of those of `peers`."""
        assert self._sketch is not None
        initial, trainable = self._arena["initial"][0], self._job.manifest.trainable
        for i in self._own(peers):
            w, before = self.fetch("trained", i), self.fetch("models", i)
            for place, origin in enumerate((before, initial)):
                update = (w - origin)[:trainable]
                self._arena["sketches"][i, place] = self._sketch.apply(update)

    def _norm(self, i: int) -> float:
        return float(torch.linalg.vector_norm(self._wire(self._trained[i]), dtype=torch.float64))

    @cached_property
    def _stack(self) -> Stack:
        job = self._job
        return compose(self._module(), job.manifest, job.shape, mixed=job.mixed)

    @cached_property
    def _tables(self) -> dict[str, trainer.Table]:
        """The tables `train` and `test`."""
        return {
            name: trainer.Table(
                self._tensor(self._arena[f"{name}_x"]),
                self._tensor(self._arena[f"{name}_y"]),
                self._job.scale,
            )
            for name in ("train", "test")
        }

    @cached_property
    def _stack_trainer(self) -> trainer.StackTrainer:
        return trainer.StackTrainer(
            self._stack,
            self._tables["train"],
            self._plan,
            self._job.manifest.trainable,
            chunk=self._chunk(),
        )

    def _chunk(self) -> int:
        """Return how many clients work side by side.

        Small models are bound by the number of operations and gain from more clients in each; for
        large activations the chunk must stay in the cache. On a GPU, more is better.
        """
        inputs = torch.zeros(1, *self._job.shape)
        bytes_per_sample = 4 * _activations(self._module(), inputs)
        used = self._plan.training.batch * bytes_per_sample + 24 * self._job.manifest.size
        budget = _IN_CACHE if self._device.type == "cpu" else 1 << 32
        most = 20 if self._device.type == "cpu" else 1 << 10
        return int(max(1, min(most, budget // used)))

    # Comparing

    def losses(self, t: int, pairs: Pairs, held: bool) -> list[float]:
        """Return F_i(w_j) of the pairs, on round t's draw of peer i's training samples.

        `held`: on those that it holds out instead. Pairs of one j are best given to one
        worker, one after another: they share its products.
        """
        if not self._job.stacked:
            return [
                self._device_losses(i, [self._received(j)], t, held)[0]
                for i, j in zip(pairs.i.tolist(), pairs.j.tolist(), strict=True)
            ]
        found: list[float] = []
        cuts = np.flatnonzero(np.diff(pairs.j)) + 1
        for asking, j in zip(np.split(pairs.i, cuts), np.split(pairs.j, cuts), strict=True):
            if len(j):
                samples = [self._loss_rows(i, t, held) for i in asking.tolist()]
                model = self._wire(self._trained[int(j[0])])
                found += trainer.mean_losses(self._stack, model, self._tables["train"], samples)
        return found

    def _loss_rows(self, i: int, t: int, held: bool) -> Rows:
        own = self._rows[i]
        if held:
            return own[held_out(self._plan, i, len(own))]
        return own[loss_sample(self._plan, i, t, len(own))]

    def cosines(self, pairs: Pairs) -> npt.NDArray[np.float64]:
        """Return, of the worker's columns, what exact cosines of the pairs are made of.

        [2 (of g, of h), 3, pairs]: own_i . arrived_j, own_i . own_i, arrived_j . arrived_j, where
        what arrives has the wire's precision. All pairs come from Gram matrices of column blocks,
        which at the usual l costs less than gathering the vectors of the pairs.
        """
        n, start, stop = self._plan.n, *self._job.columns
        stop = min(stop, self._job.manifest.trainable)
        dots = torch.zeros(2, n, n, dtype=torch.float64)
        squares = torch.zeros(2, 2, n, dtype=torch.float64)
        for first in range(start, stop, _COMPARED):
            block = slice(first, min(first + _COMPARED, stop))
            w, before, initial = (
                matrix[:, block] for matrix in (self._trained, self._models, self._initial)
            )
            own = (w - before, w - initial)
            arrived = (self._wire(own[0]), self._wire(w) - initial)
            for place in range(2):
                dots[place] += (own[place] @ arrived[place].T).cpu()
                for side, vectors in enumerate((own[place], arrived[place])):
                    squares[place, side] += vectors.double().square().sum(dim=1).cpu()
        i, j = (torch.from_numpy(side) for side in pairs)
        return torch.stack([dots[:, i, j], squares[:, 0, i], squares[:, 1, j]], dim=1).numpy()

    def squared_distances(self, pairs: Pairs) -> npt.NDArray[np.float64]:
        """Return, of the worker's columns, what ||w_j - w_i||^2 of the pairs is made of: [pairs],
        w_j as it arrives. Pairs (i, i) are of w_i^{t-1/2} and w_i^{t-1}: one's own update."""
        start, stop = self._job.columns
        found = torch.zeros(len(pairs.i), dtype=torch.float64)
        for place, (i, j) in enumerate(zip(pairs.i.tolist(), pairs.j.tolist(), strict=True)):
            own = self._trained[i, start:stop].double()
            other = (
                self._models[i, start:stop] if i == j else self._wire(self._trained[j, start:stop])
            )
            found[place] = (other.double() - own).square().sum()
        return found.numpy()

    # Mixing

    def mix(self, mixture: Mixture) -> None:
        """w_i^t of all peers, in the worker's columns: own models as they are, others' by wire."""
        n, (start, stop) = self._plan.n, self._job.columns
        if self._plan.training.statistics == "local":
            kept = slice(max(start, self._job.manifest.trainable), stop)
            self._models[:, kept] = self._trained[:, kept]
            stop = min(stop, self._job.manifest.trainable)
        starts, columns, weights = (self._tensor(part) for part in mixture[:3])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support")  # "in beta"
            matrix = torch.sparse_csr_tensor(
                starts, columns, weights, (n, n), check_invariants=True
            )
        own = self._tensor(mixture.own)[:, None]
        exact = self._plan.network.precision == "float32"
        width = max(64, _MIXED // n)
        for first in range(start, stop, width):
            block = slice(first, min(first + width, stop))
            w = self._trained[:, block]
            if exact:
                self._models[:, block] = matrix @ w
            else:
                wire = self._wire(w)
                self._models[:, block] = (matrix @ wire).addcmul_(own, w - wire)

    # Evaluating

    def evaluate(self, peers: Sequence[int] | None = None) -> None:
        """Accuracy and mean loss of w_i^t of the worker's peers (those of `peers` only), on their
        own test sets."""
        own = self._own(peers)
        if not self._job.stacked:
            for i in own:
                self._arena["scores"][i] = self._learner(i).evaluate(self.fetch("models", i))
            return
        table = self._tables["test"]
        asked = set(own)
        for members in self._tested_alike:
            chosen = [i for i in members if i in asked]
            for chunk in balanced(chosen, self._stack_trainer.chunk):
                rows = self._test_rows[chunk[0]]
                scores = trainer.evaluate(self._stack, self._models[chunk], table, rows)
                self._arena["scores"][chunk] = scores

    @cached_property
    def _tested_alike(self) -> list[list[int]]:
        """The worker's peers, those of one test set together: they share its inputs."""
        groups: dict[bytes, list[int]] = {}
        for i in range(*self._job.peers):
            groups.setdefault(self._test_rows[i].tobytes(), []).append(i)
        return list(groups.values())

    # One peer at a time, by the device's own path

    def losses_of(self, i: int, count: int, t: int, held: bool) -> list[float]:
        """Return F_i of the first `count` models of the arena's `asked`, as `losses` does."""
        models = self._arena["asked"][:count]
        if not self._job.stacked:
            return self._device_losses(i, [*models], t, held)
        rows, table = [self._loss_rows(i, t, held)], self._tables["train"]
        tensors = map(self._tensor, models)
        return [trainer.mean_losses(self._stack, w, table, rows)[0] for w in tensors]

    def _device_losses(self, i: int, models: list[Vector], t: int, held: bool) -> list[float]:
        own = self._learner(i)
        return own.held_losses(models) if held else own.train_losses(models, t)

    def scores_of(self, i: int, model: Vector) -> Scores:
        """Return what the learner of peer i answers."""
        return self._learner(i).evaluate(model)

    def _learner(self, i: int) -> Learner:
        """Return the learner of peer i, which stays, for it may keep state of its own."""
        if i not in self._learners:
            job = self._job
            place = self._held.get(i, i)
            data = peer_data(self._arena.arrays, place, scale=job.scale, classes=job.classes)
            if self._plan.model in ESTIMATORS:
                learner: Learner = estimator_learner.EstimatorLearner(
                    self._plan.model, data, self._plan, i
                )
            else:
                learner = TorchLearner(self._module(), data, self._plan, i, device=job.device)
            self._learners[i] = learner
        return self._learners[i]

    def _module(self) -> nn.Module:
        job = self._job
        plan = self._plan
        module = build_model(plan.model, job.shape, job.classes, plan.seed, factory=job.model)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            blank = blank_inputs(2, job.shape, text=is_text(self._arena["train_x"]))
            module.eval()(torch.from_numpy(blank))  # creates what lazy layers lack
        return module

    # The rest

    def peak(self) -> float:
        """Return the operations a second of the best of a few square matrix products, in the
        precision of the job."""
        size, best = _SQUARE[self._device.type], math.inf
        dtype = torch.bfloat16 if self._job.mixed else torch.float32
        a = torch.ones(size, size, dtype=dtype, device=self._device)
        for _ in range(8):
            start = time.perf_counter()
            (a @ a)[0, 0].item()
            best = min(best, time.perf_counter() - start)
        return 2 * size**3 / best

    def cpu_seconds(self) -> float:
        """Return how long this process has been computing, waits for a core left out."""
        return time.process_time()

    def synchronize(self) -> None:
        """Wait until the device has done what it was asked for."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def gpu_memory(self) -> float:
        """Return the most MiB of tensors that a GPU has held for this worker; 0 on the CPU."""
        if self._device.type != "cuda":
            return 0.0
        return torch.cuda.max_memory_allocated(self._device) / 2**20

    def set_models(self, models: Array) -> None:
        """Start from other models [n, e] than w_0."""
        self._models.copy_(torch.from_numpy(models))

    def fetch(self, name: str, rows: int | slice) -> Array:
        """Return those rows of `models` or `trained` [n, e] as they are on the device."""
        matrix = self._models if name == "models" else self._trained
        return matrix[rows].cpu().numpy()

    def _matrix(self, name: str) -> Tensor:
        return self._tensor(self._arena[name])

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _put(self, name: str, i: int, vector: Vector) -> None:
        assert name == "trained"
        self._trained[i] = torch.from_numpy(vector)

    def _received(self, j: int) -> Vector:
        return self._wire(self._trained[j]).cpu().numpy()

    def _wire(self, values: Tensor) -> Tensor:
        """Return values as they arrive: in the wire's precision, and no larger than it holds."""
        precision = self._plan.network.precision
        if precision == "float32":
            return values
        largest = LARGEST[precision]
        return values.clamp(-largest, largest).to(getattr(torch, precision)).float()


def _activations(module: nn.Module, inputs: Tensor) -> int:
    """Return how many values all layers put out for `inputs`."""
    counted = [inputs.numel()]
    hooks = [
        part.register_forward_hook(lambda _m, _i, output: counted.append(output.numel()))
        for part in module.modules()
        if not list(part.children())
    ]
    with torch.no_grad():
        module.eval()(inputs)
    for hook in hooks:
        hook.remove()
    return sum(counted)


def stackable(
    module: nn.Module, manifest: Manifest, shape: tuple[int, ...], *, mixed: bool
) -> Stack | None:
    """Return the module's stack; None, and one line of the log, when it takes the other path.

    Raises UserError when that path is not for it: it has no mixed precision.
    """
    try:
        return compose(module, manifest, shape, mixed=mixed)
    except NotStackableError as reason:
        if mixed:
            raise UserError(
                f"the model cannot be trained in bfloat16: {reason}", "leave out --precision"
            ) from None
        _tell(f"the model is trained one peer at a time, which is slower: {reason}")
        return None


@cache
def _tell(message: str) -> None:
    """Log a warning once, for however many engines of a study it is true."""
    logging.getLogger(__name__).warning(message)


def main() -> None:
    """Serve the parent whose pipe and memory were inherited as the descriptors of argv."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it ends the pipe
    torch.set_num_threads(1)
    connection, memory = Connection(int(sys.argv[1])), int(sys.argv[2])
    try:
        job: Job = connection.recv()
        worker = Worker(job, Arena(job.layout, memory))
        connection.send(("result", None))  # ready
        while True:
            name, arguments = connection.recv()
            connection.send(_answer(worker, name, arguments))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the parent is gone, and with it whatever there was to clean up


def _answer(worker: Worker, name: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "result", getattr(worker, name)(*arguments)
    except UserError as error:
        return "mistake", (error.message, error.hint)
    except Exception:  # whatever it is, the parent is told, and ends
        return "failure", traceback.format_exc()


if __name__ == "__main__":
    main()
