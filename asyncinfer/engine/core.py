"""The decode loop's body, one call at a time: `Core.pump` is inbox -> schedule -> run -> deliver.

It knows no thread and takes its clock as an argument, so that a whole engine can be stepped
inline in a simulation. `thread.py` calls it from the decode thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from heapq import heappop, heappush
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

from asyncinfer.chunk import EngineStats
from asyncinfer.config import EngineConfig
from asyncinfer.engine import output
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.job import Answer, Job
from asyncinfer.engine.ports import Port
from asyncinfer.errors import DeadlineExceeded, EngineClosed, RequestFailed, StreamStalled
from asyncinfer.engine.source import Loaded
from asyncinfer.scheduler import Request, Scheduler, StepPlan
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
    ) -> None:
        self.loaded = loaded
        self.runner = loaded.runner
        self.scheduler = scheduler
        self.config = config
        self.admission = admission
        #: One per event loop; other threads add to it.
        self.ports = ports
        self.clock = clock
        #: `SimpleQueue.put` is reentrant: finalizers may call it from any thread at any point.
        self.inbox: SimpleQueue[tuple[Command, Any]] = SimpleQueue()
        self.jobs: set[Job] = set()
        self.stats = EngineStats()
        #: When a close stops waiting for what still runs; None while open.
        self.drain_until: float | None = None
        #: When the step that runs now was begun; None between steps.
        self.step_began: float | None = None
        self._in_flight: deque[tuple[StepPlan, object]] = deque()
        self._deadlines: list[tuple[float, int, Job]] = []
        self._order = count()
        self._parked: set[Job] = set()
        self._ended = self._aborted = self._failed = 0

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
        return self.drain_until is not None and not self.jobs and not self._in_flight

    def pump(self) -> None:
        """Take in what was posted, run one step, hand out its tokens."""
        now = self.clock()
        self._read_inbox(now)
        self._expire(now)
        self._step(now)
        self._publish()
        self._flush()

    def wait_for_post(self, timeout: float) -> None:
        """Sleep until something is posted or a timeout is due."""
        if self._deadlines:
            timeout = min(timeout, self._deadlines[0][0] - self.clock())
        if self.drain_until is not None:
            timeout = min(timeout, self.drain_until - self.clock())
        try:
            command, argument = self.inbox.get(timeout=max(timeout, 0.0))
        except Empty:
            return
        self._obey(command, argument, self.clock())

    def fail_all(self, error: Callable[[], BaseException]) -> None:
        """End every job, also those still in the inbox. What was delivered can be read."""
        now = self.clock()
        while True:
            try:
                command, argument = self.inbox.get_nowait()
            except Empty:
                break
            if command is Command.SUBMIT:
                self.jobs.add(argument)
        for job in tuple(self.jobs):
            self._end(job, now, error())
        self._flush()

    def abandon(self, error: Callable[[], BaseException]) -> None:
        """Tell every consumer while the decode thread hangs in a step. Any thread; touches
        nothing but mailboxes."""
        for job in tuple(self.jobs):
            job.mailbox.end(job.outcome(self.clock(), error()))
            job.mailbox.port.post(job.mailbox.port.wake, job.mailbox)

    def _read_inbox(self, now: float) -> None:
        while not self.inbox.empty():
            command, argument = self.inbox.get_nowait()
            self._obey(command, argument, now)

    def _obey(self, command: Command, argument: Any, now: float) -> None:
        if command is Command.SUBMIT:
            self._submit(argument, now)
        elif command is Command.ABORT:
            self._abort(argument, now)
        elif command is Command.STOP:
            for answer in argument.answers:
                if not answer.ended and not argument.ended:
                    output.finish(answer, "stopped")
                    self._finish(answer, now)
        elif command is Command.RESUME:
            self._resume(argument)
        elif self.drain_until is None or now + argument < self.drain_until:
            self.drain_until = now + argument

    def _submit(self, job: Job, now: float) -> None:
        self.jobs.add(job)
        if self.drain_until is not None:
            self._end(job, now, EngineClosed("the engine is closing"))
            return
        if job.deadline is not None:
            heappush(self._deadlines, (job.deadline, next(self._order), job))
        for answer in job.answers:
            self.scheduler.add(answer.request)

    def _abort(self, job: Job, now: float) -> None:
        if not job.ended:
            self._aborted += 1
            emit("request_aborted", job.context, request_id=job.request_id)
            self._end(job, now, None)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            job = heappop(self._deadlines)[2]
            if not job.ended:
                late = now - job.submitted
                self._fail(job, now, DeadlineExceeded(f"{job.request_id}: deadline after {late:.3f} s"))
        if self._parked:
            oldest = now - self.config.stall_timeout
            for job in [job for job in self._parked if job.parked_at <= oldest]:
                message = f"{job.request_id}: not read for {self.config.stall_timeout:g} s"
                self._fail(job, now, StreamStalled(message))
        if any(port.closed for port in tuple(self.ports.values())):
            for job in [job for job in self.jobs if job.mailbox.port.closed]:
                self._abort(job, now)
        if self.drain_until is not None and now >= self.drain_until:
            for job in tuple(self.jobs):
                self._end(job, now, EngineClosed(f"{job.request_id}: the engine was closed"))

    def _step(self, now: float) -> None:
        self.step_began = now
        while len(self._in_flight) < self.config.overlap:
            plan = self.scheduler.schedule(now)
            if plan is None:
                break
            for join in plan.joins:
                self._started(join.slot, now)
            self._in_flight.append((plan, self.runner.launch(plan)))
        if self._in_flight:
            plan, handle = self._in_flight.popleft()
            self._commit(plan, handle)
        self.step_began = None

    def _started(self, slot: int, now: float) -> None:
        request = self.scheduler.tenant(slot)
        assert request is not None
        job = _answer(request).job
        if job.started is None:
            job.started = now
            emit("request_admitted", job.context, request_id=job.request_id)

    def _commit(self, plan: StepPlan, handle: object) -> None:
        result = self.runner.collect(handle)
        now = self.clock()
        advanced = self.scheduler.update(plan, result, now)
        for request, error in advanced.failed:
            job = _answer(request).job
            self._fail(job, now, _named(job, error))
        logprobs, prompt_logprobs = result.logprobs, result.prompt_logprobs
        for request, tokens, reason, row in zip(
            advanced.requests, advanced.tokens, advanced.reasons, advanced.rows, strict=True
        ):
            answer = _answer(request)
            job = answer.job
            if answer.ended:
                continue
            if row in prompt_logprobs:
                job.add_prompt_logprobs(
                    plan.starts[row] + 1, output.token_logprobs(prompt_logprobs[row])
                )
            if not tokens:
                continue
            if job.first_token is None:
                job.first_token = now
            job.last_token = now
            its = output.token_logprobs(logprobs[row]) if row in logprobs else ()
            reason = output.advance(answer, tokens, reason, its)
            if reason is not None:
                self._finish(answer, now)
            elif job.mailbox.full and job.on_full != "coalesce":
                self._is_full(answer, now)

    def _is_full(self, answer: Answer, now: float) -> None:
        job = answer.job
        if job.on_full == "cancel":
            bound = job.mailbox.capacity
            self._fail(job, now, RequestFailed(f"{job.request_id}: buffer={bound} tokens is full"))
            return
        self.scheduler.pause(answer.request)
        job.parked.append(answer)
        if job not in self._parked:
            job.parked_at = now
            self._parked.add(job)
        job.mailbox.parked = True
        # The consumer may have emptied the mailbox before it could see `parked`.
        if job.mailbox.drained:
            self._resume(job)

    def _resume(self, job: Job) -> None:
        job.mailbox.parked = False
        self._parked.discard(job)
        parked, job.parked = job.parked, []
        for answer in parked:
            if not answer.ended and not job.ended:
                self.scheduler.resume(answer.request)

    def _finish(self, answer: Answer, now: float) -> None:
        """One answer is complete; its last chunk has been put."""
        answer.ended = True
        self.scheduler.finish(answer.request, now)
        job = answer.job
        job.open_answers -= 1
        if job.open_answers == 0:
            emit("request_finished", job.context, request_id=job.request_id)
            self._end(job, now, None)

    def _fail(self, job: Job, now: float, error: Exception) -> None:
        self._failed += 1
        emit("request_failed", job.context, request_id=job.request_id, error=str(error))
        self._end(job, now, error)

    def _end(self, job: Job, now: float, error: BaseException | None) -> None:
        """The one end of a job, whatever brought it about."""
        if job.ended:
            return
        job.ended = True
        for answer in job.answers:
            if not answer.ended:
                answer.ended = True
                self.scheduler.finish(answer.request, now)
        self.jobs.discard(job)
        self._parked.discard(job)
        self._ended += 1
        self.admission.leave(job.params.n)
        job.mailbox.end(job.outcome(now, error))

    def _publish(self) -> None:
        its = self.scheduler
        self.stats = EngineStats(
            running=its.running,
            waiting=its.waiting,
            paused=its.paused,
            blocks_total=its.blocks_total,
            blocks_free=its.blocks_free,
            blocks_cached=its.blocks_cached,
            prompt_tokens=its.prompt_tokens,
            cached_tokens=its.cached_tokens,
            generated_tokens=its.generated_tokens,
            preemptions=its.preemptions,
            steps=its.steps,
            finished=self._ended - self._aborted - self._failed,
            aborted=self._aborted,
            failed=self._failed,
            refused=self.admission.refused,
        )

    def _flush(self) -> None:
        for port in tuple(self.ports.values()):
            port.flush()


def _answer(request: Request) -> Answer:
    answer = request.owner
    assert isinstance(answer, Answer)
    return answer


def _named(job: Job, error: Exception) -> RequestFailed:
    """`error` as this request's own; what the runner raised is its cause."""
    if isinstance(error, RequestFailed):
        return error
    failed = RequestFailed(f"{job.request_id}: {error}")
    failed.__cause__ = error
    return failed
