"""`WatchedScheduler`: checks each rank of a scheduling policy against the rules of its protocol."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from numbers import Real
from time import perf_counter
from typing import Final

from asyncinfer.plugins.supervision import interrupted, recorded
from asyncinfer.protocols import RequestView, SchedulingPolicy
from asyncinfer.protocols.scheduling import MOST_NUMBERS
from asyncinfer.testing.rule_error import RuleError

__all__ = ["WatchedScheduler", "show"]

#: Seconds that the engine allows a call.
ALLOWED: Final = 0.0001
#: Calls in a row that take longer: a busy machine does not slow so many.
LATE: Final = 20


class WatchedScheduler:
    """Passes everything on. Raises `RuleError` where the policy breaks a rule."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.constant = getattr(policy, "constant", False) is True
        self._policy = policy
        self._late = 0

    def rank(self, request: RequestView, now: float) -> tuple[float, ...]:
        before, began = repr(request), perf_counter()
        try:
            with recorded(f"scheduling policy {type(self._policy).__qualname__}", "rank"):
                rank = self._policy.rank(request, now)
        except FrozenInstanceError as error:
            raise RuleError("read only", f"{show(request, now)} raised {error!r}") from error
        except BaseException as error:
            if interrupted(error):
                raise
            raise RuleError("never raises", f"{show(request, now)} raised {error!r}") from error
        spent = perf_counter() - began
        if repr(request) != before:
            raise RuleError("read only", f"rank({before}, now={now}) made it {request}")
        self._late = self._late + 1 if spent > ALLOWED else 0
        if self._late == LATE:
            raise RuleError(
                "time",
                f"{show(request, now)} took {spent * 1e3:.3g} ms, as {LATE} calls in a row took "
                f"too long; the engine allows {ALLOWED * 1e3:g} ms and would replace the policy",
            )
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
