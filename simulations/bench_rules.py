"""How long the rules themselves take, training left out: the best of a few times, one thread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bootstrap.coordination.bipartition import bipartition, contrast, cosines, gram
from peer.matching.gaussians import separate
from peer.matching.selection import most_similar

RuleRow = dict[str, Any]
"""One rule's figures, JSON-able: rule, size (in words), ms."""


def run_rules(*, clients: int = 1000, repeats: int = 5) -> list[RuleRow]:
    """Measure CFL's cut of `clients` clients, and NSMC's and NAEM's choices of one peer."""
    rng = np.random.default_rng(0)
    # Four directions and noise: what the cut has to tell apart.
    directions = rng.normal(size=(4, 2000))
    updates = directions[np.arange(clients) % 4] + rng.normal(size=(clients, 2000))
    alpha = cosines(gram(list(updates.astype(np.float32))))
    cut = bipartition(alpha)
    y = np.concatenate([rng.normal(0.5, 0.05, 10), rng.normal(0.1, 0.05, 10)])
    bag = np.arange(20) < 10
    similarities = dict(enumerate(rng.random(15).tolist()))
    measured: Sequence[tuple[str, str, Callable[[], Any]]] = (
        ("bipartition", f"M = {clients}", lambda: bipartition(alpha)),
        ("contrast of a cut", f"M = {clients}", lambda: contrast(alpha, cut)),
        ("cosines from products", f"M = {clients}", lambda: cosines(alpha)),
        ("NAEM, two Gaussians", "20 similarities", lambda: separate(y, bag)),
        ("NSMC, selection", "5 of 15", lambda: most_similar(similarities, 5)),
    )
    return [
        {"rule": rule, "size": size, "ms": 1000 * _best(call, repeats)}
        for rule, size, call in measured
    ]


def _best(call: Callable[[], Any], repeats: int) -> float:
    """Return the seconds of the fastest call."""
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def rules_table(rows: Sequence[RuleRow]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| rule | size | ms |", "|---|---|---|"]
    lines += [f"| {row['rule']} | {row['size']} | {row['ms']:.3g} |" for row in rows]
    return "\n".join(lines)
