"""docs/extending.md does what it says: its files are written, its commands are run."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, flags=re.M | re.S)


FILES = {
    match[1]: block
    for kind in ("python", "toml")
    for block in blocks(kind)
    if (match := re.match(r"# (\S+\.\w+)\n", block))
}
COMMANDS = [
    line.removeprefix("$ simulate ") for block in blocks("console") for line in block.splitlines()
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_a_method_is_one_short_file() -> None:
    assert set(FILES) == {"remember.py", "blobs.py", "wide.py", "plan.toml"}
    assert FILES["remember.py"].count("\n") < 60


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_page_runs(command: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from simulations.cli import main; main()", *command.split()],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    methods = re.search(r"--methods (\S+)", command)[1].split(",")  # type: ignore[index]
    (table,) = folder.glob("runs/*/comparison.csv")
    with table.open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert list(rows) == methods
    assert all(float(row["accuracy_mean"]) > 0.2 for row in rows.values())


def test_the_method_is_a_matcher_in_every_respect(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    from peer.learning.local_import import import_module
    from peer.matching import registry
    from peer.matching.base import MatcherSettings

    registry.method_names()  # the built-in ones register now, not in the copy
    monkeypatch.setattr(registry, "_methods", dict(registry._methods))
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    import_module("remember", "test")
    settings = MatcherSettings(index=0, n=6, seed=0, l=3, k=2, t1=2, tau=2)
    matcher = registry.create_matcher("remember", settings)
    rng, known = np.random.default_rng(0), [1, 2, 3, 4, 5]
    assert len(matcher.candidates(1, known, rng)) == 3
    assert matcher.settle(1, known, {1: 0.1, 2: 0.9, 3: 0.5}, rng) == [2, 3]
    again = registry.create_matcher("remember", settings)
    again.restore(matcher.state())
    # Peer 2 has gone; what is known of the others stays.
    assert again.settle(2, [1, 3, 4, 5], {4: 0.7}, rng) == [3, 4]
    assert again.bag == {2, 4}
