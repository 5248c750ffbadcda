"""What grammars have cost an engine since its start."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GrammarCounters"]


@dataclass(slots=True)
class GrammarCounters:
    """Totals since the start. Each field has one writer at a time: the compiler under its lock, or
    the decode thread."""

    #: Formats compiled, and seconds that took.
    compiled: int = 0
    compile_seconds: float = 0.0
    #: Formats that were found compiled.
    hits: int = 0
    #: Masks made, and seconds that took.
    masks: int = 0
    mask_seconds: float = 0.0
    #: Tokens that had to follow, and so were not drawn.
    forced_tokens: int = 0
