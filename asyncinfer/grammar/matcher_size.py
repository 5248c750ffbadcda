"""The bytes that a matcher holds. The library does not tell them, so a copy is measured."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["PER_TOKEN", "matcher_size"]

#: Bytes that a token of an ordinary format adds, rounded up: 80 to 210 for each byte of JSON. A
#: format that can be read in many ways at once adds up to 16 kB for each byte.
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
        # musl and macOS do not have it.
        return None
    look.restype = _Allocated
    return look


_allocated = _find()


def matcher_size(state: LLMatcher, tokens: int) -> int:
    """Bytes of a matcher that has taken so many tokens: those of a copy of it, or `PER_TOKEN` where
    the C library does not say what it has given away.

    Other threads may take memory in the same moment, so that the smallest of three looks counts.
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
    """Bytes in use, those of large pieces included, which have maps of their own."""
    return int(found.uordblks + found.hblkhd)
