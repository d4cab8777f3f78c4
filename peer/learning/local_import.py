"""Resolve a module, or a `module:function`, that a person names on this machine.

Only ever called with text from a command line or a local file: a plan cannot carry an import path.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from peer.errors import UserError


def import_callable(path: str, what: str) -> Callable[..., Any]:
    """Return the callable that `module:function` names; `what` says what it is for, in messages.

    Raises UserError when the text is not of that form, the module cannot be imported, or it has no
    such callable.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name.isidentifier():
        raise UserError(f"{what}: {path!r} is not an import path", "write it as module:function")
    module = import_module(module_name, what)
    function = getattr(module, name, None)
    if not callable(function):
        state = "has no" if function is None else "has something that cannot be called as"
        raise UserError(f"{what}: module {module_name!r} {state} {name!r}")
    return function  # type: ignore[no-any-return]


def import_module(name: str, what: str) -> ModuleType:
    """Return the module of that name; `what` says what it is for, in messages.

    The working directory is searched too, as `python -m` does. Raises UserError when it cannot be
    imported.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except Exception as error:  # a module may raise anything while it is imported
        raise UserError(
            f"{what}: cannot import {name!r}: {type(error).__name__}: {error}",
            f"it is looked for in {here} and among the installed packages",
        ) from error
