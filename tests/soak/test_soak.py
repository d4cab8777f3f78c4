"""The bars of membership, each in two or three minutes."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from bars import BARS, Outcome, exchanged
from soak import table

from peer.rundir import MetricRow

MINUTES = {"healthy": 1.5, "split": 0.75, "churn": 2.0}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BARS)
def test_bar(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = BARS[name](tmp_path / name, MINUTES.get(name, 0.0))
    with capsys.disabled():
        print(f"\n{table(outcomes)}")
    assert all(outcome.met is not False for outcome in outcomes)
    assert psutil.Process().children(recursive=True) == []
    if unmeasured := [outcome for outcome in outcomes if outcome.met is None]:
        pytest.skip(f"{unmeasured[0].bar}: {unmeasured[0].measured}")


@pytest.mark.parametrize(
    ("exchanges", "missing", "told", "met"),
    [
        (2400, 120, "95.0% of 2400", True),
        (2400, 121, "95.0% of 2400", False),
        (2399, 0, "100.0% of 2399", False),
        (0, 0, "100.0% of 0", False),
    ],
)
def test_a_share_of_too_few_exchanges_is_no_measurement(
    exchanges: int, missing: int, told: str, met: bool
) -> None:
    row = MetricRow(t=1, index=0, exchanges=exchanges, missing=missing)
    outcome = exchanged([row] if exchanges else [], 2.0)
    assert (outcome.limit, outcome.measured, outcome.met) == ("95 % of at least 2400", told, met)


def test_what_was_not_measured_is_not_called_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    (outcome,) = BARS["split"](Path(), 1.0)
    assert outcome.met is None
    assert table([outcome]).endswith("| 60 s | nothing: namespaces need root | not measured |")
    assert table([Outcome("bar", "1 s", "2 s", False)]).endswith("| bar | 1 s | 2 s | NO |")
