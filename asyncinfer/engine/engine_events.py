"""`EngineEvents`: turns what happens to jobs into events, for observers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Literal

from asyncinfer import plugins
from asyncinfer.chunk import EngineStats
from asyncinfer.config import EngineConfig
from asyncinfer.engine.job import End, Job
from asyncinfer.engine.output_stream import OutputStream
from asyncinfer.engine.stream_buffer import Outcome
from asyncinfer.errors import AsyncInferError, EngineClosed
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
from asyncinfer.scheduler import Step
from asyncinfer.telemetry import GuardedObserver, Observers

__all__ = ["EngineEvents", "open_events"]

_OUTCOMES: Final[dict[End | None, Literal["finished", "aborted", "failed", "closed"]]] = {
    End.FINISHED: "finished",
    End.ABORTED: "aborted",
    End.FAILED: "failed",
    End.CLOSED: "closed",
}


class EngineEvents:
    """Decode thread only, but for `abandon`. An engine without observers has none, and asks for
    it only where something begins or ends, and once per step."""

    def __init__(self, observers: Observers) -> None:
        self.every_step = observers.every_step
        self._observers = observers

    def opened(self, model: str, stats: Callable[[], EngineStats]) -> None:
        self._observers.start()
        self._observers.tell(EngineOpened(time.monotonic(), model, stats))

    def submitted(self, job: Job) -> None:
        job.announced = True
        self._observers.tell(_beginning(job))

    def started(self, job: Job, now: float) -> None:
        self._observers.tell(RequestStarted(now, job.request_id))

    def first_token(self, job: Job, now: float) -> None:
        self._observers.tell(FirstToken(now, job.request_id))

    def preempted(self, job: Job, index: int) -> None:
        self._observers.tell(RequestPreempted(time.monotonic(), job.request_id, index))

    def stepped(self, step: Step, now: float) -> None:
        """Before the step's tokens are handed on: what a job knows of is its last token."""
        drawn, gaps = 0, []
        for row, tokens in zip(step.advanced, step.drawn, strict=True):
            output = step.sequences[row].owner
            assert isinstance(output, OutputStream)
            if output.ended:
                continue
            drawn += len(tokens)
            if tokens and output.job.last_token is not None:
                gaps.append(now - output.job.last_token)
        self._observers.tell_step(StepTaken(now, len(step.slots), step.tokens, drawn, tuple(gaps)))

    def ended(self, job: Job, outcome: Outcome, now: float) -> None:
        """Called once for each job. One that ended before the decode thread had it begins here."""
        if not job.announced:
            self.submitted(job)
        self._observers.tell(_end(job, outcome, now))

    def abandon(self, jobs: list[Job], error: AsyncInferError, now: float) -> None:
        """The decode thread hangs, and may for ever: tell the observers that have a thread of
        their own. Watchdog only."""
        for job in jobs:
            if job.outcome is not None:
                if not job.announced:
                    self._observers.tell_threads(_beginning(job))
                self._observers.tell_threads(_end(job, job.outcome, now))
        self._observers.close_threads(_last(error))

    def close(self, error: AsyncInferError) -> None:
        """The engine has ended. Waits for the observers, a second at most."""
        self._observers.close(_last(error))

    def discard(self) -> None:
        """The engine could not be opened."""
        self._observers.discard()


def open_events(config: EngineConfig) -> EngineEvents | None:
    """The observers of a configuration, none of them told anything yet; None without any.
    Raises `PluginError`."""
    if not config.observers:
        return None
    chosen: list[tuple[Observer, str]] = []
    try:
        for entry in config.observers:
            # One by one: those that were made are closed if the next cannot be.
            chosen.append(plugins.observers.choose(entry))  # noqa: PERF401
        return EngineEvents(Observers(chosen))
    except BaseException:
        for observer, label in chosen:
            GuardedObserver(observer, label).close()
        raise


def _last(error: AsyncInferError) -> EngineEnded:
    closed = isinstance(error, EngineClosed)
    return EngineEnded(time.monotonic(), None if closed else str(error))


def _beginning(job: Job) -> RequestSubmitted:
    return RequestSubmitted(
        job.submitted,
        job.request_id,
        job.prompt_len,
        job.params,
        job.options.priority,
        job.options.cache_scope,
        job.context.copy(),
    )


def _end(job: Job, outcome: Outcome, now: float) -> RequestEnded:
    error = outcome.error
    return RequestEnded(
        now,
        job.request_id,
        _OUTCOMES[job.end],
        # A job that ended while it was prepared has no answers.
        tuple(output.reason for output in job.outputs) or (None,) * job.params.n,
        outcome.usage,
        outcome.timings,
        None if error is None else type(error).__name__,
        "" if error is None else str(error),
    )
