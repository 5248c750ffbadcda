"""The shipped scheduling policies. Their ranks are constant over a request's life, so that a
queue once ordered stays ordered."""

from __future__ import annotations

from asyncinfer.protocols.scheduling import RequestView, SchedulingPolicy

__all__ = ["FCFS", "POLICIES", "Deadline", "Priority"]


class FCFS:
    """First come, first served."""

    constant = True

    def rank(self, request: RequestView, now: float) -> tuple[float, ...]:
        return (request.arrival,)


class Priority:
    """More urgent first, with ageing: `ageing` seconds of waiting count as much as one step of
    priority, so that whoever waits long enough overtakes and nothing starves.

    The urgency at `now` is `priority + (now - arrival) / ageing`; `now` cancels out of every
    comparison.
    """

    constant = True

    def __init__(self, ageing: float = 30.0) -> None:
        if not ageing > 0:
            raise ValueError(f"ageing={ageing!r}: must be > 0 seconds")
        self.ageing = ageing

    def rank(self, request: RequestView, now: float) -> tuple[float, ...]:
        return (request.arrival / self.ageing - request.priority,)


class Deadline:
    """Earliest deadline first. A request without one counts as due `patience` seconds after its
    arrival, so that a stream of deadlines does not starve it."""

    constant = True

    def __init__(self, patience: float = 60.0) -> None:
        if not patience > 0:
            raise ValueError(f"patience={patience!r}: must be > 0 seconds")
        self.patience = patience

    def rank(self, request: RequestView, now: float) -> tuple[float, ...]:
        due = request.deadline
        return (request.arrival + self.patience if due is None else due,)


#: The policies that ship with the package, which `Ranking` calls without a supervisor. All names
#: that `EngineConfig.scheduler` takes are in `plugins/groups.py`.
POLICIES: dict[str, type[SchedulingPolicy]] = {
    "deadline": Deadline,
    "fcfs": FCFS,
    "priority": Priority,
}
