"""What the scheduler counts since its start, and what it holds at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Counters", "SchedulerStats"]


@dataclass(slots=True)
class Counters:
    """Totals since the start, shared by the parts of a scheduler."""

    #: Steps committed.
    steps: int = 0
    #: Tokens drawn.
    generated_tokens: int = 0
    #: Tokens of the prompts admitted; a prompt with `n` answers counts once.
    prompt_tokens: int = 0
    #: How many of these came from the prefix cache.
    cached_tokens: int = 0
    preemptions: int = 0
    #: Answers that took over their sibling's prompt (`n > 1`).
    forks: int = 0
    #: Times a request waited for a prefix that another one was computing.
    shared: int = 0


class SchedulerStats(NamedTuple):
    """See `EngineStats`, whose fields of the same names come from here."""

    running: int
    waiting: int
    paused: int
    blocks_total: int
    #: Blocks that hold nothing.
    blocks_free: int
    #: Blocks that hold a reusable prefix and that no sequence uses.
    blocks_cached: int
    #: Blocks that conversations pin, in use or not.
    blocks_pinned: int
    window_pages_total: int
    #: Window pages that hold nothing.
    window_pages_free: int
    #: Window pages that no sequence uses, kept for blocks that hold a reusable prefix.
    window_pages_cached: int
    state_pages_total: int
    #: State pages that hold nothing.
    state_pages_free: int
    #: State pages that no sequence uses, kept for blocks that hold a reusable prefix.
    state_pages_cached: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    steps: int
