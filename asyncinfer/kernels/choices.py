"""The tiles and splits that a measurement on a device has chosen for its kernels.

Each thread has a table, as it has a setting of `dispatch.use_triton`. The table is empty at first:
kernels then use choices derived from counts, the same on every device. An engine fills its table
from a record when it opens (`runner/tuning.py`), and keeps it while it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final, TypeVar

__all__ = [
    "Choices",
    "Key",
    "chosen",
    "current_choices",
    "use_choices",
    "with_choices",
]

#: A kernel's name, then what its choice depends on: a bucket of shapes.
Key = tuple[str | int | float, ...]
#: The values are dataclasses, each of the type that its kernel takes.
Choices = Mapping[Key, Any]
T = TypeVar("T")

_NONE: Final[Choices] = MappingProxyType({})
_thread = threading.local()


def chosen(key: Key, default: T) -> T:
    """The choice for `key` in this thread's table, else `default`."""
    found: T = getattr(_thread, "choices", _NONE).get(key, default)
    return found


def current_choices() -> Choices:
    """This thread's table."""
    table: Choices = getattr(_thread, "choices", _NONE)
    return table


def use_choices(choices: Choices) -> None:
    """Have this thread launch kernels with `choices` from now on."""
    _thread.choices = MappingProxyType(dict(choices))


@contextmanager
def with_choices(choices: Choices) -> Iterator[None]:
    """`use_choices` inside the block."""
    before = current_choices()
    use_choices(choices)
    try:
        yield
    finally:
        use_choices(before)
