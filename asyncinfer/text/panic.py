"""The `tokenizers` library panics on some files and tokens, and that is no `Exception`."""

from __future__ import annotations

__all__ = ["panicked"]


def panicked(error: BaseException) -> bool:
    """Whether `error` is the library's own; any other `BaseException`, such as KeyboardInterrupt,
    is not ours to catch."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
