"""The methods by the name that a plan calls them.

A method is a class built from `MatcherSettings` alone, decorated with `@method("its-name")`. Those
of this package are imported when first asked for; another module's register when it is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from peer.errors import UserError

if TYPE_CHECKING:  # not otherwise: whether a method exists can be asked without numpy
    from peer.matching.base import Matcher, MatcherSettings

CENTRAL = ("fedavg", "ifca", "cfl")
"""Methods that a coordinator runs, not peers among themselves: they have no matcher."""

_BUILT_IN = {
    "local": "local",
    "random": "uniform",
    "fixed": "uniform",
    "oracle": "uniform",
    "pens": "pens",
    "panm-grad": "panm",
    "panm-loss": "panm",
}
"""The module of this package that registers each of its methods."""

_methods: dict[str, Callable[[MatcherSettings], Matcher]] = {}
_Class = TypeVar("_Class", bound="Callable[[MatcherSettings], Matcher]")


def method(name: str) -> Callable[[_Class], _Class]:
    """Register the decorated matcher class as `name`. Raises ValueError when the name is taken."""

    def register(matcher: _Class) -> _Class:
        if name in _methods:
            raise ValueError(f"there is a method {name} already")
        _methods[name] = matcher
        return matcher

    return register


def method_names() -> list[str]:
    """Return the names of all methods, sorted."""
    for module in sorted(set(_BUILT_IN.values())):
        importlib.import_module(f"peer.matching.{module}")
    return sorted(_methods)


def check_method(name: str) -> None:
    """Raise UserError unless peers among themselves can run the named method; imports none."""
    if name in CENTRAL:
        raise UserError(
            f"the method {name} is central: peers cannot run it among themselves",
            "start bootstrap --plan FILE, and every peer with its --bootstrap HOST:PORT",
        )
    names = sorted({*_BUILT_IN, *_methods})
    if name not in names:
        raise UserError(
            f"there is no method {name}",
            f"choose one of {', '.join(names)}, or --import the module of your own",
        )


def create_matcher(name: str, settings: MatcherSettings) -> Matcher:
    """Return a new matcher of the named method.

    Raises UserError when there is no such method or its numbers are out of range.
    """
    check_method(name)
    if name in _BUILT_IN:
        importlib.import_module(f"peer.matching.{_BUILT_IN[name]}")
    _check(settings)
    return _methods[name](settings)


def _check(settings: MatcherSettings) -> None:
    for symbol in ("l", "k", "t1", "tau"):
        if getattr(settings, symbol) < 1:
            raise UserError(f"{symbol} = {getattr(settings, symbol)} must be at least 1")
    if not 0 <= settings.index < settings.n:
        raise UserError(f"index {settings.index} is not one of {settings.n} peers (0 is the first)")
    if settings.clusters is not None and len(settings.clusters) != settings.n:
        raise UserError(f"{len(settings.clusters)} true clusters are given for {settings.n} peers")
