"""The size of a matcher in bytes. The library does not tell it, so a copy is measured."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["PER_TOKEN", "matcher_size"]

#: Bytes that a token of an ordinary format adds, rounded up: 80 to 210 for each byte of JSON. A
#: format with many possible parses adds up to 16 kB for each byte.
PER_TOKEN: Final = 1024


class _Allocated(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _find() -> Callable[[], _Allocated] | None:
    try:
        look = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        # Not in musl and macOS.
        return None
    look.restype = _Allocated
    return look


_allocated = _find()


def matcher_size(state: LLMatcher, tokens: int) -> int:
    """Bytes of a matcher that has taken so many tokens: those of a copy of it, or `PER_TOKEN` for
    each where the C library does not tell how much it has allocated.

    Other threads may allocate at the same moment, so the least of three measurements counts.
    """
    if _allocated is None:
        return PER_TOKEN * tokens
    return min(_copied(state, _allocated) for _ in range(3))


def _copied(state: LLMatcher, allocated: Callable[[], _Allocated]) -> int:
    before = _taken(allocated())
    copy = state.deep_copy()
    after = _taken(allocated())
    del copy
    return max(0, after - before)


def _taken(found: _Allocated) -> int:
    """Allocated bytes, including large blocks, which are mapped separately."""
    return int(found.uordblks + found.hblkhd)
