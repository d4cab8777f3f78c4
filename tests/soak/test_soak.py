"""The bars of membership, each in two or three minutes."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from bars import BARS
from soak import table

MINUTES = {"healthy": 1.5, "split": 0.75, "churn": 2.0}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BARS)
def test_bar(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = BARS[name](tmp_path / name, MINUTES.get(name, 0.0))
    with capsys.disabled():
        print(f"\n{table(outcomes)}")
    assert all(outcome.met for outcome in outcomes)
    assert psutil.Process().children(recursive=True) == []
