"""The engine: all models of a plan, and one single-thread process a core that works on them.

Peers are dealt to the workers in contiguous ranges of about equal data; comparing and mixing are
dealt by columns, so that every value is read once. Nothing outlives an engine: its memory has no
name (`shares`), and its workers end with the pipe to their parent.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import psutil

from peer.errors import FederationError, UserError
from peer.learning import estimator_learner
from peer.learning.build import check_inputs
from peer.learning.learner import Manifest, Scores, Vector
from peer.learning.models import build_model
from peer.learning.names import ESTIMATORS
from peer.learning.partition import deal
from peer.learning.sources import Dataset, load_dataset
from peer.learning.torch_learner import TorchLearner
from peer.plan import Plan
from simulations.engine.layers import Stack
from simulations.engine.shares import Arena, Array, Holding, Shares, lay_out
from simulations.engine.worker import Job, Mixture, Pairs, Worker, stackable

_ENVIRONMENT = {
    # Threads of several processes that share the cores slow each other down tenfold.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # Buffers of training go back to the heap, not to the system, and need no new pages next time.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 31),
}

_ASKED = 8
"""Models that are handed over at once to have their losses taken: through a pipe, copying them
there and back took longer than the losses."""


class Engine:
    """Trains, compares, mixes and evaluates all peers of a plan.

    `models` are w_i^t and `trained` are w_i^{t-1/2}, each [n, e]; `sketches` [n, 2, buckets] are
    those of g_i and h_i; `norms` [n] are the Euclidean norms of the trained models as they arrive;
    `samples` [n] are the peers' numbers of training samples, `workers` that of processes.
    Close it, or use it in a `with`.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        data: str | None = None,
        model: str | None = None,
        workers: int | None = None,
        exact: bool = False,
        device: str = "cpu",
        precision: str = "float32",
        holdings: Sequence[Holding] | None = None,
    ) -> None:
        """Load and deal the data, and start the workers.

        `data` and `model` are a spec and an import path instead of the plan's. `workers`: how many
        processes; one a core if not given; 0 for this process, which a GPU needs. `exact`: train
        one peer at a time as a device does, bit by bit. `precision` is that of the products'
        operands where models are stacked, float32 or bfloat16. `holdings` say what each peer
        holds, and what else some may `hold` later. Raises UserError.
        """
        self.plan = plan
        dataset = load_dataset(data or plan.data, seed=plan.seed, classes=plan.classes)
        shares = Shares.deal(dataset, plan, holdings)
        mixed = precision == "bfloat16"
        if mixed and plan.privacy.acts:
            raise UserError("gradients by sample are in float32 only", "leave out --precision")
        self.manifest, initial, stack = _describe(plan, dataset, model, device, mixed=mixed)
        # Gradients by sample are the device's own affair.
        self.stacked = stack is not None and not exact and not plan.privacy.acts
        channels_last = self.stacked and stack is not None and stack.images
        n, e, trainable = plan.n, self.manifest.size, self.manifest.trainable
        fields = shares.fields(channels_last=channels_last) | {
            "models": ((n, e), "<f4"),
            "trained": ((n, e), "<f4"),
            "initial": ((1, e), "<f4"),
            "asked": ((_ASKED, e), "<f4"),
            "sketches": ((n, 2, plan.sketch_buckets(trainable)), "<f4"),
            "norms": ((n,), "<f8"),
            "scores": ((n, 2), "<f8"),
        }
        self._arena = Arena(lay_out(fields))
        shares.fill(self._arena.arrays, channels_last=channels_last)
        self._arena["initial"][0] = initial
        self.samples: list[int] = self._arena["train_counts"][:n].tolist()
        self.sketches, self.norms = self._arena["sketches"], self._arena["norms"]

        if workers is None:
            workers = min(len(os.sched_getaffinity(0)), n) if device == "cpu" else 0
        if workers and device != "cpu":
            raise UserError(f"a {device} is worked by one process", "use 0 workers with it")
        self.workers = workers
        count = max(1, workers)
        peers = _ranges(np.array(self.samples), count)
        columns = _ranges(np.ones(e), count)
        jobs = [
            Job(
                plan, dataset.shape, dataset.classes, dataset.scale, model, self.stacked, mixed,
                self.manifest, device, self._arena.layout, own, part,
            )
            for own, part in zip(peers, columns, strict=True)
        ]  # fmt: skip
        self._owner = np.repeat(np.arange(count), [stop - start for start, stop in peers])
        self._crew: _Crew = (
            _Here(jobs[0], self._arena) if not workers else _Processes(jobs, self._arena.descriptor)
        )
        self._on_device = device != "cpu"
        self.reset()

    @property
    def initial(self) -> Vector:
        """w_0 [e]."""
        initial: Vector = self._arena["initial"][0]
        return initial

    @property
    def models(self) -> Array:
        """w_i^t [n, e]: on the CPU the memory itself, from elsewhere a copy."""
        return self._fetch("models")

    @property
    def trained(self) -> Array:
        """w_i^{t-1/2} [n, e]: on the CPU the memory itself, from elsewhere a copy."""
        return self._fetch("trained")

    def trained_by(self, i: int) -> Vector:
        """Return a copy of w_i^{t-1/2} [e] of one peer."""
        trained: Vector = self._fetch("trained", i).copy()
        return trained

    def reset(self, models: Sequence[Vector] | Array | None = None) -> None:
        """Start from w_0 at every peer, or from `models`, one [e] for each."""
        start = [self.initial] * self.plan.n if models is None else models
        if self._on_device:
            self._crew.ask("set_models", [(np.stack(list(start)),)])
            return
        # One by one: the same few vectors may serve all peers, and need no second matrix.
        for row, model in zip(self._arena["models"], start, strict=True):
            row[:] = model

    def hold(self, i: int, place: int) -> None:
        """From now on peer i has what holding `place` (one after the n-th) says."""
        self.samples[i] = int(self._arena["train_counts"][place])
        self._crew.everyone("hold", i, place)

    def train(self, t: int, peers: Sequence[int] | None = None) -> None:
        """Local training of round t at every peer, or at `peers` alone."""
        self._crew.everyone("train", t, peers)

    def sketch(self, peers: Sequence[int] | None = None) -> None:
        """Sketch every g_i and h_i of the last training, or those of `peers` alone."""
        self._crew.everyone("sketch", peers)

    def losses(
        self, t: int, pairs: Sequence[tuple[int, int]], *, held: bool = False
    ) -> list[float]:
        """Return F_i(w_j^{t-1/2}) of every pair (i, j), w_j as it arrives.

        On round t's draw of peer i's training samples; `held`: on those that it holds out.
        """
        if not pairs:
            return []
        i, j = np.array(pairs, dtype=np.int64).T
        # Pairs of one model go to one worker, which reads its weights once; without stacks they go
        # to the worker that has the learner of i.
        order = np.lexsort((i, j)) if self.stacked else np.argsort(i, kind="stable")
        if self.stacked:
            first = np.flatnonzero(np.diff(j[order], prepend=-1))
            cuts = [0, *first[1:], len(order)]
            ideal = np.linspace(0, len(order), self._crew.count + 1)[1:-1]
            ends = [cuts[int(np.abs(np.array(cuts) - place).argmin())] for place in ideal]
            parts = np.split(order, ends)
        else:
            parts = [order[self._owner[i[order]] == w] for w in range(self._crew.count)]
        answers = self._crew.ask("losses", [(t, Pairs(i[part], j[part]), held) for part in parts])
        found = np.empty(len(pairs))
        for part, values in zip(parts, answers, strict=True):
            found[part] = values
        result: list[float] = found.tolist()
        return result

    def cosines(self, pairs: Sequence[tuple[int, int]]) -> npt.NDArray[np.float64]:
        """Return [2 (g, h), 3, pairs]: own_i . arrived_j, and the two squared norms."""
        i, j = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        parts: npt.NDArray[np.float64] = sum(self._crew.everyone("cosines", Pairs(i, j)))
        return parts

    def distances(self, pairs: Sequence[tuple[int, int]]) -> list[float]:
        """Return ||w_j - w_i|| of every pair (i, j), w_j as it arrives; of a pair (i, i) the norm
        of its update, ||w_i^{t-1/2} - w_i^{t-1}||."""
        i, j = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        squares = sum(self._crew.everyone("squared_distances", Pairs(i, j)))
        lengths: list[float] = np.sqrt(squares).tolist()
        return lengths

    def mix(
        self,
        neighbours: Sequence[Sequence[int]],
        weights: Sequence[float],
        clips: Sequence[Mapping[int, float]] | None = None,
    ) -> None:
        """w_i^t = the mean of w_i^{t-1/2} and its neighbours', weighted by `weights` [n].

        `clips`: by i and j, to what share (1 if not given) w_j's difference from w_i is shortened.
        """
        shares = np.array(weights, dtype=np.float64)
        starts, columns, values, own = [0], [], [], []
        for i, others in enumerate(neighbours):
            members = sorted((i, *others))
            parts = shares[members] / shares[members].sum()
            if clips is not None:
                parts *= [clips[i].get(j, 1.0) for j in members]
                parts[members.index(i)] += 1 - parts.sum()
            columns += members
            values += parts.tolist()
            own.append(float(parts[members.index(i)]))
            starts.append(len(columns))
        mixture = Mixture(
            np.array(starts, dtype=np.int64),
            np.array(columns, dtype=np.int64),
            np.array(values, dtype=np.float32),
            np.array(own, dtype=np.float32),
        )
        self._crew.everyone("mix", mixture)

    def evaluate(self, peers: Sequence[int] | None = None) -> list[Scores]:
        """Return every peer's scores of w_i^t on its own test set; of others than `peers`, if those
        are given, the scores that they had before."""
        self._crew.everyone("evaluate", peers)
        return [Scores(*row) for row in self._arena["scores"].tolist()]

    def losses_of(
        self, i: int, models: Sequence[Vector], t: int, *, held: bool = False
    ) -> list[float]:
        """Return F_i of `models`, each [e], on the samples that `losses` takes."""
        asked, worker = self._arena["asked"], int(self._owner[i])
        found: list[float] = []
        for first in range(0, len(models), _ASKED):
            part = models[first : first + _ASKED]
            for row, model in zip(asked, part, strict=False):
                row[:] = model
            found += self._crew.one(worker, "losses_of", i, len(part), t, held)
        return found

    def scores_of(self, i: int, model: Vector) -> Scores:
        """Return what the device's own learner of peer i says of `model` [e]."""
        scores: Scores = self._crew.one(int(self._owner[i]), "scores_of", i, model)
        return scores

    def peak(self) -> float:
        """Return the operations a second, in the engine's precision, of square matrix products on
        all workers."""
        return float(sum(self._crew.everyone("peak")))

    def cpu_seconds(self) -> float:
        """Return the seconds of a core that all workers have had, waits for one left out."""
        return float(sum(self._crew.everyone("cpu_seconds")))

    def memory(self) -> float:
        """Return MiB in use by this process and the workers, what they share counted once."""
        return self._crew.memory()

    def gpu_memory(self) -> float:
        """Return the most MiB of a GPU's memory that tensors have taken so far; 0 on the CPU."""
        return float(sum(self._crew.everyone("gpu_memory")))

    def synchronize(self) -> None:
        """Wait until everything asked for is done: a GPU is still at it when a call returns."""
        if self._on_device:
            self._crew.everyone("synchronize")

    def close(self) -> None:
        """End the workers."""
        self._crew.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _fetch(self, name: str, rows: int | slice = slice(None)) -> Array:
        if not self._on_device:
            return self._arena[name][rows]
        found: Array = self._crew.one(0, "fetch", name, rows)
        return found


