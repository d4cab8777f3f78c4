"""Putting a learner together, in this process and, for its cost, in a fresh one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer.errors import UserError
from peer.learning.build import make_learner, prepare
from peer.plan import PartitionPlan, Plan


def plan(**values: Any) -> Plan:
    return Plan(**({"n": 8, "partition": PartitionPlan(kind="rotation", clusters=2)} | values))


@pytest.mark.parametrize("model", ["mlp", "cnn", "sklearn-sgd", "sklearn-mlp"])
def test_built_in(model: str) -> None:
    first, second = (make_learner(plan(model=model), i) for i in range(2))
    assert first.samples == second.samples == 162
    assert np.array_equal(first.initial(), second.initial())
    w = first.initial()
    for t in (1, 2, 3):
        w = first.fit(w, t)
    assert first.evaluate(w).loss < first.evaluate(first.initial()).loss


def test_own_data(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=rng.normal(size=(40, 5)), y=np.arange(40) % 2)
    own = Plan(n=2, data="own", classes=3)
    learner = make_learner(own, 0, data=f"npz:{tmp_path}/d.npz")
    assert learner.samples == 32
    assert learner.manifest.entries[-1].shape == (3,)
    assert make_learner(plan(), 0, data="digits#shard=0/100").samples == 12


def test_custom_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_factory_here.py").write_text(
        "from torch import nn\n"
        "def make(shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    learner, card = prepare(plan(model="custom"), 0, model="my_factory_here:make")
    assert card.factory == "my_factory_here:make"
    assert learner.manifest.size == 650


@pytest.mark.parametrize(
    ("values", "given", "message", "hint"),
    [
        ({"data": "own"}, {}, "each peer's own data", "--data"),
        ({"model": "custom"}, {}, "model is custom", "--model"),
        ({}, {"model": "a:b"}, "model is mlp, not custom", "--model"),
        ({"model": "gpt"}, {}, "no built-in model 'gpt'", "mlp, lenet, cnn"),
        ({"model": "lenet"}, {}, "at least 12 x 12, not 8 x 8", "cnn"),
        ({"model": "sklearn-sgd"}, {"device": "cuda"}, "cpu only", ""),
        ({"data": "imagenet"}, {}, "no data source 'imagenet'", "digits"),
        ({"classes": 5}, {}, "label 9 is not among 0 to 4", ""),
        ({"n": 5000}, {}, "too few for 5000 peers", "train_per_peer"),
    ],
)
def test_mistakes(values: dict[str, Any], given: dict[str, str], message: str, hint: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        prepare(plan(**values), 0, **given)  # type: ignore[arg-type]
    assert hint in caught.value.hint


SCRIPT = """
import resource, sys
import peer.learning.build, peer.learning.sources, peer.learning.partition
light = [m for m in ("torch", "sklearn", "scipy", "PIL") if m in sys.modules]
assert not light, f"imported too early: {light}"
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
from peer.plan import Plan
learner = peer.learning.build.make_learner(Plan(n=8), 0)
learner.evaluate(learner.fit(learner.initial(), 1))
assert "sklearn" not in sys.modules, "digits must not import scikit-learn"
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_costs_little_beside_torch() -> None:
    output = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True
    ).stdout
    assert float(output) < 60, "MB beside what torch itself takes"
