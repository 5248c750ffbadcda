"""`torch_later` keeps a command that reads headers alone from importing torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["torch_later"]


class _Later(ModuleType):
    """Stands for one of torch's modules, which is imported on the first access to an attribute."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # Every package has a path, which the import system reads.
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> object:
        _end()
        value: object = getattr(import_module(self.__name__), name)
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    """Returns a `_Later` for every import of torch and its modules."""

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
    """Import torch on its first use, unless it is imported already. This changes imports for the
    whole process, so it is for a process that runs one command."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _FINDER)


def _end() -> None:
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Later)]:
            del sys.modules[name]
