"""The jobs of an engine: how they begin, wait for their consumer, and end exactly once."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count

from asyncinfer.config import EngineConfig
from asyncinfer.engine import output
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.job import Answer, Job
from asyncinfer.engine.watch import Watch
from asyncinfer.errors import DeadlineExceeded, EngineClosed, RequestFailed, StreamStalled
from asyncinfer.scheduler import Request, Scheduler
from asyncinfer.telemetry import emit

__all__ = ["Jobs", "answer_of"]


class Jobs:
    """Every live job. Decode thread only, except for reading the counters."""

    def __init__(
        self,
        scheduler: Scheduler,
        config: EngineConfig,
        admission: Admission,
        watch: Watch | None = None,
    ) -> None:
        self.live: set[Job] = set()
        self.finished = 0
        self.aborted = 0
        self.failed = 0
        self._scheduler = scheduler
        self._config = config
        self._admission = admission
        self._watch = watch
        self._deadlines: list[tuple[float, int, Job]] = []
        self._order = count()
        self._parked: set[Job] = set()

    @property
    def next_deadline(self) -> float:
        """Monotonic seconds; inf without one."""
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def add(self, job: Job) -> None:
        self.live.add(job)
        if job.deadline is not None:
            heappush(self._deadlines, (job.deadline, next(self._order), job))
        if self._watch is not None:
            self._watch.submitted(job)
        for answer in job.answers:
            self._scheduler.add(answer.request)

    def abort(self, job: Job, now: float) -> None:
        """The consumer left."""
        if not job.ended:
            self.aborted += 1
            emit("request_aborted", job.context, request_id=job.request_id)
            self._end(job, now, None)

    def stop(self, job: Job, now: float) -> None:
        """The consumer has enough, and keeps what there is."""
        for answer in job.answers:
            if not answer.ended:
                output.finish(answer, "stopped")
                self.finish(answer, "stopped", now)

    def finish(self, answer: Answer, reason: str, now: float) -> None:
        """One answer is complete; its last chunk has been put."""
        answer.ended = True
        answer.reason = reason
        self._scheduler.finish(answer.request, now)
        job = answer.job
        job.open_answers -= 1
        if job.open_answers == 0:
            self.finished += 1
            emit("request_finished", job.context, request_id=job.request_id)
            self._end(job, now, None)

    def fail(self, job: Job, now: float, error: Exception) -> None:
        """This job cannot go on; the others do."""
        if not job.ended:
            self.failed += 1
            emit("request_failed", job.context, request_id=job.request_id, error=str(error))
            self._end(job, now, error)

    def close(self, job: Job, now: float, error: BaseException) -> None:
        """The engine is closed, and the job with it."""
        if not job.ended:
            self._end(job, now, error)

    def forsake(self, job: Job, now: float, error: BaseException) -> None:
        """End a job that the scheduler does not have, or no longer can be asked about."""
        if not job.ended:
            self._settle(job, now, error)

    def park(self, answer: Answer, now: float) -> None:
        """The consumer's buffer is full: schedule the answer no more until it is read."""
        job = answer.job
        if job.on_full == "cancel":
            bound = job.capacity
            self.fail(job, now, RequestFailed(f"{job.request_id}: buffer={bound} tokens is full"))
            return
        self._scheduler.pause(answer.request)
        job.parked.append(answer)
        if job not in self._parked:
            job.parked_at = now
            self._parked.add(job)
        job.mailbox.parked = True
        # The consumer may have emptied the mailbox before it could see `parked`.
        if job.drained:
            self.resume(job)

    def resume(self, job: Job) -> None:
        """The consumer has read on."""
        job.mailbox.parked = False
        self._parked.discard(job)
        parked, job.parked = job.parked, []
        for answer in parked:
            if not answer.ended:
                self._scheduler.resume(answer.request)

    def expire(self, now: float, drain_until: float | None) -> None:
        """End what has run out of time."""
        while self._deadlines and self._deadlines[0][0] <= now:
            job = heappop(self._deadlines)[2]
            late = f"{job.request_id}: deadline passed after {now - job.submitted:.3f} s"
            self.fail(job, now, DeadlineExceeded(late))
        if self._parked:
            oldest = now - self._config.stall_timeout
            for job in [job for job in self._parked if job.parked_at <= oldest]:
                unread = f"{job.request_id}: not read for {self._config.stall_timeout:g} s"
                self.fail(job, now, StreamStalled(unread))
        if drain_until is not None and now >= drain_until:
            for job in tuple(self.live):
                self.close(job, now, EngineClosed(f"{job.request_id}: the engine was closed"))

    def _end(self, job: Job, now: float, error: BaseException | None) -> None:
        """The one end of a job, whatever brought it about."""
        for answer in job.answers:
            if not answer.ended:
                self._scheduler.finish(answer.request, now)
        self._settle(job, now, error)

    def _settle(self, job: Job, now: float, error: BaseException | None) -> None:
        job.ended = True
        for answer in job.answers:
            answer.ended = True
        self.live.discard(job)
        self._parked.discard(job)
        self._admission.leave(job.params.n)
        outcome = job.outcome(now, error)
        job.mailbox.close(outcome)
        if self._watch is not None:
            self._watch.ended(job, outcome, now)


def answer_of(request: Request) -> Answer:
    """The engine's record of a scheduler's request."""
    answer = request.owner
    assert isinstance(answer, Answer)
    return answer
