"""What converged models do to a matching."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

import simulations
from peer.plan import Plan
from simulations.engine.laboratory import Laboratory
from simulations.runs import changed

DEMO = Path(simulations.__file__).parent / "plans" / "demo.toml"


def least_precision(fade: float) -> float:
    """Return the least mean precision of rounds 20 to 120 of the demo, one seed."""
    plan = changed(Plan.load(DEMO), {"rounds": 120, "matching.fade": fade})
    with Laboratory(plan, "panm-grad", workers=0) as laboratory:
        rounds = list(laboratory.run(evaluate_every=120))[19:]
    return min(fmean(row["precision"] for row in rows) for rows in rounds)


@pytest.mark.slow
def test_updates_that_have_become_noise_do_not_mislead() -> None:
    assert least_precision(Plan.load(DEMO).matching.fade) == 1.0
    assert least_precision(0.0) < 0.9  # the paper's sum
