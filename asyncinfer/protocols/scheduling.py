"""What a scheduling policy implements: which waiting request goes first, who is preempted."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

__all__ = ["SCHEDULING_PROTOCOL_VERSION", "RequestView", "SchedulingPolicy"]

SCHEDULING_PROTOCOL_VERSION = 1


class RequestView(Protocol):
    """The part of a request a policy may read."""

    @property
    def id(self) -> int:
        """Grows with submission: a total order of arrival."""

    @property
    def priority(self) -> int:
        """Larger is more urgent."""

    @property
    def arrival(self) -> float:
        """Monotonic seconds."""

    @property
    def deadline(self) -> float | None:
        """Monotonic seconds, None without one."""

    @property
    def prompt_len(self) -> int: ...

    @property
    def preemptions(self) -> int: ...


@runtime_checkable
class SchedulingPolicy(Protocol):
    """Orders requests. Pure: the same arguments give the same answer; no clock of its own.
    Called on the engine's decode thread only: when a request begins to wait, when somebody has to
    be preempted, and for all that wait about four times a second. A policy whose ranks never
    change with `now` may say so with an attribute `constant = True`, which spares the last.

    One that raises, or whose rank is not a tuple of numbers, is reported once and replaced by
    first-come-first-served.
    """

    def rank(self, request: RequestView, now: float) -> tuple[float, ...]:
        """Sort key of a request; the smallest is admitted first, the largest preempted first.
        Ties go to the earlier arrival."""
