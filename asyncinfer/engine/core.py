"""`Core.step`, the body of the decode loop: inbox -> schedule -> run -> deliver.

It knows no thread and takes its clock as an argument, so that a whole engine can be stepped
inline in a simulation. `thread.py` calls it from the decode thread.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from asyncinfer.chunk import EngineStats
from asyncinfer.config import EngineConfig
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.engine_events import EngineEvents
from asyncinfer.engine.inbox import Command, Inbox
from asyncinfer.engine.job import End, Job, Phase
from asyncinfer.engine.jobs import Jobs, output_of
from asyncinfer.engine.loop_bridge import Batch, LoopBridge
from asyncinfer.engine.output_stream import OutputStream
from asyncinfer.engine.pace import Pace
from asyncinfer.engine.source import Loaded
from asyncinfer.errors import AsyncInferError, EngineClosed
from asyncinfer.scheduler import Scheduler, Step
from asyncinfer.telemetry import emit
from asyncinfer.text import panicked

__all__ = ["Core"]


class Core:
    """Everything an engine does on its decode thread."""

    def __init__(
        self,
        loaded: Loaded,
        scheduler: Scheduler,
        config: EngineConfig,
        admission: Admission,
        bridges: dict[object, LoopBridge],
        clock: Callable[[], float] = time.monotonic,
        events: EngineEvents | None = None,
        faults: Sequence[str] = (),
    ) -> None:
        self.loaded = loaded
        #: Faults of plugins that the engine goes on without.
        self.faults = faults
        self.runner = loaded.runner
        self.scheduler = scheduler
        self.jobs = Jobs(scheduler, config, admission, events)
        #: Tells observers; None without any.
        self.events = events
        self.inbox = Inbox()
        self.stats: EngineStats
        #: When the turn that runs now began; None between turns. The supervisor reads it.
        self.turn_began: float | None = None
        self._admission = admission
        #: One per event loop; other threads add to it.
        self._bridges = bridges
        self._clock = clock
        self._pace = Pace(config.overlap, self.runner.spec.overlap)
        self._in_flight: deque[Step] = deque()
        #: What is posted from now on comes too late.
        self._closing = False
        #: Answers taken over since the last snapshot.
        self._took = 0
        self._publish()

    def post(self, command: Command, argument: Any = None) -> None:
        """Ask for something, from any thread. Never blocks, never raises."""
        self.inbox.post(command, argument)

    @property
    def busy(self) -> bool:
        """Whether the next step has something to compute."""
        return bool(self._in_flight) or self.scheduler.has_work

    @property
    def done(self) -> bool:
        """Closed, and nothing is left to wait for."""
        if self._admission.drain_until is None or self.jobs.live or self._in_flight:
            return False
        return self.inbox.empty()

    def step(self) -> None:
        """One turn: take in what was posted, run one step, hand out its tokens."""
        now = self.turn_began = self._clock()
        posted = not self.inbox.empty()
        if posted:
            self._read_inbox(now)
        self.jobs.expire(now, self._admission.drain_until)
        if self.jobs.unflushed:
            # Whoever is to be told of an end need not wait for the step.
            self._publish()
            self._flush(now)
        self._compute(now, fresh=posted)
        self._publish()
        self._flush(now)
        self.turn_began = None

    def idle_seconds(self, most: float) -> float:
        """Until something runs out of time, `most` at most."""
        due = self._admission.next_deadline
        if self._admission.drain_until is not None:
            due = min(due, self._admission.drain_until)
        return max(0.0, min(most, due - self._clock()))

    def snapshot(self) -> EngineStats:
        """The counters as they are now, also while a step runs. Any thread."""
        return self._admission.complete(self.stats)

    def probe_loops(self) -> None:
        """Look whether the event loops exist: a loop of paused streams alone is posted nothing.
        Deliveries that an interrupt broke off go on."""
        for bridge in self._bridges.copy().values():
            bridge.probe()
            bridge.redeliver()

    def fail_all(self, error: Callable[[], AsyncInferError]) -> None:
        """End every job, wherever it is. What was delivered can be read.

        Nothing is asked of the scheduler: what broke the loop may have left it in any state.
        """
        now = self.turn_began = self._clock()
        ended = [
            job for job in self._admission.close(error) if self.jobs.tell(job, End.CLOSED, error())
        ]
        held = self._admission.clear()
        self.stats = dataclasses.replace(self.stats, running=0, waiting=0, paused=0)
        for bridge in self._bridges.copy().values():
            bridge.flush()
        released = self.inbox.close()
        # Observers last: one that hangs keeps no consumer waiting. A job that ended while it was
        # prepared has its place, or has given it back and is in the inbox.
        for job in dict.fromkeys((*ended, *held, *self.jobs.live, *released)):
            self.jobs.report(job, now)

    def abandon(self, error: Callable[[], AsyncInferError]) -> None:
        """End every job while the decode thread hangs. Of what that thread has, touches only what
        goes to the loops. Any other thread."""
        jobs = self._admission.close(error)
        ends = [(job, self._admission.end(job, End.CLOSED, error())) for job in jobs]
        held = self._admission.clear()
        self.inbox.close()
        self.stats = dataclasses.replace(self.stats, running=0, waiting=0, paused=0)
        for bridge in self._bridges.copy().values():
            # The chunks from before it began to hang.
            bridge.rescue()
        for job, outcome in ends:
            if outcome is not None:
                job.buffer.bridge.send(Batch((job.buffer, outcome)))
        if self.events is not None:
            told = [job for job in held if self._admission.claim_report(job)]
            self.events.abandon(told, error(), self._clock())

    def discard(self, error: AsyncInferError) -> None:
        """The engine was not opened after all."""
        self.runner.close()
        if self.events is not None:
            self.events.close(error)

    def _read_inbox(self, now: float) -> None:
        for command, argument in self.inbox.read():
            self._handle(command, argument, now)

    def _handle(self, command: Command, argument: Any, now: float) -> None:
        match command:
            case Command.SUBMIT:
                self._take(argument, now)
            case Command.ABORT:
                self.jobs.abort(argument, now)
            case Command.STOP:
                self.jobs.stop(argument, now)
            case Command.RESUME:
                self.jobs.resume(argument)
            case Command.RELEASE:
                self.jobs.release(argument, now)
            case Command.CLOSE:
                self._closing = True
                self._admission.drain(now + argument)

    def _take(self, job: Job, now: float) -> None:
        """A job arrives."""
        if job.buffer.bridge.closed:
            self.jobs.tell(job, End.CLOSED, EngineClosed("the event loop is closed"))
        elif self._closing:
            self.jobs.tell(job, End.CLOSED, EngineClosed("the engine is closing"))
        if self._admission.advance(job, Phase.TAKEN):
            self._took += job.params.n
            self.jobs.add(job)
        else:
            # It ended on the way.
            self._admission.leave(job)
            self.jobs.report(job, now)

    def _compute(self, now: float, *, fresh: bool) -> None:
        while len(self._in_flight) < self._pace.ahead:
            step = self.scheduler.schedule(now)
            if step is None:
                break
            for join in step.joins:
                self._started(join.slot, now)
            if fresh or step.joins:
                # The step may take long, and somebody may ask meanwhile.
                fresh = False
                self._publish()
            try:
                step.handle = self.runner.launch(step)
            except MemoryError as error:
                self._retract(step, error, now)
                continue
            self._in_flight.append(step)
        if self._in_flight:
            self._commit(self._in_flight.popleft())
        self._pace.stepped(self._clock() if self._in_flight else None)

    def _retract(self, step: Step, error: MemoryError, now: float) -> None:
        """The device had no room for a step: go on in smaller ones."""
        emit("step_retracted", tokens=step.tokens, rows=len(step.slots), error=str(error))
        for request in self.scheduler.retract(step, now):
            self.jobs.fail(output_of(request).job, now, error)

    def _started(self, slot: int, now: float) -> None:
        request = self.scheduler.tenant(slot)
        assert request is not None
        job = output_of(request).job
        if job.started is None:
            job.started = now
            emit("request_admitted", job.context, request_id=job.request_id)
            if self.events is not None:
                self.events.started(job, now)

    def _commit(self, step: Step) -> None:
        # A handle may refer to its step: the garbage collector alone would find the two.
        handle, step.handle = step.handle, None
        result = self.runner.collect(handle)
        now = self._clock()
        self.scheduler.update(step, result, now)
        if self.events is not None and self.events.every_step:
            self.events.stepped(step, now)
        for request, error in step.failed:
            self.jobs.fail(output_of(request).job, now, error)
        logprobs, prompt_logprobs = result.logprobs, result.prompt_logprobs
        # Runs for every token: what would be a call each is written out here.
        for row, tokens, reason in zip(step.advanced, step.drawn, step.reasons, strict=True):
            output = step.sequences[row].owner
            assert isinstance(output, OutputStream)
            job = output.job
            if output.ended:
                continue
            if prompt_logprobs and row in prompt_logprobs:
                position = step.starts[row] + 1
                job.add_prompt_logprobs(position, prompt_logprobs[row])
            if not tokens:
                continue
            if job.first_token is None:
                job.first_token = now
                if self.events is not None:
                    self.events.first_token(job, now)
            job.last_token = now
            scored = logprobs[row] if logprobs and row in logprobs else ()
            try:
                ended = output.advance(tokens, reason, scored)
            except BaseException as error:
                if not panicked(error):
                    raise
                # A tokenizer that cannot decode one answer harms no other.
                self.jobs.fail(job, now, error)
                continue
            if ended is not None:
                self.jobs.finish(output, ended, now)
            elif job.delivered >= job.room and job.full:
                self.jobs.pause(output, now)

    def _publish(self) -> None:
        ends = self.jobs.ends
        self.stats = EngineStats(
            **self.scheduler.stats()._asdict(),
            finished=ends[End.FINISHED],
            aborted=ends[End.ABORTED],
            failed=ends[End.FAILED],
        )
        if self._took:
            self._admission.took(self._took)
            self._took = 0

    def _flush(self, now: float) -> None:
        for loop, bridge in self._bridges.copy().items():
            bridge.flush()
            if bridge.closed:
                # Nobody can read what belongs to an event loop that is gone.
                for job in [job for job in self.jobs.live if job.buffer.bridge is bridge]:
                    self.jobs.abort(job, now)
                self._publish()
                bridge.flush()
                del self._bridges[loop]
        if self.jobs.unflushed:
            self.jobs.flushed()
