"""`random_events`: what an observer may be told of an engine, drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import Context
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

from asyncinfer.chunk import Timings, Usage
from asyncinfer.params import SamplingParams
from asyncinfer.protocols import (
    EngineEnded,
    EngineOpened,
    EventsDropped,
    FirstToken,
    ObserverEvent,
    RequestEnded,
    RequestPreempted,
    RequestStarted,
    RequestSubmitted,
    StepTaken,
)
from asyncinfer.stats import EngineStats

__all__ = ["SomethingNew", "random_events"]

OUTCOMES: Final[tuple[Literal["finished", "aborted", "failed", "closed"], ...]] = (
    "finished",
    "aborted",
    "failed",
    "closed",
)


@dataclass(frozen=True, slots=True)
class SomethingNew:
    """An event that the protocol does not know yet."""

    time: float


def random_events(
    seed: int, requests: int, *, steps: bool, drops: bool
) -> Iterator[ObserverEvent | SomethingNew]:
    """From `EngineOpened` to `EngineEnded`, with so many requests, a few at a time.

    Args:
        steps: with `StepTaken`.
        drops: some events between the two are dropped, as those of a slow observer are.
    """
    chance = Random(seed)
    told = dropped = 0
    yield EngineOpened(0.0, "a model", EngineStats)
    for event in _between(chance, requests, steps):
        told += 1
        if drops and chance.random() < 0.3:
            dropped += 1
            continue
        if dropped:
            yield EventsDropped(event.time, dropped)
            dropped = 0
        yield event
    yield EngineEnded(told + 1.0, "it died" if seed % 3 == 2 else None)


def _between(chance: Random, requests: int, steps: bool) -> Iterator[ObserverEvent | SomethingNew]:
    """Of requests in one context; a second passes from each event to the next."""
    context = Context()
    live: list[_FuzzRequest] = []
    opened = time = 0
    while live or opened < requests:
        time += 1
        if opened < requests and len(live) < 4 and chance.random() < 0.5:
            live.append(_FuzzRequest(chance, f"req-{opened}"))
            opened += 1
            yield live[-1].submitted(time, context)
        elif steps and chance.random() < 0.3:
            gaps = tuple(chance.uniform(1e-4, 10.0) for _ in range(chance.randrange(4)))
            yield StepTaken(time, len(gaps) + 1, 16 * len(gaps) + 1, len(gaps), gaps)
        elif chance.random() < 0.05:
            yield SomethingNew(time)
        elif live:
            request = chance.choice(live)
            event = request.goes_on(time)
            if isinstance(event, RequestEnded):
                live.remove(request)
            yield event


class _FuzzRequest:
    """One request; some end before they started, some without a token."""

    def __init__(self, chance: Random, request_id: str) -> None:
        self._chance = chance
        self._id = request_id
        self._answers = chance.choice((1, 1, 3))
        self._prompt = chance.randint(1, 10_000)
        self._began = 0.0
        self._started = self._first = False

    def submitted(self, time: float, context: Context) -> ObserverEvent:
        self._began = time
        scope, priority = self._chance.choice(("", "a", "b")), self._chance.randint(-1, 1)
        params = SamplingParams(n=self._answers, max_tokens=100)
        return RequestSubmitted(time, self._id, self._prompt, params, priority, scope, context)

    def goes_on(self, time: float) -> ObserverEvent:
        """The request's next event."""
        if self._chance.random() < 0.3:
            return self._ended(time)
        if not self._started:
            self._started = True
            return RequestStarted(time, self._id)
        if not self._first:
            self._first = True
            return FirstToken(time, self._id)
        return RequestPreempted(time, self._id, self._chance.randrange(self._answers))

    def _ended(self, time: float) -> RequestEnded:
        chance, count, total = self._chance, self._answers, time - self._began
        drawn = chance.randint(count, 100) if self._first else 0
        outcome = chance.choice(OUTCOMES)
        reasons: list[str | None] = [None] * count
        if outcome == "finished":
            reasons = [chance.choice(("stop", "length", "stopped")) for _ in range(count)]
        elif drawn and count > 1:
            reasons[0] = "stop"
        error = {"failed": "RequestFailed", "closed": "EngineClosed"}.get(outcome)
        return RequestEnded(
            time,
            self._id,
            outcome,
            tuple(reasons),
            Usage(self._prompt, chance.randrange(self._prompt), drawn),
            Timings(queued=total / 2, ttft=total / 2 if drawn else 0.0, total=total),
            error,
            "" if error is None else "it is told why",
        )
