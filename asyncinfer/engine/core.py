"""The decode loop's body, one call at a time: `Core.pump` is inbox -> schedule -> run -> deliver.

It knows no thread and takes its clock as an argument, so that a whole engine can be stepped
inline in a simulation. `thread.py` calls it from the decode thread.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Any

from asyncinfer.chunk import EngineStats
from asyncinfer.config import EngineConfig
from asyncinfer.engine import output
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.job import Answer, Job
from asyncinfer.engine.jobs import Jobs, answer_of
from asyncinfer.engine.pace import Pace
from asyncinfer.engine.ports import Batch, Port
from asyncinfer.engine.source import Loaded
from asyncinfer.engine.watch import Watch
from asyncinfer.errors import AsyncInferError, EngineClosed, RequestFailed
from asyncinfer.scheduler import Scheduler, StepPlan
from asyncinfer.telemetry import emit

__all__ = ["Command", "Core"]


class Command(Enum):
    """What other threads ask of the decode thread, by `Core.post`."""

    SUBMIT = "submit"
    ABORT = "abort"
    STOP = "stop"
    RESUME = "resume"
    CLOSE = "close"


class Core:
    """Everything an engine does on its decode thread."""

    def __init__(
        self,
        loaded: Loaded,
        scheduler: Scheduler,
        config: EngineConfig,
        admission: Admission,
        ports: dict[object, Port],
        clock: Callable[[], float] = time.monotonic,
        watch: Watch | None = None,
    ) -> None:
        self.loaded = loaded
        self.runner = loaded.runner
        self.scheduler = scheduler
        self.jobs = Jobs(scheduler, config, admission, watch)
        #: Tells observers; None without any.
        self.watch = watch
        #: `SimpleQueue.put` is reentrant: finalizers may call it from any thread at any point.
        self.inbox: SimpleQueue[tuple[Command, Any]] = SimpleQueue()
        self.stats: EngineStats
        #: When a close stops waiting for what still runs; None while open.
        self.drain_until: float | None = None
        #: When the step that runs now was begun; None between steps.
        self.step_began: float | None = None
        self._admission = admission
        #: One per event loop; other threads add to it.
        self._ports = ports
        self._clock = clock
        self._pace = Pace(config.overlap, self.runner.spec.overlap)
        self._in_flight: deque[tuple[StepPlan, object]] = deque()
        self._publish()

    def post(self, command: Command, argument: Any = None) -> None:
        """Ask for something, from any thread. Never blocks, never raises."""
        self.inbox.put((command, argument))

    @property
    def busy(self) -> bool:
        """Whether the next pump has something to compute."""
        return bool(self._in_flight) or self.scheduler.has_work

    @property
    def done(self) -> bool:
        """Closed, and nothing is left to wait for."""
        return self.drain_until is not None and not self.jobs.live and not self._in_flight

    def pump(self) -> None:
        """Take in what was posted, run one step, hand out its tokens."""
        now = self._clock()
        while not self.inbox.empty():
            self._obey(*self.inbox.get_nowait(), now)
        self.jobs.expire(now, self.drain_until)
        self._step(now)
        self._publish()
        self._flush(now)

    def wait_for_post(self, timeout: float) -> None:
        """Sleep until something is posted or runs out of time, at most `timeout` seconds."""
        due = self.jobs.next_deadline
        if self.drain_until is not None:
            due = min(due, self.drain_until)
        try:
            post = self.inbox.get(timeout=max(0.0, min(timeout, due - self._clock())))
        except Empty:
            return
        self._obey(*post, self._clock())

    def probe_loops(self) -> None:
        """Look whether the event loops still exist: a parked stream posts nothing to its own."""
        for port in tuple(self._ports.values()):
            port.probe()

    def fail_all(self, error: Callable[[], BaseException]) -> None:
        """End every job, also those still in the inbox. What was delivered can be read.

        Nothing is asked of the scheduler: what broke the loop may have left it in any state.
        """
        now = self._clock()
        while not self.inbox.empty():
            command, argument = self.inbox.get_nowait()
            if command is Command.SUBMIT:
                self.jobs.forsake(argument, now, error())
        for job in tuple(self.jobs.live):
            self.jobs.forsake(job, now, error())
        self.stats = dataclasses.replace(self.stats, running=0, waiting=0, paused=0)
        for port in tuple(self._ports.values()):
            port.flush()

    def abandon(self, error: Callable[[], AsyncInferError]) -> None:
        """Tell every consumer while the decode thread hangs in a step. Any thread; touches
        nothing but what goes to the loops."""
        now = self._clock()
        for port in tuple(self._ports.values()):
            # What ended before the step began.
            port.flush()
        ends = [(job, job.outcome(now, error())) for job in tuple(self.jobs.live)]
        for job, outcome in ends:
            job.mailbox.port.send(Batch((job.mailbox, outcome)))
        if self.watch is not None:
            self.watch.abandon(ends, error(), now)

    def _obey(self, command: Command, argument: Any, now: float) -> None:
        match command:
            case Command.SUBMIT if argument.mailbox.port.closed:
                self.jobs.forsake(argument, now, EngineClosed("the event loop is closed"))
                argument.mailbox.port.flush()
            case Command.SUBMIT if self.drain_until is None:
                self.jobs.add(argument)
            case Command.SUBMIT:
                self.jobs.forsake(argument, now, EngineClosed("the engine is closing"))
            case Command.ABORT:
                self.jobs.abort(argument, now)
            case Command.STOP:
                self.jobs.stop(argument, now)
            case Command.RESUME:
                self.jobs.resume(argument)
            case Command.CLOSE:
                # A second close may be more impatient than the first, not less.
                before = self.drain_until
                self.drain_until = now + argument
                if before is not None:
                    self.drain_until = min(before, self.drain_until)

    def _step(self, now: float) -> None:
        self.step_began = now
        while len(self._in_flight) < self._pace.ahead:
            plan = self.scheduler.schedule(now)
            if plan is None:
                break
            for join in plan.joins:
                self._started(join.slot, now)
            try:
                handle = self.runner.launch(plan)
            except MemoryError as error:
                self._retract(plan, error, now)
                continue
            self._in_flight.append((plan, handle))
        if self._in_flight:
            self._commit(*self._in_flight.popleft())
        self._pace.stepped(self._clock() if self._in_flight else None)
        self.step_began = None

    def _retract(self, plan: StepPlan, error: MemoryError, now: float) -> None:
        """The device had no room for a step: go on in smaller ones."""
        emit("step_retracted", tokens=plan.tokens, rows=len(plan.slots), error=str(error))
        for request in self.scheduler.retract(plan, now):
            job = answer_of(request).job
            self.jobs.fail(job, now, _named(job, error))

    def _started(self, slot: int, now: float) -> None:
        request = self.scheduler.tenant(slot)
        assert request is not None
        job = answer_of(request).job
        if job.started is None:
            job.started = now
            emit("request_admitted", job.context, request_id=job.request_id)
            if self.watch is not None:
                self.watch.started(job, now)

    def _commit(self, plan: StepPlan, handle: object) -> None:
        result = self.runner.collect(handle)
        now = self._clock()
        advanced = self.scheduler.update(plan, result, now)
        if self.watch is not None and self.watch.every_step:
            self.watch.stepped(plan, advanced, now)
        for request, error in advanced.failed:
            job = answer_of(request).job
            self.jobs.fail(job, now, _named(job, error))
        logprobs, prompt_logprobs = result.logprobs, result.prompt_logprobs
        # Runs for every token: what would be a call each is written out here.
        for request, tokens, reason, row in zip(
            advanced.requests, advanced.tokens, advanced.reasons, advanced.rows, strict=True
        ):
            answer = request.owner
            assert isinstance(answer, Answer)
            job = answer.job
            if answer.ended:
                continue
            if prompt_logprobs and row in prompt_logprobs:
                position = plan.starts[row] + 1
                job.add_prompt_logprobs(position, output.token_logprobs(prompt_logprobs[row]))
            if not tokens:
                continue
            if job.first_token is None:
                job.first_token = now
                if self.watch is not None:
                    self.watch.first_token(job, now)
            job.last_token = now
            its = output.token_logprobs(logprobs[row]) if logprobs and row in logprobs else ()
            ended = output.advance(answer, tokens, reason, its)
            if ended is not None:
                self.jobs.finish(answer, ended, now)
            elif job.delivered >= job.room and job.full and job.on_full != "coalesce":
                self.jobs.park(answer, now)

    def _publish(self) -> None:
        its, counters, jobs = self.scheduler, self.scheduler.counters, self.jobs
        self.stats = EngineStats(
            running=its.running,
            waiting=its.waiting,
            paused=its.paused,
            blocks_total=its.blocks_total,
            blocks_free=its.blocks_free,
            blocks_cached=its.blocks_cached,
            window_pages_total=its.window_pages_total,
            window_pages_free=its.window_pages_free,
            window_pages_cached=its.window_pages_cached,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            steps=counters.steps,
            finished=jobs.finished,
            aborted=jobs.aborted,
            failed=jobs.failed,
            refused=self._admission.refused,
        )

    def _flush(self, now: float) -> None:
        for loop, port in tuple(self._ports.items()):
            port.flush()
            if port.closed:
                # Nobody can read what belongs to an event loop that is gone.
                for job in [job for job in self.jobs.live if job.mailbox.port is port]:
                    self.jobs.abort(job, now)
                port.flush()
                del self._ports[loop]


def _named(job: Job, error: Exception) -> RequestFailed:
    """`error` as this request's own; what the runner raised is its cause."""
    if isinstance(error, RequestFailed):
        return error
    failed = RequestFailed(f"{job.request_id}: {error or repr(error)}")
    failed.__cause__ = error
    return failed
