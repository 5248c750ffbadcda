"""Calls into a model family, which may be a plugin: whatever it raises becomes an error that names
the family and the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from asyncinfer.errors import ModelLoadError, PluginError
from asyncinfer.models.config import ModelConfig
from asyncinfer.plugins import models
from asyncinfer.plugins.timed_call import CallTimeout, call_within
from asyncinfer.protocols import ModelFamily

__all__ = ["FamilyCalls"]

T = TypeVar("T")

#: Seconds that a family may take to read a config.json; it needs milliseconds.
READ_TIMEOUT: Final = 30.0


class FamilyCalls:
    """Calls one family about one architecture. `label` is the family's name for errors."""

    def __init__(
        self, architecture: str, family: ModelFamily, label: str, *, built_in: bool = False
    ) -> None:
        self._architecture = architecture
        self._family = family
        self._label = label
        self._built_in = built_in

    @classmethod
    def find(cls, architecture: str) -> FamilyCalls:
        """The family known by the architecture's name. `PluginError` if it cannot be found, loaded
        or made."""
        family = models.resolve(architecture)
        _, label = models.factory(architecture)
        return cls(architecture, family, label, built_in=models.is_built_in(architecture))

    def model_type(self) -> str | None:
        """The family's `model_type`."""
        stated = self._call("model_type", lambda: getattr(self._family, "model_type", None))
        if stated is not None and not isinstance(stated, str):
            raise PluginError(f"{self._label}: model_type={stated!r}: must be a string or None")
        return stated

    def read(self, values: Mapping[str, Any], file: str) -> ModelConfig:
        """The decoder's shape that the family reads from `values`.

        Raises the family's own `ModelLoadError`; and `PluginError` for any other exception, for no
        answer in time and for an answer that is no `ModelConfig`. A built-in family is trusted, so
        any exception of it is a `ModelLoadError` about the file.
        """

        def call() -> object:
            # A copy, since the next family is called with the same values.
            return self._family.read(self._architecture, dict(values), file)

        if self._built_in:
            return self._read_built_in(call, file)
        return self._call("read()", lambda: _checked(call()))

    def _read_built_in(self, call: Callable[[], object], file: str) -> ModelConfig:
        try:
            return _checked(call())
        except ModelLoadError:
            raise
        except Exception as error:
            why = str(error) if isinstance(error, ValueError) else repr(error)
            message = f"cannot be read as {self._architecture}: {why}"
            raise ModelLoadError(message, file=file) from error

    def _call(self, what: str, function: Callable[[], T]) -> T:
        def call() -> T:
            try:
                return function()
            except (ModelLoadError, PluginError):
                raise
            # BaseException too: only the family can raise on this thread.
            except BaseException as error:
                raise PluginError(f"{self._label}: {what} raised {error!r}") from error

        if self._built_in:
            return function()
        try:
            return call_within(READ_TIMEOUT, call)
        except CallTimeout as error:
            raise PluginError(f"{self._label}: {what} {error}") from error


def _checked(read: object) -> ModelConfig:
    if type(read) is not ModelConfig:
        raise TypeError(f"it gave {type(read).__name__}, not a ModelConfig")
    # Checked again, since a frozen dataclass can be changed by `object.__setattr__`.
    return replace(read)
