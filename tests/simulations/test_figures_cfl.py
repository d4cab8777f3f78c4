"""The pictures of CFL hold the numbers that the rows tell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from peer.plan import Plan
from peer.rundir import MetricRow
from simulations.figures_cfl import attempts_of, clustering_figure

PLAN = Plan.model_validate(
    {"n": 4, "rounds": 4, "method": "fedavg", "partition": {"kind": "rotation", "clusters": 2}}
)


def attempt(t: int, node: int, children: list[int] | None = None) -> dict[str, Any]:
    sought = t > 1
    return {
        "t": t, "node": node, "mean_norm": 4.0 - t, "max_norm": 5.0, "eps1": 2.0, "eps2": 1.0,
        "children": children, "why_not": None if children else "told",
    } | ({"cross_max": -0.1 * t, "gap": None if node else 0.3} if sought else {})  # fmt: skip


def rows() -> list[MetricRow]:
    """Node 0 is split after round 2 into 1 (peers 0, 2) and 2 (1, 3)."""
    told = {
        (1, 0): attempt(1, 0), (2, 0): attempt(2, 0, [1, 2]), (3, 0): attempt(3, 1),
        (3, 1): attempt(3, 2), (4, 0): attempt(4, 1), (4, 1): attempt(4, 2),
    }  # fmt: skip
    return [
        MetricRow(
            t=t,
            index=i,
            cluster=i % 2,
            accuracy=(t + i) / 10 if t % 2 == 0 else None,
            notes={"attempt": told[t, i]} if (t, i) in told else {},
        )
        for t in range(1, 5)
        for i in range(4)
    ]


def test_attempts_by_node_and_in_order() -> None:
    found = attempts_of(rows()[::-1])
    assert {v: [a["t"] for a in told] for v, told in found.items()} == {
        0: [1, 2], 1: [3, 4], 2: [3, 4],
    }  # fmt: skip


def test_a_figure_of_accuracy_norms_and_cosines() -> None:
    accuracy, norms, cosines = clustering_figure(PLAN, rows()).axes

    def lines(axes: Any, places: slice) -> list[list[list[float]]]:
        return [np.asarray(line.get_xydata()).tolist() for line in axes.lines[places]]

    np.testing.assert_allclose(lines(accuracy, slice(2)), [[[2, 30], [4, 50]], [[2, 40], [4, 60]]])
    assert lines(norms, slice(2)) == [[[1, 3], [2, 2]], [[1, 5], [2, 5]]]
    assert lines(norms, slice(6, 8)) == [
        [[t, eps] for t in (1, 2, 3, 4)] for eps in (2, 1)
    ]  # fmt: skip
    np.testing.assert_allclose(lines(cosines, slice(2)), [[[2, -0.2]], [[2, 0.3]]])
    for axes in (accuracy, norms, cosines):
        assert np.asarray(axes.lines[-1].get_xdata()).tolist() == [2, 2]  # the split


def test_rows_of_another_method_are_refused() -> None:
    with pytest.raises(ValueError, match="no attempts"):
        clustering_figure(PLAN, [row.model_copy(update={"notes": {}}) for row in rows()])
