"""The jobs of an engine: how they begin, wait for their consumer, and end exactly once."""

from __future__ import annotations

from asyncinfer.config import EngineConfig
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.engine_events import EngineEvents
from asyncinfer.engine.job import End, Job
from asyncinfer.engine.output_stream import OutputStream
from asyncinfer.errors import DeadlineExceeded, EngineClosed, RequestFailed, StreamStalled
from asyncinfer.scheduler import Scheduler, Sequence
from asyncinfer.telemetry import emit
from asyncinfer.text import panicked

__all__ = ["Jobs", "closed", "named_failure", "output_of", "too_late"]

#: The log event of each end that has one.
_EVENTS = {
    End.FINISHED: "request_finished",
    End.ABORTED: "request_aborted",
    End.FAILED: "request_failed",
}


#: Seconds between two looks at paused streams that count as unread, at most. A long step, or a
#: process that is stopped, is no fault of the consumer.
LONGEST_LOOK = 1.0


class Jobs:
    """Every job that the decode thread has. Decode thread only."""

    def __init__(
        self,
        scheduler: Scheduler,
        config: EngineConfig,
        admission: Admission,
        events: EngineEvents | None = None,
    ) -> None:
        self.live: dict[Job, None] = {}
        #: Jobs by how they ended here.
        self.ends: dict[End, int] = dict.fromkeys(End, 0)
        #: Ended since the last flush: their consumers were not told yet.
        self.unflushed: list[Job] = []
        self._scheduler = scheduler
        self._config = config
        self._admission = admission
        self._events = events
        self._paused: dict[Job, None] = {}
        #: When `expire` was called last, in seconds of the clock.
        self._looked = 0.0

    def add(self, job: Job) -> None:
        self.live[job] = None
        if self._events is not None:
            self._events.submitted(job)
        for output in job.outputs:
            self._scheduler.add(output.request)

    def abort(self, job: Job, now: float) -> None:
        """The consumer left."""
        self._end(job, End.ABORTED, None, now)

    def stop(self, job: Job, now: float) -> None:
        """The consumer has enough, and keeps what there is."""
        if job not in self.live:
            return
        for output in job.outputs:
            if output.ended:
                continue
            try:
                output.finish("stopped")
            except BaseException as error:
                if not panicked(error):
                    raise
                self.fail(job, now, error)
                return
            self.finish(output, "stopped", now)

    def finish(self, output: OutputStream, reason: str, now: float) -> None:
        """One answer is complete; its last chunk has been put."""
        output.ended = True
        output.reason = reason
        self._scheduler.finish(output.request, now)
        job = output.job
        job.open_outputs -= 1
        if job.open_outputs == 0:
            self._end(job, End.FINISHED, None, now)

    def fail(self, job: Job, now: float, error: BaseException) -> None:
        """This job cannot go on; the others do."""
        self._end(job, End.FAILED, named_failure(job, error), now)

    def close(self, job: Job, now: float, error: BaseException) -> None:
        """The engine is closed, and the job with it."""
        self._end(job, End.CLOSED, error, now)

    def pause(self, output: OutputStream, now: float) -> None:
        """The consumer's buffer is full: schedule the answer no more until it is read."""
        job = output.job
        if job.options.on_full == "cancel":
            bound = job.capacity
            self.fail(job, now, RequestFailed(f"{job.request_id}: buffer={bound} tokens is full"))
            return
        self._scheduler.pause(output.request)
        job.paused.append(output)
        if job not in self._paused:
            job.paused_at, job.taken_before = now, job.buffer.taken
            self._paused[job] = None
        job.buffer.paused = True
        # The consumer may have emptied the buffer before it could see `paused`.
        if job.drained:
            self.resume(job)

    def resume(self, job: Job) -> None:
        """The consumer has read on."""
        job.buffer.paused = False
        self._paused.pop(job, None)
        paused, job.paused = job.paused, []
        for output in paused:
            if not output.ended:
                self._scheduler.resume(output.request)

    def expire(self, now: float, drain_until: float | None) -> None:
        """End what has run out of time, wherever it is."""
        for job in self._admission.overdue(now):
            self.fail(job, now, too_late(job, now))
        looked, self._looked = self._looked, now
        if self._paused:
            # While the process was stopped, nobody could read.
            unseen = max(0.0, now - looked - LONGEST_LOOK)
            for job in self._paused:
                job.paused_at = min(now, job.paused_at + unseen)
            oldest = now - self._config.stall_timeout
            for job in [job for job in self._paused if job.unread_since(now) <= oldest]:
                unread = f"{job.request_id}: not read for {self._config.stall_timeout:g} s"
                self.fail(job, now, StreamStalled(unread))
        if drain_until is not None and now >= drain_until:
            for job in self._admission.untold():
                self.close(job, now, closed(job))

    def tell(self, job: Job, how: End, error: BaseException | None) -> bool:
        """End a job, as far as its consumer is concerned; False if it has ended before."""
        outcome = self._admission.end(job, how, error, counted=True)
        if outcome is None:
            return False
        self.ends[how] += 1
        job.buffer.close(outcome)
        self.unflushed.append(job)
        return True

    def flushed(self) -> None:
        """The ends that were told are on their way."""
        self._admission.told(self.unflushed)
        self.unflushed.clear()

    def release(self, job: Job, now: float) -> None:
        """Give back what a job that has ended holds, if it is here, and report it."""
        if job not in self.live:
            self.report(job, now)
            return
        for output in job.outputs:
            if not output.ended:
                output.ended = True
                self._scheduler.finish(output.request, now)
        self._admission.leave(job)
        batch = job.buffer.bridge.batch
        # The chunks of an awaited stream are sent with its end. Where another thread sent the end,
        # they are sent now, for they hold the job.
        batch.urgent = batch.urgent or bool(batch.contents)
        self.report(job, now)

    def report(self, job: Job, now: float) -> None:
        """Tell log and observers, once, of a job that has ended, and forget it."""
        self.live.pop(job, None)
        self._paused.pop(job, None)
        if self._admission.claim_report(job):
            _log_end(job)
            if self._events is not None and job.outcome is not None:
                self._events.ended(job, job.outcome, now)
        # Every time: the intake may have added outputs to a job that had ended.
        job.let_go()

    def _end(self, job: Job, how: End, error: BaseException | None, now: float) -> None:
        if error is not None and not job.ended:
            _show_held(job)
        if self.tell(job, how, error):
            # The intake gives back a job that is not here yet, or its arrival does.
            self.release(job, now)


