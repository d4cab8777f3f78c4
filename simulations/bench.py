"""How fast the engine is, as ratios taken in one run.

What it is compared with: the loop that most code of this kind has (one `nn.Module` a client, a
`DataLoader`, `torch.optim.SGD`), on one thread, and the machine's own product of two matrices. All
three take turns, those of engine and loop of about the same length, and of each the best time
counts, for a shared machine only ever makes things slower.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from peer.learning.models import build_model, mlp
from peer.learning.names import CUSTOM
from peer.learning.partition import PeerData, deal
from peer.learning.sources import Dataset, load_dataset
from peer.learning.torch_learner import find_device
from peer.plan import Plan
from simulations.engine.laboratory import Laboratory

BenchRow = dict[str, Any]
"""One setting's figures, JSON-able: see `run_bench`."""

Progress = Callable[[str], None]

NAIVE_SECONDS = 30.0
"""The longest turn of the naive loop, whose time grows with the number of clients exactly: what is
as long is no lucky moment, however long a round of the engine takes."""

NAIVE_DEALT = 10
"""Clients whose data the naive loop has; of more it trains theirs again, from other models."""


@dataclass(frozen=True)
class Setting:
    """A plan to measure, and what tables call its model; the `factory` of one not built in."""

    model: str
    plan: Plan
    factory: str | None = None


def narrow_mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The mlp, a quarter as wide."""
    return mlp(shape, classes, hidden=50)


def wide_mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The mlp, four times as wide."""
    return mlp(shape, classes, hidden=800)


def bench_plan(model: str, n: int, **matching: int) -> Plan:
    """Return the plan that is measured: the papers' sizes, searching by gradients every round."""
    return Plan.model_validate(
        {
            "n": n,
            "rounds": 1000,
            "method": "panm-grad",
            "model": model,
            "data": "fashion-mnist",
            "matching": {"l": 10, "k": 5, "t1": 1000, **matching},
            "partition": {"kind": "rotation", "clusters": 4, "train_per_peer": 500},
            "training": {"lr": 0.05 if model == "mlp" else 0.02},
        }
    )


