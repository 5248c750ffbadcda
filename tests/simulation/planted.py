"""Bugs to plant: each puts a substitute in the place of a method, which it may call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["Plant", "afterwards", "beforehand", "instead", "nothing", "result", "together"]

Plant = Callable[[pytest.MonkeyPatch], None]
Method = Callable[..., Any]


def instead(owner: object, name: str, make: Callable[[Any], Any]) -> Plant:
    """What `make` makes of the method takes its place."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(owner, name, make(getattr(owner, name)))

    return plant


def nothing(owner: object, name: str) -> Plant:
    """The method does nothing."""
    return instead(owner, name, lambda method: lambda *args, **options: None)


def beforehand(owner: object, name: str, more: Method) -> Plant:
    """`more` is called with the method's arguments, and then the method."""

    def make(method: Method) -> Method:
        def both(*args: Any, **options: Any) -> Any:
            more(*args, **options)
            return method(*args, **options)

        return both

    return instead(owner, name, make)


def afterwards(owner: object, name: str, more: Method) -> Plant:
    """The method, and then `more` with its arguments."""

    def make(method: Method) -> Method:
        def both(*args: Any, **options: Any) -> Any:
            found = method(*args, **options)
            more(*args, **options)
            return found

        return both

    return instead(owner, name, make)


def result(owner: object, name: str, change: Method) -> Plant:
    """What `change` makes of the method's result, and its arguments, is the result."""

    def make(method: Method) -> Method:
        def changed(*args: Any, **options: Any) -> Any:
            return change(method(*args, **options), *args, **options)

        return changed

    return instead(owner, name, make)


def together(*plants: Plant) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        for each in plants:
            each(monkeypatch)

    return plant
