"""The requests of an engine: how they begin, wait for their consumer, and end exactly once."""

from __future__ import annotations

from collections.abc import Collection

from asyncinfer.config import EngineConfig
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.end_errors import closed, named_failure, too_late
from asyncinfer.engine.engine_events import EngineEvents
from asyncinfer.engine.request import End, Request, TokenSink, output_of
from asyncinfer.errors import InvalidRequest, Overloaded, RequestFailed, StreamStalled, drop_frames
from asyncinfer.scheduler import Scheduler, Step, StepResult
from asyncinfer.telemetry import emit
from asyncinfer.text import panicked

__all__ = ["Requests"]

#: The log event of each end that has one.
_EVENTS = {
    End.FINISHED: "request_finished",
    End.ABORTED: "request_aborted",
    End.FAILED: "request_failed",
}
#: The longest time between two looks that counts as unread. A long step, or a process that was
#: stopped, is no fault of the consumer.
LONGEST_LOOK = 1.0
#: The least seconds between two looks, so that thousands of unread streams slow no step down.
MOST_OFTEN = 0.1


class Requests:
    """Every request that the decode thread has. Decode thread only."""

    def __init__(
        self,
        scheduler: Scheduler,
        config: EngineConfig,
        admission: Admission,
        events: EngineEvents | None = None,
    ) -> None:
        self.live: dict[Request, None] = {}
        #: Requests by how they ended here.
        self.ends: dict[End, int] = dict.fromkeys(End, 0)
        #: Ended since the last flush: their consumers were not told yet.
        self.unflushed: list[Request] = []
        self._scheduler = scheduler
        self._config = config
        self._admission = admission
        self._events = events
        self._paused: dict[Request, None] = {}
        #: When `expire` was called last, in seconds of the clock.
        self._looked = 0.0
        #: When to look at paused streams next.
        self._look_at = 0.0

    def add(self, request: Request) -> None:
        self.live[request] = None
        if self._events is not None:
            self._events.submitted(request)
        for output in request.outputs:
            self._scheduler.add(output.sequence)

    def start(self, slot: int, now: float) -> None:
        """Note that the sequence in a slot is about to be computed for the first time, or again."""
        sequence = self._scheduler.sequence_at(slot)
        assert sequence is not None
        request = output_of(sequence).request
        if request.started is None:
            request.started = now
            emit("request_admitted", request.context, request_id=request.id)
            if self._events is not None:
                self._events.started(request, now)

    def deliver(self, step: Step, result: StepResult, now: float) -> None:
        """Hand each request what a committed step has drawn for it, and end those that are done."""
        for sequence, error in step.failed:
            self.fail(output_of(sequence).request, now, error)
        logprobs, prompt_logprobs = result.logprobs, result.prompt_logprobs
        rows = range(len(step.sequences))
        # Runs for every token, so helpers are written out here.
        for row, sequence, tokens, reason in zip(
            rows, step.sequences, step.drawn, step.reasons, strict=True
        ):
            output: TokenSink = sequence.owner
            if output.ended:
                continue
            request = output.request
            if prompt_logprobs and row in prompt_logprobs:
                position = step.starts[row] + 1
                request.add_prompt_logprobs(position, prompt_logprobs[row])
            if result.pooled and row in result.pooled:
                request.add_pooled(step.starts[row], result.pooled[row])
            if tokens is None or not (tokens or reason):
                continue
            if tokens and request.first_token is None:
                request.first_token = now
                if self._events is not None:
                    self._events.first_token(request, now)
            request.last_token = now
            # A row with a draft may have drawn tokens that were then rejected.
            scored = logprobs[row][: len(tokens)] if logprobs and row in logprobs else ()
            try:
                ended = output.advance(tokens, reason, scored)
            except BaseException as error:
                if not (panicked(error) or isinstance(error, RequestFailed)):
                    raise
                # A tokenizer that cannot decode one answer, or a regular expression that takes too
                # much work, must not harm other requests.
                self.fail(request, now, error)
                continue
            if ended is not None:
                self.finish(output, ended, now)
            elif request.delivered >= request.room and request.full:
                self.pause(output, now)
        if step.matchers:
            self.charge_matchers(step, now)

    def abort(self, request: Request, now: float) -> None:
        """End a request whose consumer left."""
        self._end(request, End.ABORTED, None, now)

    def stop(self, request: Request, now: float) -> None:
        """End a request whose consumer has enough, and keeps what there is."""
        if request not in self.live:
            return
        for output in request.outputs:
            if output.ended:
                continue
            try:
                output.finish("stopped")
            except BaseException as error:
                if not (panicked(error) or isinstance(error, RequestFailed)):
                    raise
                self.fail(request, now, error)
                return
            self.finish(output, "stopped", now)

    def finish(self, output: TokenSink, reason: str, now: float) -> None:
        """Note that an answer is complete, after its last chunk was put."""
        output.ended = True
        output.reason = reason
        self._scheduler.finish(output.sequence, now)
        request = output.request
        request.open_outputs -= 1
        if request.open_outputs == 0:
            self._end(request, End.FINISHED, None, now)

    def fail(self, request: Request, now: float, error: BaseException) -> None:
        """End a request that cannot go on; all others do."""
        drop_frames(error)
        self._end(request, End.FAILED, named_failure(request, error), now)

    def charge_matchers(self, step: Step, now: float) -> None:
        """Charge requests for the growth of their matchers in this step. Requests without room for
        it fail."""
        for row, matcher in step.matchers.items():
            grown = matcher.grown()
            if grown:
                request = output_of(step.sequences[row]).request
                if request.options.search is not None:
                    # Each beam keeps its matcher until its successors were computed.
                    grown *= 2
                try:
                    self._admission.charge(request, grown)
                except (InvalidRequest, Overloaded) as error:
                    self.fail(request, now, RequestFailed(f"its format takes memory: {error}"))

    def close(self, request: Request, now: float, error: BaseException) -> None:
        """End a request because the engine is closed."""
        self._end(request, End.CLOSED, error, now)

    def pause(self, output: TokenSink, now: float) -> None:
        """The consumer's buffer is full: schedule the answer no more until it is read."""
        request = output.request
        if request.options.on_full == "cancel":
            bound = request.capacity
            self.fail(request, now, RequestFailed(f"{request.id}: buffer={bound} tokens is full"))
            return
        self._scheduler.pause(output.sequence)
        request.paused.append(output)
        if request not in self._paused:
            request.paused_at, request.taken_before = now, request.buffer.taken
            self._paused[request] = None
        request.buffer.paused = True
        # The consumer may have emptied the buffer before it could see `paused`.
        if request.drained:
            self.resume(request)

    def resume(self, request: Request) -> None:
        """Schedule the answers of a request again, since its consumer has read on."""
        request.buffer.paused = False
        self._paused.pop(request, None)
        paused, request.paused = request.paused, []
        for output in paused:
            if not output.ended:
                self._scheduler.resume(output.sequence)

    def expire(self, now: float, drain_until: float | None) -> None:
        """End all requests that have run out of time."""
        if now >= self._admission.deadlines.next:
            for request in self._admission.overdue(now):
                self.fail(request, now, too_late(request, now))
        looked, self._looked = self._looked, now
        if self._paused:
            # While the process was stopped, no consumer could read.
            unseen = max(0.0, now - looked - LONGEST_LOOK)
            if unseen or now >= self._look_at:
                self._end_unread(now, unseen)
        if drain_until is not None and now >= drain_until:
            for request in self._admission.untold():
                self.close(request, now, closed(request))

    def _end_unread(self, now: float, unseen: float) -> None:
        timeout = self._config.stall_timeout
        self._look_at = now + min(MOST_OFTEN, timeout / 64)
        for request in self._paused:
            request.paused_at = min(now, request.paused_at + unseen)
        for request in [each for each in self._paused if each.unread_since(now) <= now - timeout]:
            self.fail(request, now, StreamStalled(f"{request.id}: not read for {timeout:g} s"))

    def tell(self, request: Request, how: End, error: BaseException | None) -> bool:
        """End a request, as far as its consumer is concerned; False if it has ended before."""
        outcome = self._admission.end(request, how, error, counted=True)
        if outcome is None:
            return False
        self.ends[how] += 1
        request.buffer.close(outcome)
        self.unflushed.append(request)
        return True

    def flushed(self) -> None:
        """Note that the ends told since the last flush are on their way."""
        self._admission.told(self.unflushed)
        self.unflushed.clear()

    def release(self, request: Request, now: float) -> None:
        """Give back what a request that has ended holds, if it is here, and report it."""
        if request not in self.live:
            self.report((request,), now)
            return
        for output in request.outputs:
            if not output.ended:
                output.ended = True
                self._scheduler.finish(output.sequence, now)
        self._admission.leave(request)
        batch = request.buffer.bridge.batch
        # The chunks of an awaited stream are sent with its end. Where another thread sent the end,
        # they are sent now, for they hold the request.
        batch.urgent = batch.urgent or bool(batch.contents)
        self.report((request,), now)

    def report(self, requests: Collection[Request], now: float) -> None:
        """Tell log and observers, once, of requests that have ended, and forget them."""
        first = []
        for request in requests:
            self.live.pop(request, None)
            self._paused.pop(request, None)
            if self._admission.claim_report(request):
                first.append(request)
        # Observers first, and of all requests at once: neither a log handler that hangs nor one of
        # them keeps an end from the others.
        if self._events is not None:
            self._events.ended(first, now)
        for request in first:
            _log_end(request)
        for request in requests:
            # Every time: the intake may have added outputs to a request that had ended.
            request.let_go()

    def _end(self, request: Request, how: End, error: BaseException | None, now: float) -> None:
        if error is not None and not request.ended:
            _show_held(request)
        if self.tell(request, how, error):
            # A request that is not here yet is given back by the intake, or when it arrives.
            self.release(request, now)


def _log_end(request: Request) -> None:
    """The log event of a request's end."""
    event = _EVENTS.get(request.end) if request.end is not None else None
    if event is None:
        return
    error = None if request.outcome is None else request.outcome.error
    fields = {} if error is None else {"error": str(error)}
    emit(event, request.context, request_id=request.id, **fields)


def _show_held(request: Request) -> None:
    for output in request.outputs:
        if not output.ended:
            output.show_held()
