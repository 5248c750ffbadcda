"""`StepOutput`: what the scheduler tells the engine about a committed step."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncinfer.scheduler.request import Request

__all__ = ["StepOutput"]


@dataclass(slots=True)
class StepOutput:
    """What one committed step changed, as parallel lists: entry `i` is a request that got tokens,
    prompt logprobs or an end. A request finished before the step was committed has no entry."""

    requests: list[Request] = field(default_factory=list)
    #: New answer tokens; empty for a chunk inside a prompt whose logprobs were asked for.
    tokens: list[tuple[int, ...]] = field(default_factory=list)
    #: "stop" (a stop token, included in the tokens), "length", or None: it goes on.
    reasons: list[str | None] = field(default_factory=list)
    #: The row of the plan: the key of the result's logprobs and prompt logprobs.
    rows: list[int] = field(default_factory=list)
    #: Requests whose row failed, and why. They are finished; nothing of the step was committed.
    failed: list[tuple[Request, Exception]] = field(default_factory=list)
