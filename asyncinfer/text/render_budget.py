"""`RenderBudget`: the work and the memory that one rendering of a chat template may still use.

Both are counted, not measured, so that a chat is refused on every machine or on none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from sys import getrefcount
from typing import Any, Final, TypeVar

from jinja2.exceptions import SecurityError
from jinja2.runtime import Context

__all__ = ["RenderBudget"]

#: Work of one rendering, in steps of about a microsecond.
MAX_STEPS: Final = 5_000_000
#: Characters of one text.
MAX_SIZE: Final = 64_000_000
#: Size of a value made by repeating or padding: no template needs more.
MAX_REPEATED: Final = 1_000_000
#: Characters written in one rendering.
MAX_WRITTEN: Final = 256_000_000
#: Characters of all short values that were made, and of the long ones that are still held.
MAX_SHORT: Final = 500_000_000
MAX_HELD: Final = 250_000_000

#: A value of this size or more counts only while it is held.
_LONG: Final = 1 << 16
#: Characters of long values made between two counts of what is held.
_LOOK: Final = 1 << 24
#: Size that an item of a list counts for, beside its characters.
_ITEM: Final = 64


def _as_it_is(before: str, after: str) -> str:
    return after


_Made = TypeVar("_Made")


class RenderBudget:
    """The budget is a variable of the template, under a name that no template can write. Every
    method raises `SecurityError` beyond the budget."""

    NAME: Final = "render budget"

    __slots__ = ("_fresh", "_long", "_short", "_steps", "_written", "as_caller_text", "guarded")

    def __init__(
        self,
        as_caller_text: Callable[[str], str] = str,
        guarded: Callable[[str, str], str] = _as_it_is,
    ) -> None:
        """`as_caller_text` makes a text a `CallerText`; for `guarded` see `Shield`."""
        self.as_caller_text = as_caller_text
        self.guarded = guarded
        self._steps = MAX_STEPS
        self._written = MAX_WRITTEN
        self._short = MAX_SHORT
        self._long: list[tuple[Any, int]] = []
        #: Characters of long values since the last count.
        self._fresh = 0

    @classmethod
    def of(cls, context: Context) -> RenderBudget:
        budget: RenderBudget = context.parent[cls.NAME]
        return budget

    def step(self, count: int = 1) -> None:
        self._steps -= count
        if self._steps < 0:
            raise SecurityError(f"more than {MAX_STEPS} steps of work")

    def rounds(self, items: Iterable[Any], steps: int = 1, written: int = 0) -> Iterator[Any]:
        """Iterate over `items`, charging for each."""
        for item in items:
            self._steps -= steps
            self._written -= written
            if self._steps < 0 or self._written < 0:
                self.step(0)
                self.write(0)
            yield item

    def write(self, size: int) -> None:
        self._written -= size
        if self._written < 0:
            raise SecurityError(f"more than {MAX_WRITTEN} characters written")

    def check(self, what: str, size: int, most: int = MAX_SIZE) -> None:
        """Refuse a value of more than `most` characters (or bits) before it is made."""
        if size > most:
            raise SecurityError(f"the result of {what} is too large: {size} > {most}")

    def keep(self, value: _Made) -> _Made:
        """Charge for `value`, which was just made, and return it."""
        if isinstance(value, str):
            size = len(value)
            if size < _LONG <= self._short:
                self._short -= size
                return value
        elif isinstance(value, list | tuple):
            size = sum(len(item) for item in value if isinstance(item, str)) + _ITEM * len(value)
            self.step(len(value) >> 3)
        else:
            return value
        if size < _LONG:
            self._short -= size
            if self._short < 0:
                raise SecurityError(f"more than {MAX_SHORT} characters in short values")
        else:
            # Copying 4,096 characters takes as long as a step.
            self.step(size >> 12)
            self._long.append((value, size))
            self._fresh += size
            if self._fresh > _LOOK:
                self._count_held()
        return value

    def _count_held(self) -> None:
        self._fresh = 0
        self._long = [(value, size) for value, size in self._long if getrefcount(value) > _ALONE]
        held = sum(size for _, size in self._long)
        if held > MAX_HELD:
            raise SecurityError(f"{held} characters held at once, more than {MAX_HELD}")

    def compare(self, value: Any) -> None:
        """Charge for a comparison with all of `value`."""
        if isinstance(value, str):
            self.step(len(value) >> 10)
        elif isinstance(value, list | tuple | Mapping):
            self.walk(value)

    def show(self, *values: Any) -> None:
        """Charge for writing the values as text."""
        self._walk(values, MAX_SIZE)

    def walk(self, *values: Any) -> int:
        """Charge for a visit of the values and all that they hold; returns how many there are. A
        value that is held twice counts twice, since it would be written and compared twice."""
        return self._walk(values, None)

    def _walk(self, values: Iterable[Any], most: int | None) -> int:
        waiting, size, count = list(values), 0, 0
        while waiting:
            value = waiting.pop()
            count += 1
            if isinstance(value, str):
                # Twice: a text in a list is written with quotes and backslashes escaped.
                size += 2 * len(value)
            elif isinstance(value, Mapping):
                waiting += value
                waiting += value.values()
            elif isinstance(value, list | tuple):
                waiting += value
            if count & 1023 == 0:
                self.step(1024)
                if most is not None:
                    self.check("writing a value", size, most)
        self.step(count & 1023)
        if most is not None:
            self.check("writing a value", size, most)
        return count


def _alone() -> int:
    """The reference count of a value that only the list of long values holds, as `_count_held`
    sees it."""
    values = [(value, 1) for value in [object()]]
    (count,) = [getrefcount(value) for value, _ in values]
    return count


_ALONE: Final = _alone()
