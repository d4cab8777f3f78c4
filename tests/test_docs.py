"""The documentation names every key there is, and none that there is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from peer.plan import (
    CentralPlan,
    CflPlan,
    DefencePlan,
    MatchingPlan,
    NetworkPlan,
    PartitionPlan,
    Plan,
    PrivacyPlan,
    TrainingPlan,
)
from peer.settings import PeerSettings

ROOT = Path(__file__).parents[1]


def documented(page: str, start: str, end: str) -> set[str]:
    """Return the keys in the first column of the tables between two headings of a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    part = text[text.index(start) :]
    if end:
        part = part[: part.index(end)]
    return set(re.findall(r"^\| `([a-z0-9_]+)`", part, flags=re.M))


@pytest.mark.parametrize(
    ("page", "start", "end", "model"),
    [
        ("plans.md", "## The federation", "### Methods", Plan),
        ("plans.md", "## `[matching]`", "## `[partition]`", MatchingPlan),
        ("plans.md", "## `[partition]`", "## `[central]`", PartitionPlan),
        ("plans.md", "## `[central]`", "## `[cfl]`", CentralPlan),
        ("plans.md", "## `[cfl]`", "## `[defence]`", CflPlan),
        ("plans.md", "## `[defence]`", "## `[privacy]`", DefencePlan),
        ("plans.md", "## `[privacy]`", "## `[training]`", PrivacyPlan),
        ("plans.md", "## `[training]`", "## `[network]`", TrainingPlan),
        ("plans.md", "## `[network]`", "", NetworkPlan),
        ("peers.md", "## Settings", "## ", PeerSettings),
    ],
)
def test_every_key_is_documented(page: str, start: str, end: str, model: type[BaseModel]) -> None:
    tables = {
        "matching", "partition", "central", "cfl", "defence", "privacy", "training", "network",
    }  # fmt: skip
    if page == "peers.md":
        end = "## State"
    assert documented(page, start, end) == set(model.model_fields) - (
        tables if model is Plan else set()
    )