class _Crew:
    """Whoever does the work: `ask` gives every worker arguments of its own."""

    count: int

    def ask(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return every worker's answer. Raises UserError, or FederationError when one failed."""
        raise NotImplementedError

    def one(self, worker: int, name: str, *arguments: Any) -> Any:
        """Return one worker's answer."""
        raise NotImplementedError

    def everyone(self, name: str, *arguments: Any) -> list[Any]:
        """Ask all workers the same."""
        return self.ask(name, [arguments] * self.count)

    def memory(self) -> float:
        """Return MiB of this process and the workers."""
        return _mebibytes(os.getpid())

    def close(self) -> None:
        """End the workers."""


class _Here(_Crew):
    """One worker in this process."""

    count = 1

    def __init__(self, job: Job, arena: Arena) -> None:
        self._worker = Worker(job, arena)

    def ask(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [self.one(0, name, *arguments[0])]

    def one(self, worker: int, name: str, *arguments: Any) -> Any:  # noqa: ARG002
        return getattr(self._worker, name)(*arguments)


class _Processes(_Crew):
    """One process for every job."""

    def __init__(self, jobs: Sequence[Job], memory: int) -> None:
        self.count = len(jobs)
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        environment = os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)}
        # Whatever happens, also to this object's constructor, the workers end with it.
        self._end = weakref.finalize(self, _end, self._connections, self._processes)
        for job in jobs:
            ours, theirs = Pipe()
            command = [sys.executable, "-m", "simulations.engine.worker"]
            self._processes.append(
                subprocess.Popen(
                    [*command, str(theirs.fileno()), str(memory)],
                    env=environment,
                    pass_fds=(theirs.fileno(), memory),
                    stdin=subprocess.DEVNULL,
                )
            )
            theirs.close()
            self._connections.append(ours)
            ours.send(job)
        for worker in range(self.count):
            self._receive(worker)

    def ask(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        for worker, own in enumerate(arguments):
            self._send(worker, name, own)
        return [self._receive(worker) for worker in range(self.count)]

    def one(self, worker: int, name: str, *arguments: Any) -> Any:
        self._send(worker, name, arguments)
        return self._receive(worker)

    def memory(self) -> float:
        return sum(map(_mebibytes, [os.getpid(), *(p.pid for p in self._processes)]))

    def close(self) -> None:
        self._end()

    def _send(self, worker: int, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            self._connections[worker].send((name, arguments))
        except OSError:
            self._lost(worker)

    def _receive(self, worker: int) -> Any:
        try:
            kind, answer = self._connections[worker].recv()
        except (EOFError, OSError):
            self._lost(worker)
        except BaseException:
            self.close()  # Ctrl-C: the answers that are under way belong to nobody
            raise
        if kind == "result":
            return answer
        self.close()
        if kind == "mistake":
            raise UserError(*answer)
        raise FederationError(f"a worker of the engine failed\n{answer}")

    def _lost(self, worker: int) -> Any:
        try:
            code: int | None = self._processes[worker].wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = None
        self.close()
        raise FederationError(f"a worker of the engine ended by itself (exit code {code})")


def _end(connections: list[Connection], processes: list[subprocess.Popen[bytes]]) -> None:
    for connection in connections:
        connection.close()
    for process in processes:
        process.kill()  # it holds nothing that would need to be put in order
        process.wait()


def _describe(
    plan: Plan, dataset: Dataset, model: str | None, device: str, *, mixed: bool
) -> tuple[Manifest, Vector, Stack | None]:
    """Return the model's manifest, w_0 and its stack, if it has one, by way of peer 0's learner."""
    check_inputs(plan.model, dataset)
    data = deal(dataset, plan, 0, own=False)
    if plan.model in ESTIMATORS:
        if device != "cpu":
            raise UserError(f"the model {plan.model} runs on the cpu only, not on {device}")
        if mixed:
            raise UserError(f"the model {plan.model} has no bfloat16", "leave out --precision")
        learner = estimator_learner.EstimatorLearner(plan.model, data, plan, 0)
        return learner.manifest, learner.initial(), None
    module = build_model(plan.model, dataset.shape, dataset.classes, plan.seed, factory=model)
    torch_learner = TorchLearner(module, data, plan, 0, device=device)
    stack = stackable(module, torch_learner.manifest, dataset.shape, mixed=mixed)
    return torch_learner.manifest, torch_learner.initial(), stack


def _ranges(loads: npt.NDArray[Any], count: int) -> list[tuple[int, int]]:
    """Return `count` contiguous ranges of about equal load."""
    total = np.concatenate([[0], np.cumsum(loads)])
    cuts = [int(np.abs(total - total[-1] * part / count).argmin()) for part in range(count + 1)]
    return list(itertools.pairwise(cuts))


def _mebibytes(pid: int) -> float:
    """Return the proportional set size: shared pages count in parts."""
    return float(psutil.Process(pid).memory_full_info().pss) / 2**20
