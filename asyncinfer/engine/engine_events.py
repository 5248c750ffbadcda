"""`EngineEvents` turns the lives of requests into events for observers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import sub
from typing import Final, Literal, NamedTuple

from asyncinfer import plugins
from asyncinfer.config import EngineConfig
from asyncinfer.engine.request import End, Request, output_of
from asyncinfer.engine.stream_buffer import Outcome
from asyncinfer.errors import AsyncInferError, EngineClosed
from asyncinfer.grammar import GrammarCounters
from asyncinfer.protocols import (
    EngineEnded,
    EngineOpened,
    FirstToken,
    Observer,
    RequestEnded,
    RequestPreempted,
    RequestStarted,
    RequestSubmitted,
    StepTaken,
)
from asyncinfer.runtime import Runtime
from asyncinfer.scheduler import Step
from asyncinfer.speculation import DraftCounters
from asyncinfer.stats import EngineStats
from asyncinfer.telemetry import GuardedObserver, Observers

__all__ = ["EngineEvents", "open_events"]

_OUTCOMES: Final[dict[End | None, Literal["finished", "aborted", "failed", "closed"]]] = {
    End.FINISHED: "finished",
    End.ABORTED: "aborted",
    End.FAILED: "failed",
    End.CLOSED: "closed",
}


class _Counted(NamedTuple):
    """Totals of an engine, in the order in which `StepTaken` reports how each has grown."""

    masks: int
    mask_seconds: float
    forced_tokens: int
    accepted_tokens: int
    rejected_tokens: int

    @classmethod
    def of(cls, grammars: GrammarCounters, drafts: DraftCounters) -> _Counted:
        return cls(
            grammars.masks,
            grammars.mask_seconds,
            grammars.forced_tokens,
            drafts.accepted,
            drafts.rejected,
        )


class EngineEvents:
    """Decode thread only, but for `abandon`. An engine without observers has none, and asks for
    it only where something begins or ends, and once per step.

    Args:
        clock: of the times of events.
    """

    def __init__(self, observers: Observers, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.every_step = observers.every_step
        self._observers = observers
        #: The totals that observers were last told of.
        self._counted = _Counted(0, 0.0, 0, 0, 0)

    def opened(self, model: str, stats: Callable[[], EngineStats]) -> None:
        self._observers.start()
        self._observers.tell(EngineOpened(self._clock(), model, stats))

    def submitted(self, request: Request) -> None:
        request.announced = True
        self._observers.tell(_beginning(request))

    def started(self, request: Request, now: float) -> None:
        self._observers.tell(RequestStarted(now, request.id))

    def first_token(self, request: Request, now: float) -> None:
        self._observers.tell(FirstToken(now, request.id))

    def preempted(self, request: Request, index: int) -> None:
        self._observers.tell(RequestPreempted(self._clock(), request.id, index))

    def stepped(
        self, step: Step, now: float, grammars: GrammarCounters, drafts: DraftCounters
    ) -> None:
        """Tell of a step before its tokens are handed on, while `Request.last_token` is the token
        before. The counters are those of the engine."""
        drawn, gaps = 0, []
        for sequence, tokens in zip(step.sequences, step.drawn, strict=True):
            output = output_of(sequence)
            if output.ended or not tokens:
                continue
            drawn += len(tokens)
            if output.request.last_token is not None:
                gaps.append(now - output.request.last_token)
        before, counted = self._counted, _Counted.of(grammars, drafts)
        self._counted = counted
        self._observers.tell_step(
            StepTaken(
                now,
                len(step.slots),
                step.tokens,
                drawn,
                tuple(gaps),
                *map(sub, counted, before),
            )
        )

    def ended(self, requests: Iterable[Request], now: float) -> None:
        """Called once for each request."""
        self._observers.tell(*_ends(requests, now))

    def abandon(self, requests: Iterable[Request], error: AsyncInferError, now: float) -> None:
        """Tell of the ends of requests and engine, since the decode thread hangs. Watchdog only."""
        self._observers.abandon(_ends(requests, now), self._last(error))

    def close(self, error: AsyncInferError, on_told: Callable[[], object] = bool) -> None:
        """Tell of the engine's end, call `on_told`, and wait up to five seconds for observers."""
        self._observers.close(self._last(error), on_told)

    def discard(self) -> None:
        """Close observers of an engine that could not be opened."""
        self._observers.discard()

    def _last(self, error: AsyncInferError) -> EngineEnded:
        closed = isinstance(error, EngineClosed)
        return EngineEnded(self._clock(), None if closed else str(error))


def open_events(config: EngineConfig, runtime: Runtime) -> EngineEvents | None:
    """The observers of a configuration, none of them told anything yet; None without any.
    Raises `PluginError`."""
    if not config.observers:
        return None
    chosen: list[tuple[Observer, str]] = []
    try:
        for entry in config.observers:
            # One by one: those that were made are closed if the next cannot be.
            chosen.append(plugins.observers.choose(entry))  # noqa: PERF401
        return EngineEvents(Observers(chosen, runtime), runtime.clock)
    except BaseException:
        for observer, label in chosen:
            GuardedObserver(observer, label).close()
        raise


def _beginning(request: Request) -> RequestSubmitted:
    return RequestSubmitted(
        request.submitted,
        request.id,
        request.prompt_len,
        request.params,
        request.options.priority,
        request.options.cache_scope,
        request.context.copy(),
        request.compile_seconds,
    )


def _ends(requests: Iterable[Request], now: float) -> list[RequestSubmitted | RequestEnded]:
    """The ends of requests. One that ended before the decode thread had it is announced first."""
    events: list[RequestSubmitted | RequestEnded] = []
    for request in requests:
        if request.outcome is None:
            continue
        if not request.announced:
            request.announced = True
            events.append(_beginning(request))
        events.append(_end(request, request.outcome, now))
    return events


def _end(request: Request, outcome: Outcome, now: float) -> RequestEnded:
    error = outcome.error
    return RequestEnded(
        now,
        request.id,
        _OUTCOMES[request.end],
        # A request that ended while it was prepared has no answers.
        tuple(output.reason for output in request.outputs) or (None,) * request.params.n,
        outcome.usage,
        outcome.timings,
        None if error is None else type(error).__name__,
        "" if error is None else str(error),
    )