def settings(models: Sequence[str], sizes: Sequence[int]) -> Iterator[Setting]:
    """Yield what is measured: every model at every size, and at one size larger l and k, and an
    mlp of fewer and of more weights e."""
    for model, n in itertools.product(models, sizes):
        yield Setting(model, bench_plan(model, n))
    middle = sorted(sizes)[len(sizes) // 2]
    for matching in ({"l": 20}, {"l": 40}, {"k": 10}, {"k": 20}):
        if max(matching.values()) < middle:
            yield Setting(models[0], bench_plan(models[0], middle, **matching))
    if "mlp" in models:
        for name, factory in (("mlp-50", narrow_mlp), ("mlp-800", wide_mlp)):
            yield Setting(name, bench_plan(CUSTOM, middle), f"{__name__}:{factory.__name__}")


def run_bench(
    models: Sequence[str] = ("mlp", "lenet", "cnn"),
    sizes: Sequence[int] = (20, 100, 1000),
    precisions: Sequence[str] = ("float32",),
    *,
    repeats: int = 5,
    workers: int | None = None,
    device: str = "cpu",
    progress: Progress = lambda _: None,
) -> Iterator[BenchRow]:
    """Measure every setting and yield a row for each, as soon as there is one.

    A row has model, e, n, l, k, device, precision (of the engine's products), workers;
    client_rounds_per_s and naive_client_rounds_per_s (local training alone, which is all that the
    naive loop does, in float32) and their ratio_naive; ratio_naive_cpu, the same of the time that
    processes had a core, which other users of the machine disturb less; peak_share, of the
    machine's matrix products in that precision, all workers together; round_s, a whole round's,
    and shares of it {train, match, aggregate, evaluate}; memory_mb, of all processes of the engine
    after a round, and gpu_memory_mb, the most that its tensors took of a GPU (0 on the CPU); load,
    the average number of processes that wanted a core meanwhile. `progress` is told what comes
    next. Raises UserError when the data or the device are not there.
    """
    for setting, precision in itertools.product(settings(models, sizes), precisions):
        plan, matching = setting.plan, setting.plan.matching
        progress(f"{setting.model}, n = {plan.n}, l = {matching.l}, k = {matching.k}, {precision}")
        yield measure(setting, repeats=repeats, workers=workers, device=device, precision=precision)


def measure(
    setting: Setting,
    *,
    repeats: int = 5,
    workers: int | None = None,
    device: str = "cpu",
    precision: str = "float32",
) -> BenchRow:
    """Measure one setting: see `run_bench`."""
    plan = setting.plan
    torch.set_num_threads(1)
    rounds: list[dict[str, float]] = []
    naive, naive_cpu, peak = math.inf, math.inf, 0.0
    with Laboratory(
        plan, plan.method, workers=workers, device=device, precision=precision,
        model=setting.factory,
    ) as laboratory:  # fmt: skip
        engine = laboratory.engine
        laboratory.step()  # what is made on first use is made here
        memory, gpu_memory = engine.memory(), engine.gpu_memory()  # before others take any
        dataset = load_dataset(plan.data, seed=plan.seed)
        dealt = [deal(dataset, plan, i, own=False) for i in range(min(NAIVE_DEALT, plan.n))]
        once, _ = naive_seconds(setting, dataset, dealt[:2], device)
        count = naive_clients(laboratory.seconds["train"], once, plan.n)
        clients = list(itertools.islice(itertools.cycle(dealt), count))
        for _ in range(repeats):
            wall, cpu = naive_seconds(setting, dataset, clients, device)
            naive, naive_cpu = min(naive, wall), min(naive_cpu, cpu)
            peak = max(peak, engine.peak())
            before = dict(laboratory.seconds)
            laboratory.step()
            rounds.append({key: s - before[key] for key, s in laboratory.seconds.items()})
        busy = min(_training_cpu(laboratory) for _ in range(2))
        best = {key: min(seconds[key] for seconds in rounds) for key in rounds[0]}
        whole = sum(best.values())
        flops = training_flops(setting, dataset)
        return {
            "model": setting.model,
            "e": engine.manifest.size,
            "n": plan.n,
            "l": plan.matching.l,
            "k": plan.matching.k,
            "device": device,
            "precision": precision,
            "workers": engine.workers,
            "client_rounds_per_s": plan.n / best["train"],
            "naive_client_rounds_per_s": 1 / naive,
            "ratio_naive": plan.n * naive / best["train"],
            "ratio_naive_cpu": plan.n * naive_cpu / busy * max(1, engine.workers),
            "peak_share": flops * plan.n / best["train"] / peak,
            "round_s": whole,
            "shares": {key: seconds / whole for key, seconds in best.items()},
            "memory_mb": memory,
            "gpu_memory_mb": gpu_memory,
            "load": os.getloadavg()[0],
        }


def _training_cpu(laboratory: Laboratory) -> float:
    """Return the workers' computing seconds in one more round's local training of all peers."""
    engine = laboratory.engine
    before = engine.cpu_seconds()
    engine.train(laboratory.t + 1)
    return engine.cpu_seconds() - before


def naive_clients(turn: float, client: float, n: int) -> int:
    """Return how many of n clients, of `client` seconds each, the naive loop trains in a turn.

    As many as take it a `turn` of the engine, in seconds, or NAIVE_SECONDS; two at least.
    """
    return min(n, max(2, round(min(turn, NAIVE_SECONDS) / client)))


def naive_seconds(
    setting: Setting, dataset: Dataset, clients: Sequence[PeerData], device: str
) -> tuple[float, float]:
    """Return the wall and computing seconds of a client's local training in the naive loop."""
    training, place = setting.plan.training, find_device(device)
    modules = [_module(setting, dataset).to(place) for _ in clients]
    loaders = [
        DataLoader(
            TensorDataset(torch.from_numpy(own.train_x), torch.from_numpy(own.train_y)),
            batch_size=training.batch,
            shuffle=True,
        )
        for own in clients
    ]
    criterion = nn.CrossEntropyLoss()
    start, computing = time.perf_counter(), time.process_time()
    for module, loader in zip(modules, loaders, strict=True):
        optimizer = torch.optim.SGD(module.parameters(), training.lr, training.momentum)
        module.train()
        for _ in range(training.epochs):
            for inputs, labels in loader:
                x, y = inputs.to(place), labels.to(place)
                optimizer.zero_grad()
                loss = criterion(module(x), y)
                loss.backward()
                optimizer.step()
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    wall, cpu = time.perf_counter() - start, time.process_time() - computing
    return wall / len(clients), cpu / len(clients)


def _module(setting: Setting, dataset: Dataset) -> nn.Module:
    plan = setting.plan
    return build_model(
        plan.model, dataset.shape, dataset.classes, plan.seed, factory=setting.factory
    )


def training_flops(setting: Setting, dataset: Dataset) -> int:
    """Return the operations of the products in one client's round of local training.

    Three products a layer and sample (forward, gradient of the weights, gradient of the inputs),
    but two in the first, of a multiplication and an addition each.
    """
    plan, module = setting.plan, _module(setting, dataset)
    products: list[int] = []

    def count(part: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        weight = part.get_parameter("weight")
        products.append(output.numel() * weight[0].numel())

    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            part.register_forward_hook(count)
    with torch.no_grad():
        module(torch.zeros(1, *dataset.shape))
    per_sample = 2 * (3 * sum(products) - products[0])
    samples = plan.partition.train_per_peer or len(dataset.train_y) // plan.n
    return per_sample * samples * plan.training.epochs


def bench_table(rows: Iterable[BenchRow]) -> str:
    """Return the rows as a Markdown table."""
    head = (
        "model | e | n | l | k | precision | client-rounds/s | naive | ratio | by CPU time "
        "| of peak | round, s | train | match | aggregate | evaluate | MiB | load"
    )
    lines = [f"| {head} |", "|" + "---|" * (head.count("|") + 1)]
    for row in rows:
        shares = " | ".join(f"{100 * share:.1f} %" for share in row["shares"].values())
        memory = f"{row['memory_mb']:.0f}"
        if row["gpu_memory_mb"]:
            memory += f", GPU {row['gpu_memory_mb']:.0f}"
        lines.append(
            f"| {row['model']} | {row['e']} | {row['n']} | {row['l']} | {row['k']} "
            f"| {row['precision']} | {row['client_rounds_per_s']:.1f} "
            f"| {row['naive_client_rounds_per_s']:.1f} "
            f"| {row['ratio_naive']:.2f} | {row['ratio_naive_cpu']:.2f} "
            f"| {100 * row['peak_share']:.0f} % | {row['round_s']:.3f} "
            f"| {shares} | {memory} | {row['load']:.1f} |"
        )
    return "\n".join(lines)
