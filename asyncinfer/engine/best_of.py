"""`best_of`: the likeliest of several answers."""

from __future__ import annotations

import dataclasses
from math import fsum

from asyncinfer.chunk import Choice, Completion

__all__ = ["best_choices"]


def best_choices(done: Completion, n: int, *, keep_logprobs: bool) -> Completion:
    """The completion with the `n` answers of the highest mean logprob per token, the best first."""
    scored = [_scored(choice, keep_logprobs) for choice in done.choices]
    scored.sort(key=lambda choice: -(choice.score or 0.0))
    best = tuple(dataclasses.replace(each, index=i) for i, each in enumerate(scored[:n]))
    return dataclasses.replace(done, choices=best)


def _scored(choice: Choice, keep_logprobs: bool) -> Choice:
    score = fsum(each.logprob for each in choice.logprobs) / max(1, len(choice.logprobs))
    kept = choice.logprobs if keep_logprobs else ()
    return dataclasses.replace(choice, score=score, logprobs=kept)
