"""How fast the engine is, as ratios taken in one run.

What it is compared with: the loop that most code of this kind has (one `nn.Module` a client, a
`DataLoader`, `torch.optim.SGD`), on one thread, and the machine's own product of two matrices. All
three take turns, and of each the best time counts, for a shared machine only ever makes things
slower.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from peer.learning.models import build_model
from peer.learning.partition import PeerData, deal
from peer.learning.sources import Dataset, load_dataset
from peer.plan import Plan
from simulations.engine.laboratory import Laboratory

BenchRow = dict[str, Any]
"""One setting's figures, JSON-able: see `run_bench`."""

Progress = Callable[[str], None]

NAIVE_CLIENTS = 2
"""Clients that the naive loop trains in a turn: its time grows with their number exactly."""


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


def settings(models: Sequence[str], sizes: Sequence[int]) -> Iterator[Plan]:
    """Yield the plans to measure: every model at every size, then larger l and k at one size."""
    for model in models:
        for n in sizes:
            yield bench_plan(model, n)
    middle = sorted(sizes)[len(sizes) // 2]
    for matching in ({"l": 20}, {"l": 40}, {"k": 10}, {"k": 20}):
        if max(matching.values()) < middle:
            yield bench_plan(models[0], middle, **matching)


def run_bench(
    models: Sequence[str] = ("mlp", "lenet", "cnn"),
    sizes: Sequence[int] = (20, 100, 1000),
    precisions: Sequence[str] = ("float32",),
    *,
    repeats: int = 5,
    workers: int | None = None,
    device: str = "cpu",
    progress: Progress = lambda _: None,
) -> list[BenchRow]:
    """Measure every setting and return a row for each.

    A row has model, e, n, l, k, device, precision (of the engine's products), workers;
    client_rounds_per_s and naive_client_rounds_per_s (local training alone, which is all that the
    naive loop does, in float32) and their ratio_naive; ratio_naive_cpu, the same of the time that
    processes had a core, which other users of the machine disturb less; peak_share, of the
    machine's matrix products in that precision, all workers together; round_s, a whole round's,
    and shares of it {train, match, aggregate, evaluate}; memory_mb; load, the average number of
    processes that wanted a core meanwhile. `progress` is
    told what comes next. Raises UserError when the data or the device are not there.
    """
    rows = []
    for plan, precision in itertools.product(settings(models, sizes), precisions):
        matching = plan.matching
        progress(f"{plan.model}, n = {plan.n}, l = {matching.l}, k = {matching.k}, {precision}")
        rows.append(
            measure(plan, repeats=repeats, workers=workers, device=device, precision=precision)
        )
    return rows


def measure(
    plan: Plan,
    *,
    repeats: int = 5,
    workers: int | None = None,
    device: str = "cpu",
    precision: str = "float32",
) -> BenchRow:
    """Measure one plan: see `run_bench`."""
    dataset = load_dataset(plan.data, seed=plan.seed)
    clients = [deal(dataset, plan, i, own=False) for i in range(min(NAIVE_CLIENTS, plan.n))]
    torch.set_num_threads(1)
    rounds: list[dict[str, float]] = []
    naive, naive_cpu, peak = math.inf, math.inf, 0.0
    with Laboratory(
        plan, plan.method, workers=workers, device=device, precision=precision
    ) as laboratory:
        engine = laboratory.engine
        laboratory.step()  # what is made on first use is made here
        for _ in range(repeats):
            wall, cpu = naive_seconds(plan, dataset, clients, device)
            naive, naive_cpu = min(naive, wall), min(naive_cpu, cpu)
            peak = max(peak, engine.peak())
            before = dict(laboratory.seconds)
            laboratory.step()
            rounds.append({key: s - before[key] for key, s in laboratory.seconds.items()})
        busy = min(_training_cpu(laboratory) for _ in range(2))
        best = {key: min(seconds[key] for seconds in rounds) for key in rounds[0]}
        whole = sum(best.values())
        flops = training_flops(plan, dataset)
        return {
            "model": plan.model,
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
            "memory_mb": engine.memory(),
            "load": os.getloadavg()[0],
        }


def _training_cpu(laboratory: Laboratory) -> float:
    """Return the workers' computing seconds in one more round's local training of all peers."""
    engine = laboratory.engine
    before = engine.cpu_seconds()
    engine.train(laboratory.t + 1)
    return engine.cpu_seconds() - before


def naive_seconds(
    plan: Plan, dataset: Dataset, clients: Sequence[PeerData], device: str
) -> tuple[float, float]:
    """Return the wall and computing seconds of a client's local training in the naive loop."""
    training = plan.training
    modules = [
        build_model(plan.model, dataset.shape, dataset.classes, plan.seed).to(device)
        for _ in clients
    ]
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
                x, y = inputs.to(device), labels.to(device)
                optimizer.zero_grad()
                loss = criterion(module(x), y)
                loss.backward()
                optimizer.step()
    if device != "cpu":
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter() - start, time.process_time() - computing
    return wall / len(clients), cpu / len(clients)


def training_flops(plan: Plan, dataset: Dataset) -> int:
    """Return the operations of the products in one client's round of local training.

    Three products a layer and sample (forward, gradient of the weights, gradient of the inputs),
    but two in the first, of a multiplication and an addition each.
    """
    module = build_model(plan.model, dataset.shape, dataset.classes, plan.seed)
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


def bench_table(rows: Sequence[BenchRow]) -> str:
    """Return the rows as a Markdown table."""
    head = (
        "model | n | l | k | precision | client-rounds/s | naive | ratio | by CPU time | of peak "
        "| round, s | train | match | aggregate | evaluate | MiB | load"
    )
    lines = [f"| {head} |", "|" + "---|" * (head.count("|") + 1)]
    for row in rows:
        shares = " | ".join(f"{100 * share:.1f} %" for share in row["shares"].values())
        lines.append(
            f"| {row['model']} | {row['n']} | {row['l']} | {row['k']} | {row['precision']} "
            f"| {row['client_rounds_per_s']:.1f} | {row['naive_client_rounds_per_s']:.1f} "
            f"| {row['ratio_naive']:.2f} | {row['ratio_naive_cpu']:.2f} "
            f"| {100 * row['peak_share']:.0f} % | {row['round_s']:.3f} "
            f"| {shares} | {row['memory_mb']:.0f} | {row['load']:.1f} |"
        )
    return "\n".join(lines)
