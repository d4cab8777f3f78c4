"""What a run of CFL says of separating and stopping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peer.plan import Plan
from peer.rundir import MetricRow, RunWriter, TopologyRow
from simulations.separation import separation, separation_rows


def leave_run(out: Path, clusters: int, splits: dict[int, list[int]], nodes: list[int]) -> Path:
    """Write a run of 9 rounds; `splits` is {round: children}, `nodes` are the last places."""
    kind = "rotation" if clusters > 1 else "none"
    plan = Plan.model_validate(
        {"n": 4, "rounds": 9, "method": "cfl", "partition": {"kind": kind, "clusters": clusters}}
    )
    with RunWriter(out, plan) as writer:
        for t in range(1, 10):
            for i in range(4):
                attempt = {"node": 0, "t": t, "children": splits.get(t)}
                notes: dict[str, Any] = {"node": nodes[i] if t == 9 else 0}
                notes |= {"attempt": attempt} if i == 0 else {}
                writer.append(
                    MetricRow(t=t, index=i, cluster=i % clusters, notes=notes),
                    TopologyRow(t=t, index=i),
                )
    return out


@pytest.mark.parametrize(
    ("clusters", "splits", "nodes", "expected"),
    [
        (2, {3: [1, 2]}, [1, 2, 1, 2], (1.0, 6, "yes")),
        (2, {3: [1, 2], 5: [3, 4]}, [3, 2, 4, 2], (4 / 7, 4, "NO")),
        (2, {}, [0, 0, 0, 0], (0.0, 9, "NO")),
        (1, {}, [0, 0, 0, 0], (1.0, 9, "yes")),
        (1, {7: [1, 2]}, [1, 1, 2, 2], (0.0, 2, "NO")),
    ],
)
def test_how_a_run_ended(
    tmp_path: Path,
    clusters: int,
    splits: dict[int, list[int]],
    nodes: list[int],
    expected: tuple[float, int, str],
) -> None:
    found = separation({"peers": "4"}, leave_run(tmp_path / "run", clusters, splits, nodes))
    row = separation_rows([found])[0]
    assert found.splits == tuple(splits)
    assert (found.rand, found.rounds_after) == pytest.approx(expected[:2])
    assert (row["peers"], row["seed"], row["as it should"]) == ("4", "0", expected[2])
