"""`PluginSource`: the factory of a plugin, and its origin."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any, Final, TypeVar

from asyncinfer.errors import PluginError
from asyncinfer.plugins.supervision import interrupted
from asyncinfer.plugins.timed_call import CallTimeout, call_within

__all__ = ["PluginSource", "load"]

T = TypeVar("T")

#: Seconds that an installed plugin may take to be imported, and to be made.
IMPORTING: Final = 60.0
MAKING: Final = 10.0


@dataclass(slots=True)
class PluginSource:
    """A factory, with what is known of it."""

    factory: Callable[..., Any]
    #: The plugin's name for messages.
    label: str
    installed: bool = False
    #: Why the factory is not called any more.
    hung: str | None = None

    def make(self, args: Mapping[str, Any]) -> Any:
        """A plugin with these arguments; raises what the factory raises. A factory that hangs is a
        `PluginError`, and is not called again, since each such call leaves a thread behind."""
        if not self.installed:
            return self.factory(**args)
        if self.hung is not None:
            raise PluginError(self.hung)
        try:
            return _in_time(MAKING, partial(self.factory, **args))
        except CallTimeout as error:
            self.hung = f"{self.label}: is not made any more, for once it did not return"
            raise PluginError(f"{self.label}: cannot be made: {error}") from error


def load(point: EntryPoint, label: str) -> Any:
    """Import the object that an entry point names. Raises `PluginError`."""
    try:
        return _in_time(IMPORTING, point.load)
    # BaseException: a module that calls sys.exit() must not end the host.
    except BaseException as error:
        if interrupted(error):
            raise
        why = str(error) if isinstance(error, CallTimeout) else repr(error)
        raise PluginError(f"{label}: {point.value} cannot be imported: {why}") from error


def _in_time(seconds: float, function: Callable[[], T]) -> T:
    # On another thread an import would wait for an import lock that the main thread may hold. On
    # the main thread a person can end the wait by Ctrl-C.
    if threading.current_thread() is threading.main_thread():
        return function()
    return call_within(seconds, function)
