"""`Counters`: what the scheduler counts since its start."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counters"]


@dataclass(slots=True)
class Counters:
    """Grow only. The parts of a scheduler share one."""

    #: Steps committed.
    steps: int = 0
    #: Tokens drawn.
    generated_tokens: int = 0
    #: Tokens of the prompts admitted; a prompt with `n` answers counts once.
    prompt_tokens: int = 0
    #: Those of them that came from the prefix cache.
    cached_tokens: int = 0
    preemptions: int = 0
    #: Answers that took over their sibling's prompt (`n > 1`).
    forks: int = 0
    #: Times a request waited for a prefix that another one was computing.
    shared: int = 0
