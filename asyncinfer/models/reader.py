"""`JsonReader`: reads values of a JSON object, checking their types and bounds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from asyncinfer.errors import ModelLoadError, short_repr

__all__ = ["JsonReader"]

_MISSING: Any = object()


class JsonReader:
    """One JSON object of one file. Every refusal names the file, the key and its value."""

    def __init__(
        self,
        values: Mapping[str, Any],
        file: str,
        prefix: str = "",
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`names` maps the keys that callers use to those of the file, where they differ."""
        self.values = values
        self.file = file
        self._prefix = prefix
        self._names = names

    def renamed(self, **names: str) -> JsonReader:
        """The same object with more keys renamed."""
        return JsonReader(self.values, self.file, self._prefix, {**self._names, **names})

    def replaced(self, values: Mapping[str, Any]) -> JsonReader:
        """The same object with other values for some keys."""
        return JsonReader({**self.values, **values}, self.file, self._prefix, self._names)

    def integer(self, key: str, low: int, high: int, default: int = _MISSING) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(key, "must be an integer")
        if not low <= value <= high:
            raise self.refuse(key, f"must be between {low} and {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float = _MISSING) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(key, "must be a number")
        # The comparison also refuses NaN and integers of too many digits.
        if not low <= value <= high:
            raise self.refuse(key, f"must be between {low:g} and {high:g}")
        return float(value)

    def boolean(self, key: str, default: bool = _MISSING) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "must be true or false")
        return value

    def string(self, key: str, default: str = _MISSING) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, "must be a string")
        return value

    def numbers(self, key: str, count: int, low: float, high: float) -> tuple[float, ...]:
        """A list of `count` numbers."""
        values = self._list(key, count)
        if not all(type(value) in (int, float) and low <= value <= high for value in values):
            raise self.refuse(key, f"must be a list of numbers between {low:g} and {high:g}")
        return tuple(float(value) for value in values)

    def integers(self, key: str, count: int | None, low: int, high: int) -> tuple[int, ...]:
        """A list of `count` integers (None: of any length)."""
        values = self._list(key, count)
        if not all(type(value) is int and low <= value <= high for value in values):
            raise self.refuse(key, f"must be a list of integers between {low} and {high}")
        return tuple(values)

    def strings(self, key: str, count: int, choices: Collection[str]) -> tuple[str, ...]:
        """A list of `count` strings, each one of `choices`."""
        values = self._list(key, count)
        if not all(isinstance(value, str) and value in choices for value in values):
            raise self.refuse(key, f"must be a list of {', '.join(choices)}")
        return tuple(values)

    def object(self, key: str) -> JsonReader | None:
        """The object under `key`; None where it is missing, null or empty."""
        key = self._names.get(key, key)
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refuse(key, "must be an object")
        return JsonReader(value, self.file, f"{self._prefix}{key}.") if value else None

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self.values.get(self._names.get(key, key)) is not None

    def refuse(self, key: str, why: str) -> ModelLoadError:
        """The error to raise about `key`."""
        key = self._names.get(key, key)
        shown = short_repr(self.values[key]) if key in self.values else "(missing)"
        return ModelLoadError(f"{self._prefix}{key}={shown}: {why}", file=self.file)

    def _get(self, key: str, default: Any) -> Any:
        # A null means the same as a missing key, as transformers writes it.
        value = self.values.get(self._names.get(key, key))
        if value is not None:
            return value
        if default is _MISSING:
            raise self.refuse(key, "is required")
        return default

    def _list(self, key: str, count: int | None) -> list[Any]:
        value = self._get(key, _MISSING)
        if not isinstance(value, list) or len(value) != (len(value) if count is None else count):
            raise self.refuse(key, f"must be a list of {'any length' if count is None else count}")
        return value