def too_late(job: Job, now: float) -> DeadlineExceeded:
    """What a job's consumer is told when its deadline has passed."""
    return DeadlineExceeded(f"{job.request_id}: deadline passed after {now - job.submitted:.3f} s")


def closed(job: Job) -> EngineClosed:
    """What a job's consumer is told when a close does not wait for it."""
    return EngineClosed(f"{job.request_id}: the engine was closed")


def named_failure(job: Job, error: BaseException) -> BaseException:
    """What a job's consumer is told when `error` ends the job: an error of its own, by that one."""
    if isinstance(error, RequestFailed):
        return error
    failed = RequestFailed(f"{job.request_id}: {str(error) or repr(error)}")
    failed.__cause__ = error
    return failed


def _log_end(job: Job) -> None:
    """The log event of a job's end."""
    event = _EVENTS.get(job.end) if job.end is not None else None
    if event is None:
        return
    error = None if job.outcome is None else job.outcome.error
    fields = {} if error is None else {"error": str(error)}
    emit(event, job.context, request_id=job.request_id, **fields)


def _show_held(job: Job) -> None:
    for output in job.outputs:
        if not output.ended:
            output.show_held()


def output_of(request: Sequence) -> OutputStream:
    """The engine's record of a scheduler's request."""
    output = request.owner
    assert isinstance(output, OutputStream)
    return output
