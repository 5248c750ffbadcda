"""The protocol of scheduling policies, which rank waiting requests and choose whom to preempt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["SCHEDULING_PROTOCOL_VERSION", "RequestView", "SchedulingPolicy"]

SCHEDULING_PROTOCOL_VERSION = 1
#: The most numbers in a rank.
MOST_NUMBERS = 16


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a policy sees of a request: a copy, so that a policy cannot change the request. Writing
    to it is an `AttributeError`."""

    #: Grows with submission: a total order of arrival.
    id: int
    #: Larger is more urgent.
    priority: int = 0
    #: When it was submitted, in monotonic seconds.
    arrival: float = 0.0
    #: Monotonic seconds, None without one.
    deadline: float | None = None
    #: Tokens of the prompt.
    prompt_len: int = 1
    #: How often it was preempted: it gave its blocks back and had to wait again.
    preemptions: int = 0


@runtime_checkable
class SchedulingPolicy(Protocol):
    """Orders requests. Pure: the same arguments give the same answer; no clock of its own.
    Called on the engine's decode thread only: when a request begins to wait, when a request has
    to be preempted, and about four times a second for all that wait. A policy whose ranks never
    change with `now` may have an attribute `constant = True`, and is then not called for the last.

    Each call may take 0.1 ms; what it takes beyond is a debt that later calls pay off with what
    they leave. A policy that raises, owes a second, or whose rank is not a tuple of up to
    `MOST_NUMBERS` numbers, is reported once and replaced by first-come-first-served.
    """

    def rank(self, request: RequestView, now: float) -> tuple[float, ...]:
        """Sort key of a request: a tuple of finite or infinite numbers, never NaN. The smallest is
        admitted first, the largest preempted first; ties go to the smaller `id`."""
