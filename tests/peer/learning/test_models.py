"""The built-in models, and models by import path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from peer.errors import UserError
from peer.learning.models import MODELS, build_model, instantiate, load_factory
from peer.learning.names import TEXT_MODELS


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("mlp", (1, 28, 28), 784 * 200 + 200 + 200 * 10 + 10),
        ("mlp", (13,), 13 * 200 + 200 + 200 * 10 + 10),
        ("lenet", (1, 28, 28), 61_706),  # the count that is always quoted for LeNet-5
        ("cnn", (3, 32, 32), 896 + 18_496 + 36_928 + 64 * 16 * 64 + 64 + 650),
        ("cnn", (1, 8, 8), 320 + 18_496 + 36_928 + 64 * 64 + 64 + 650),
    ],
)
def test_sizes_and_output(name: str, shape: tuple[int, ...], parameters: int) -> None:
    module = build_model(name, shape, 10, seed=0)
    assert sum(p.numel() for p in module.parameters()) == parameters
    assert module(torch.zeros(3, *shape)).shape == (3, 10)


@pytest.mark.parametrize("name", sorted(set(MODELS) - set(TEXT_MODELS)))
def test_plain_sequential(name: str) -> None:
    plain = (nn.Flatten, nn.Linear, nn.ReLU, nn.Conv2d, nn.MaxPool2d)
    module = build_model(name, (1, 28, 28), 10, seed=0)
    assert isinstance(module, nn.Sequential)
    assert all(isinstance(layer, plain) for layer in module)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = build_model("mlp", (4,), 3, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again, other = build_model("mlp", (4,), 3, seed=7), build_model("mlp", (4,), 3, seed=8)
    assert torch.equal(first.state_dict()["1.weight"], again.state_dict()["1.weight"])
    assert not torch.equal(first.state_dict()["1.weight"], other.state_dict()["1.weight"])


@pytest.mark.parametrize("side", range(1, 40))
@pytest.mark.parametrize("name", ["lenet", "cnn"])
def test_refuses_exactly_the_images_that_do_not_fit(name: str, side: int) -> None:
    smallest = {"lenet": 12, "cnn": 8}[name]
    if side < smallest:
        with pytest.raises(UserError, match=f"at least {smallest} x {smallest}, not {side}"):
            build_model(name, (1, side, 50), 10, seed=0)
    else:
        assert build_model(name, (1, side, 12), 2, seed=0)(torch.zeros(1, 1, side, 12)).shape == (
            1,
            2,
        )


def test_images_only() -> None:
    with pytest.raises(UserError, match="lenet needs images"):
        build_model("lenet", (30,), 10, seed=0)


def test_unknown_model() -> None:
    with pytest.raises(UserError) as caught:
        build_model("resnet", (30,), 10, seed=0)
    assert "mlp" in caught.value.hint


def test_factory_by_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_models_here.py").write_text(
        "from torch import nn\n"
        "number = 3\n"
        "def linear(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], classes))\n"
        "def nothing(shape, classes): return None\n"
        "def broken(shape, classes): raise RuntimeError('no luck')\n"
    )
    monkeypatch.chdir(tmp_path)
    module = instantiate(load_factory("my_models_here:linear"), (5,), 3, seed=1)
    assert [tuple(p.shape) for p in module.parameters()] == [(3, 5), (3,)]
    with pytest.raises(UserError, match="returned NoneType"):
        instantiate(load_factory("my_models_here:nothing"), (5,), 3, seed=1)
    with pytest.raises(UserError, match="no luck"):
        instantiate(load_factory("my_models_here:broken"), (5,), 3, seed=1)
    with pytest.raises(UserError, match="has no 'absent'"):
        load_factory("my_models_here:absent")
    with pytest.raises(UserError, match="cannot be called"):
        load_factory("my_models_here:number")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module_at_all:f", "cannot import 'no_such_module_at_all'"),
        ("justaname", "not an import path"),
        (":f", "not an import path"),
        ("os:", "not an import path"),
        ("..:f", "cannot import"),
    ],
)
def test_unusable_import_paths(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_factory(path)
