"""`torch_later`: a command that reads headers alone does not wait for torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["torch_later"]


class _Later(ModuleType):
    """Stands for one of torch's modules, which is imported when an attribute is asked for."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # What the import system asks every package for.
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> object:
        _end()
        value: object = getattr(import_module(self.__name__), name)
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    """Finds a `_Later` for whatever is imported of torch."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "torch":
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Later(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


_FINDER = _Finder()


def torch_later() -> None:
    """Have torch imported when it is first used, where it is not imported yet. This changes how
    the whole process imports, and is for a process that runs one command."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _FINDER)


def _end() -> None:
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Later)]:
            del sys.modules[name]
