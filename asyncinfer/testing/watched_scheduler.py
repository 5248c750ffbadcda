"""`WatchedScheduler`: checks each rank of a scheduling policy against the rules of its protocol."""

from __future__ import annotations

from dataclasses import fields
from numbers import Real
from operator import attrgetter
from typing import Final

from asyncinfer.protocols import RequestView, SchedulingPolicy
from asyncinfer.protocols.scheduling import MOST_NUMBERS
from asyncinfer.testing.rule_error import RuleError, WatchedCalls

__all__ = ["WatchedScheduler", "show"]

#: All that a request says, as a tuple.
_fields_of: Final = attrgetter(*(field.name for field in fields(RequestView)))
#: Seconds that the engine allows a call.
ALLOWED: Final = 0.0001
#: Late calls in a row that break the rule: a busy machine slows fewer.
LATE: Final = 20


class WatchedScheduler:
    """Passes every call on. Raises `RuleError` where the policy breaks a rule."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.constant = getattr(policy, "constant", False) is True
        self._calls = WatchedCalls(policy, "scheduling policy", LATE)

    def rank(self, request: RequestView, now: float) -> tuple[float, ...]:
        before = _fields_of(request)
        rank = self._calls.call("rank", lambda: show(request, now), request, now, allowed=ALLOWED)
        if _fields_of(request) != before:
            was = RequestView(*before)
            raise RuleError("read only", f"rank({was}, now={now}) made it {request}")
        if not isinstance(rank, tuple) or not all(isinstance(part, Real) for part in rank):
            what = "is not a tuple of numbers"
        elif len(rank) > MOST_NUMBERS:
            what = f"has more than {MOST_NUMBERS} numbers"
        elif any(part != part for part in rank):
            what = "has no order, for a part of it is NaN"
        else:
            return rank
        raise RuleError("shape", f"{show(request, now)} gave {rank!r}, which {what}")


def show(request: RequestView, now: float) -> str:
    """A call, for messages."""
    return f"rank({request}, now={now:g})"
