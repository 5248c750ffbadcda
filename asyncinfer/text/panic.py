"""Panics of libraries in Rust, such as `tokenizers`: their exception is no `Exception`."""

from __future__ import annotations

__all__ = ["panicked"]


def panicked(error: BaseException) -> bool:
    """Whether a library raised `error`: an `Exception` or the panic of one in Rust. Any other
    `BaseException`, such as KeyboardInterrupt, is not to be caught."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
