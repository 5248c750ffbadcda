"""What an observer implements: it is told what happens to requests, and changes nothing.

An observer has one method, `observe(event)`. It must ignore events that it does not know, since a
later version may have more with the same protocol version.

Order, for each request that the engine took in::

    RequestSubmitted -> [RequestStarted] -> (FirstToken | RequestPreempted)* -> RequestEnded

with exactly one `RequestEnded`. All of it lies between `EngineOpened` and `EngineEnded`, after
which comes `close()` and nothing more. Events of one engine come one at a time, in
the order in which things happened. There are none of a request that is refused (`Overloaded`,
`InvalidRequest`).

Thread: one of the observer's own, never an event loop and never the decode thread, so it may
block, write files and use locks. It is woken some fifty times a second at most, so an event comes
up to 20 ms after what it tells. An observer that asks for it by `thread = "decode"` is called at
once, on the decode thread, and holds up every stream.

What may raise: nothing should. What `observe` raises is reported once, as the log event
`plugin_failed` with the observer's name; after three times in a row it is not called again. Up to
16,384 events wait for a slow observer (1,024 if they are `StepTaken`). Further events are dropped,
which is reported once and told to the observer by `EventsDropped`. A close waits a second for
observers, then leaves them behind. Whatever an observer does, no request is harmed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

from asyncinfer.chunk import Timings, Usage
from asyncinfer.params import SamplingParams
from asyncinfer.stats import EngineStats

__all__ = [
    "OBSERVER_PROTOCOL_VERSION",
    "EngineEnded",
    "EngineOpened",
    "EventsDropped",
    "FirstToken",
    "Observer",
    "ObserverEvent",
    "RequestEnded",
    "RequestPreempted",
    "RequestStarted",
    "RequestSubmitted",
    "StepTaken",
]

OBSERVER_PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class EngineOpened:
    """The engine takes requests."""

    #: When it happened, in monotonic seconds, as in every event.
    time: float
    #: The folder or hub id, or the class of the model source.
    model: str
    #: Returns the current counters, from any thread, without waiting; all are zero once the engine
    #: is gone.
    stats: Callable[[], EngineStats]


@dataclass(frozen=True, slots=True)
class EngineEnded:
    """The engine was closed, or died."""

    time: float
    #: Why it died; None if it was closed.
    cause: str | None = None


@dataclass(frozen=True, slots=True)
class RequestSubmitted:
    """A request waits for its turn."""

    time: float
    #: `Stream.request_id`; unique in one engine. A stream whose beginning was cancelled and that is
    #: begun again makes a request of its own, "req-3.2" after "req-3".
    request_id: str
    #: 0 if the request ended while its prompt was prepared.
    prompt_tokens: int
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    cache_scope: str = ""
    #: A copy of the context that `stream()` was called in, for what it knows of a trace:
    #: `event.context.copy().run(...)`; another observer may be in this one.
    context: Context = field(default_factory=Context, compare=False, repr=False)
    #: Seconds that the format of its answers took to compile, before they wait; 0 where it was
    #: compiled already; None where answers have no format.
    compile_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """A request left the queue for the first time: its prompt is computed from now on."""

    time: float
    request_id: str


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of its first answer is on its way to the consumer."""

    time: float
    request_id: str


@dataclass(frozen=True, slots=True)
class RequestPreempted:
    """One answer of a request gave its blocks back and waits again; none of its tokens is lost."""

    time: float
    request_id: str
    #: Which of the `n` answers.
    index: int = 0


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The one end of a request."""

    time: float
    request_id: str
    #: "finished": every answer is complete. "aborted": its consumer left. "failed": by an error
    #: of its own. "closed": with the engine.
    outcome: Literal["finished", "aborted", "failed", "closed"]
    #: One per answer: "stop", "length", "repetition", "stopped", or None where the answer did not
    #: end.
    finish_reasons: tuple[str | None, ...] = ()
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    #: Class and message of the consumer's error, if any.
    error: str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class StepTaken:
    """A step was computed. Only for observers with `every_step = True`."""

    time: float
    #: Answers in it, and their query tokens: those of prompts, and one per answer that goes on.
    rows: int
    query_tokens: int
    #: Answer tokens drawn.
    drawn_tokens: int
    #: Seconds since the last answer, for each token that was not the first of its request.
    gaps: tuple[float, ...] = ()
    #: Since the last one: masks made for tokens to be drawn under a format, and the seconds that
    #: took; tokens that their format left no choice for, and that were not drawn.
    masks: int = 0
    mask_seconds: float = 0.0
    forced_tokens: int = 0
    #: Drafted tokens that were right, and those that were wrong.
    accepted_tokens: int = 0
    rejected_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EventsDropped:
    """`count` events were dropped since the last `EventsDropped`, as the observer was too slow.
    Sent when the queue has room again, so it may come after later events."""

    time: float
    count: int


ObserverEvent: TypeAlias = (
    EngineOpened
    | EngineEnded
    | RequestSubmitted
    | RequestStarted
    | FirstToken
    | RequestPreempted
    | RequestEnded
    | StepTaken
    | EventsDropped
)


@runtime_checkable
class Observer(Protocol):
    """Receives the events of one engine. A subclass inherits everything but `observe`."""

    #: Whether it receives `StepTaken`, which costs the decode thread some 0.2 us per token.
    every_step: ClassVar[bool] = False
    #: "own": a thread that belongs to the observer. "decode": the decode thread, between two
    #: steps; there each call may take a millisecond. Time beyond that is a debt, which unused time
    #: pays off; an observer that owes a second is not called again.
    thread: ClassVar[Literal["own", "decode"]] = "own"

    @abstractmethod
    def observe(self, event: ObserverEvent) -> None:
        """Receive an event. Events are frozen, since all observers share them."""

    def close(self) -> None:
        """The engine has ended and no event will follow: release all resources. Called once, on the
        observer's thread, also for an observer that is called no more because of its faults."""
        return None
