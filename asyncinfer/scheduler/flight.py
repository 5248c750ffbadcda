"""`Flight`: a step from its plan to its commit."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncinfer.scheduler.plan import StepPlan
from asyncinfer.scheduler.request import Request

__all__ = ["Flight"]


@dataclass(slots=True)
class Flight:
    """A step from its plan to its commit."""

    plan: StepPlan
    #: Row -> request; rows below `decodes` are decode rows.
    requests: list[Request] = field(default_factory=list)
    decodes: int = 0

    def prefill(self, request: Request, chunk: int) -> bool:
        """Add a row of prompt tokens, or of answer tokens to be computed again; whether it draws,
        as it does after the last known token."""
        plan, start = self.plan, request.computed
        request.computed = end = start + chunk
        if request.prompt_logprobs is not None and request.scored <= start < request.prompt_len - 1:
            plan.prompt_logprobs[len(self.requests)] = request.prompt_logprobs
        draws = end == request.known
        plan.slots.append(request.slot)
        plan.starts.append(start)
        plan.counts.append(chunk)
        plan.samples.append(int(draws))
        self.requests.append(request)
        request.in_flight += 1
        request.left -= draws
        return draws
