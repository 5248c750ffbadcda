"""Calls into a model family, which may be anybody's code: whatever it does, the caller hears of it
as an error that names the family and the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from asyncinfer.errors import ModelLoadError, PluginError
from asyncinfer.models.config import ModelConfig
from asyncinfer.plugins import models
from asyncinfer.plugins.within import NotInTime, within
from asyncinfer.protocols import ModelFamily

__all__ = ["FamilyCalls"]

T = TypeVar("T")

#: Seconds that a family may take to read a config.json, which takes milliseconds.
READ_TIMEOUT: Final = 30.0


class FamilyCalls:
    """A family, asked about one architecture. `label` is what errors call it."""

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
        """What the family says that `config.json` calls the architecture."""
        stated = self._call("model_type", lambda: getattr(self._family, "model_type", None))
        if stated is not None and not isinstance(stated, str):
            raise PluginError(f"{self._label}: model_type={stated!r}: must be a string or None")
        return stated

    def read(self, values: Mapping[str, Any], file: str) -> ModelConfig:
        """The decoder's shape that the family makes of `values`.

        Raises the family's own `ModelLoadError`; `PluginError` for whatever else it raises, for no
        answer in time and for what is no `ModelConfig`. What a built-in family does not take is the
        file's fault: a `ModelLoadError`.
        """

        def call() -> object:
            # A dict of its own: the next family is asked of the same values.
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
            # SystemExit and the like are the family's too: this is a thread of its own.
            except BaseException as error:
                raise PluginError(f"{self._label}: {what} raised {error!r}") from error

        if self._built_in:
            return function()
        try:
            return within(READ_TIMEOUT, call)
        except NotInTime as error:
            raise PluginError(f"{self._label}: {what} {error}") from error


def _checked(read: object) -> ModelConfig:
    if type(read) is not ModelConfig:
        raise TypeError(f"it gave {type(read).__name__}, not a ModelConfig")
    # Checked again: what is frozen can be changed by force.
    return replace(read)
