"""`Source`: what makes a plugin, and where it is from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any, Final, TypeVar

from asyncinfer.errors import PluginError
from asyncinfer.plugins.supervision import interrupted
from asyncinfer.plugins.within import NotInTime, within

__all__ = ["Source", "load"]

T = TypeVar("T")

#: Seconds that an installed plugin may take to be imported, and to be made.
IMPORTING: Final = 60.0
MAKING: Final = 10.0


@dataclass(slots=True)
class Source:
    """A factory."""

    factory: Callable[..., Any]
    #: What messages call the plugin.
    label: str
    installed: bool = False
    #: Why the factory is not called any more.
    hung: str | None = None

    def make(self, args: Mapping[str, Any]) -> Any:
        """A plugin with these arguments, or what the factory raises. `PluginError` if it hangs:
        then, and ever after, for each such call leaves a thread behind."""
        if not self.installed:
            return self.factory(**args)
        if self.hung is not None:
            raise PluginError(self.hung)
        try:
            return _in_time(MAKING, partial(self.factory, **args))
        except NotInTime as error:
            self.hung = f"{self.label}: is not made any more, for once it did not return"
            raise PluginError(f"{self.label}: cannot be made: {error}") from error


def load(point: EntryPoint, label: str) -> Any:
    """What an entry point stands for. Raises `PluginError`."""
    try:
        return _in_time(IMPORTING, point.load)
    # A module may also leave by sys.exit(), which must not end the host.
    except BaseException as error:
        if interrupted(error):
            raise
        why = str(error) if isinstance(error, NotInTime) else repr(error)
        raise PluginError(f"{label}: {point.value} cannot be imported: {why}") from error


def _in_time(seconds: float, function: Callable[[], T]) -> T:
    # The main thread may be in the middle of an import that this one needs: on another thread it
    # would wait for that. And whoever waits there has a Ctrl-C.
    if threading.current_thread() is threading.main_thread():
        return function()
    return within(seconds, function)
