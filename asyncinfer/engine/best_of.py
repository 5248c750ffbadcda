"""`best_of`: the likeliest of several answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import fsum
from typing import Any

from asyncinfer.chunk import Choice, Completion
from asyncinfer.errors import InvalidRequest

__all__ = ["best_choices", "candidate_options"]


def candidate_options(options: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """The options with which candidates are generated, and whether the caller wants their logprobs,
    by name or in `params`. Raises `InvalidRequest`."""

    def given(name: str) -> Any:
        return options[name] if name in options else getattr(options.get("params"), name, None)

    budget = given("thinking_budget")
    if budget is not None:
        bound = "not with best_of(): an appended token has no logprob"
        raise InvalidRequest("thinking_budget", budget, bound)
    wanted = given("logprobs") is not None or given("logprob_token_ids") is not None
    return options if wanted else {**options, "logprobs": 0}, wanted


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
