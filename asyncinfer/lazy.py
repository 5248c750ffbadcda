"""`hand_on` re-exports the names of a package's modules, and imports each when it is first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import import_module

__all__ = ["hand_on"]


def hand_on(
    package: str, **modules: Iterable[str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `package`, which re-exports names of its modules. They also
    provide its modules, as if these had been imported, and its `__version__`."""
    homes = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> object:
        if name in homes:
            value: object = getattr(import_module(f"{package}.{homes[name]}"), name)
        elif name == "__version__":
            from importlib.metadata import version

            value = version(package)
        else:
            value = None if name.startswith("_") else _module(f"{package}.{name}")
            if value is None:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # The next access finds the name without this function.
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes, "__version__"})

    return find, names


def _module(name: str) -> object:
    """The module of that name; None if there is none."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None
