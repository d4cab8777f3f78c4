"""The figures of the rules alone."""

from __future__ import annotations

import json

import pytest

from simulations import bench_rules
from simulations.bench_rules import rules_table, run_rules


def test_a_row_for_every_rule_and_the_best_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.3, 1.0, 1.25, 2.0, 2.5] * 5)
    monkeypatch.setattr(bench_rules.time, "perf_counter", lambda: next(clock))
    rows = run_rules(clients=40, repeats=3)
    assert [row["rule"] for row in rows] == [
        "bipartition", "contrast of a cut", "cosines from products", "NAEM, two Gaussians",
        "NSMC, selection",
    ]  # fmt: skip
    assert [row["ms"] for row in rows] == [250.0] * 5
    assert json.loads(json.dumps(rows)) == rows
    assert rules_table(rows).splitlines()[2] == "| bipartition | M = 40 | 250 |"
