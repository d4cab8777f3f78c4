"""No code of panmesh may run what it reads: neither pickles nor anything like them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    file
    for package in ("peer", "bootstrap", "simulations")
    for file in (ROOT / package).rglob("*.py")
)
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {"recv_pyobj", "send_pyobj", "read_pickle", "unsafe_load", "full_load", "load_all"}
LOADS = {("torch", "load"), ("yaml", "load"), ("jit", "load")}


def dangers(source: str) -> Iterator[str]:
    """Yield what in a module could run code that it reads."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                if module.split(".")[0] in MODULES:
                    yield module
                yield from (
                    f"{module}.{name.name}"
                    for name in names
                    if (module.split(".")[-1], name.name) in LOADS or name.name in METHODS
                )
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield name
            case ast.Attribute(attr=name) if name in METHODS:
                yield name
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
                if (owner, name) in LOADS:
                    yield f"{owner}.{name}"
            case ast.keyword(arg="allow_pickle", value=value):
                if not (isinstance(value, ast.Constant) and value.value is False):
                    yield "allow_pickle"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_nothing_read_is_run(file: Path) -> None:
    assert list(dangers(file.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", "pickle"),
        ("import os, marshal as m", "marshal"),
        ("from pickle import loads", "pickle"),
        ("from torch import load", "torch.load"),
        ("model = torch.load(file)", "torch.load"),
        ("from yaml import load\nload(text)", "yaml.load"),
        ("np.load(file, allow_pickle=True)", "allow_pickle"),
        ("np.load(file, allow_pickle=trusted)", "allow_pickle"),
        ("eval(text)", "eval"),
        ("exec(text)", "exec"),
        ("socket.recv_pyobj()", "recv_pyobj"),
        ("pd.read_pickle(file)", "read_pickle"),
        ("import shelve", "shelve"),
    ],
)
def test_the_search_finds_them(source: str, found: str) -> None:
    assert found in list(dangers(source))


@pytest.mark.parametrize(
    "source", ["np.load(file, allow_pickle=False)", "model.eval()", "re.compile(x)"]
)
def test_the_search_finds_nothing_else(source: str) -> None:
    assert list(dangers(source)) == []
