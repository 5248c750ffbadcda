"""`Core.step`, the body of the decode loop: inbox -> schedule -> run -> deliver.

It knows no thread and takes its clock as an argument, so that a whole engine can be stepped
inline in a simulation. `thread.py` calls it from the decode thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from asyncinfer.config import EngineConfig
from asyncinfer.engine.adapter_registry import AdapterRegistry
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.engine_events import EngineEvents
from asyncinfer.engine.inbox import Command, Inbox
from asyncinfer.engine.loop_bridge import LoopBridge, send_news
from asyncinfer.engine.request import End, Phase, Request, output_of
from asyncinfer.engine.requests import Requests
from asyncinfer.engine.source import Loaded
from asyncinfer.errors import AsyncInferError, EngineClosed
from asyncinfer.grammar import GrammarCompiler
from asyncinfer.scheduler import Pace, Scheduler, SchedulerStats, Step
from asyncinfer.speculation import draft_stats
from asyncinfer.stats import EngineStats
from asyncinfer.telemetry import emit

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
        #: Faults of plugins without which the engine goes on.
        self.faults = faults
        self.runner = loaded.runner
        self.grammars = GrammarCompiler(loaded.tokenizer, loaded.runner.spec.vocab_size)
        #: The adapters of a runner that supports any.
        self.adapters = AdapterRegistry(getattr(loaded.runner, "adapters", None))
        self.scheduler = scheduler
        self.requests = Requests(scheduler, config, admission, events)
        #: Tells observers; None without any.
        self.events = events
        self.inbox = Inbox()
        #: When the running turn began; None between turns. The watchdog reads it.
        self.turn_began: float | None = None
        self._admission = admission
        #: One per event loop; other threads add to it.
        self._bridges = bridges
        self._clock = clock
        spec = loaded.runner.spec
        self._pace = Pace(config.overlap, spec.overlap, spec.max_step_tokens)
        #: Whether the engine closes, so that new requests come too late.
        self._closing = False
        #: Answers that `_take` has taken over since `_publish` ran last.
        self._took = 0
        #: What `fail_all` has yet to report: `abandon` does where an observer or a loop hangs.
        self._unreported: tuple[Request, ...] = ()
        #: The counters that `snapshot` reads on other threads: a tuple that is replaced as a whole.
        self._published: tuple[SchedulerStats, dict[End, int]]
        self._publish()

    def post(self, command: Command, argument: Any = None) -> None:
        """Hand the decode thread a command, from any thread. Never blocks, never raises."""
        self.inbox.post(command, argument)

    @property
    def busy(self) -> bool:
        """Whether the next step has something to compute."""
        return self.scheduler.has_work

    @property
    def done(self) -> bool:
        """Whether the core is closed and waits for nothing more."""
        if self._admission.drain_until is None or self.requests.live:
            return False
        return not self.scheduler.in_flight and self.inbox.empty()

    def step(self) -> None:
        """One turn: take in what was posted, run one step, hand out its tokens."""
        now = self.turn_began = self._clock()
        inbox = self.inbox
        # `Inbox.empty`, written out: every step asks.
        posted = bool(inbox.woken_by) or not inbox.queue.empty()
        if posted:
            for command, argument in inbox.read():
                self._handle(command, argument, now)
        self.requests.expire(now, self._admission.drain_until)
        if self.requests.unflushed:
            # Consumers of ended requests need not wait for the step.
            self._publish()
            self._flush(now)
        self._compute(now, fresh=posted)
        self._publish()
        self._flush(now)
        self.turn_began = None

    def idle_until(self, most: float) -> float:
        """When the next time runs out, in seconds of the clock; at most `most` seconds from now."""
        due = min(self._clock() + most, self._admission.deadlines.next)
        if self._admission.drain_until is not None:
            due = min(due, self._admission.drain_until)
        return due

    def snapshot(self) -> EngineStats:
        """The counters as they are now, also while a step runs. Any thread."""
        counters, ends = self._published
        grammars = self.grammars.counters
        stats = EngineStats(
            **counters._asdict(),
            finished=ends[End.FINISHED],
            aborted=ends[End.ABORTED],
            failed=ends[End.FAILED],
            grammars_compiled=grammars.compiled,
            grammar_hits=grammars.hits,
            compile_seconds=grammars.compile_seconds,
            masks=grammars.masks,
            mask_seconds=grammars.mask_seconds,
            forced_tokens=grammars.forced_tokens,
            drafts=draft_stats(self.scheduler.speculator.counters),
            fallbacks=getattr(self.runner, "fallbacks", ()),
        )
        return self.adapters.complete(self._admission.complete(stats))

    def probe_loops(self) -> None:
        """Check whether the event loops exist: nothing is posted to a loop that has only paused
        streams. Resumes deliveries that an interrupt broke off."""
        for bridge in self._bridges.copy().values():
            bridge.probe()
            bridge.redeliver()

    def fail_all(self, error: Callable[[], AsyncInferError]) -> None:
        """End every request, wherever it is. What was delivered can be read.

        Nothing is asked of the scheduler: what broke the loop may have left it in any state.
        """
        now = self.turn_began = self._clock()
        ended = [
            request
            for request in self._admission.close(error)
            if self.requests.tell(request, End.CLOSED, error())
        ]
        self._unreported = (*ended, *self._admission.clear(), *self.requests.live)
        self.adapters.close(error)
        self._publish_empty()
        for bridge in self._bridges.copy().values():
            bridge.flush()
        released = self.inbox.close()
        # Observers last: one that hangs keeps no consumer waiting. A request that ended while it
        # was prepared had a place, or is in `released` if it has given that back.
        self.requests.report(dict.fromkeys((*self._unreported, *released)), now)
        self._unreported = ()

    def abandon(self, error: Callable[[], AsyncInferError]) -> None:
        """End every request while the decode thread hangs. Any other thread.

        Of what the decode thread has, it changes only what goes to the event loops."""
        requests = self._admission.close(error)
        ends = [(each, self._admission.end(each, End.CLOSED, error())) for each in requests]
        held = self._admission.clear()
        self.adapters.close(error)
        released = self.inbox.close()
        self._publish_empty()
        for bridge in self._bridges.copy().values():
            # The chunks from before it began to hang.
            bridge.rescue()
        send_news((request.buffer, outcome) for request, outcome in ends if outcome is not None)
        if self.events is not None:
            # As in `fail_all`, which the decode thread may hang in.
            over = dict.fromkeys((*self._unreported, *held, *released))
            told = [request for request in over if self._admission.claim_report(request)]
            self.events.abandon(told, error(), self._clock())

    def close(self) -> None:
        """Give back the device's memory, whatever closing the draft model raises."""
        try:
            self.scheduler.speculator.close()
        finally:
            self.runner.close()

    def discard(self, error: AsyncInferError) -> None:
        """Undo the opening of an engine that failed to open."""
        try:
            self.close()
        finally:
            if self.events is not None:
                self.events.close(error)

    def _handle(self, command: Command, argument: Any, now: float) -> None:
        match command:
            case Command.SUBMIT:
                self._take(argument, now)
            case Command.ABORT:
                self.requests.abort(argument, now)
            case Command.STOP:
                self.requests.stop(argument, now)
            case Command.RESUME:
                self.requests.resume(argument)
            case Command.RELEASE:
                self.requests.release(argument, now)
                self._admission.leave(argument)
                # Without its place, `Admission` subtracts the request from the counters no more.
                self._publish()
            case Command.CLOSE:
                self._closing = True
                self._admission.drain(now + argument)
            case Command.WAITING | Command.OVER | Command.FORK:
                self.scheduler.converse(command.value, argument, now)

    def _take(self, request: Request, now: float) -> None:
        """Take over a request that intake has prepared."""
        if request.buffer.bridge.closed:
            self.requests.tell(request, End.CLOSED, EngineClosed("the event loop is closed"))
        elif self._closing:
            self.requests.tell(request, End.CLOSED, EngineClosed("the engine is closing"))
        if self._admission.advance(request, Phase.TAKEN):
            self._took += request.params.n
            self.requests.add(request)
        else:
            # It ended on the way.
            self._admission.leave(request)
            self.requests.report((request,), now)

    def _compute(self, now: float, *, fresh: bool) -> None:
        in_flight = self.scheduler.in_flight
        while self._pace.wants(in_flight, queues=self.scheduler.only_decodes):
            step = self.scheduler.schedule(now)
            if step is None:
                break
            for join in step.joins:
                self.requests.start(join.slot, now)
            if fresh or step.joins:
                # The step may take long, and somebody may ask meanwhile.
                fresh = False
                self._publish()
            try:
                step.handle = self.runner.launch(step)
            except MemoryError as error:
                self._retract(step, error, now)
        late = self._commit(in_flight[0]) if in_flight else False
        self._pace.stepped(self._clock() if in_flight else None, late=late)

    def _retract(self, step: Step, error: MemoryError, now: float) -> None:
        """The device had no room for a step: go on in smaller ones."""
        emit("step_retracted", tokens=step.tokens, rows=len(step.slots), error=str(error))
        for sequence in self.scheduler.retract(step, now):
            self.requests.fail(output_of(sequence).request, now, error)

    def _commit(self, step: Step) -> bool:
        # A handle may refer to its step: only the garbage collector would free both.
        handle, step.handle = step.handle, None
        result = self.runner.collect(handle)
        now = self._clock()
        self.scheduler.update(step, result, now)
        if self.events is not None and self.events.every_step:
            drafts = self.scheduler.speculator.counters
            self.events.stepped(step, now, self.grammars.counters, drafts)
        self.requests.deliver(step, result, now)
        return result.late

    def _publish(self) -> None:
        # Twice per step, so an `EngineStats` is only made on demand.
        self._published = self.scheduler.stats(), self.requests.ends.copy()
        if self._took:
            self._admission.took(self._took)
            self._took = 0

    def _publish_empty(self) -> None:
        """Nothing runs and nothing is pinned any more, whatever the scheduler holds."""
        counters, ends = self._published
        self._published = counters._replace(running=0, waiting=0, paused=0, blocks_pinned=0), ends

    def _flush(self, now: float) -> None:
        for loop, bridge in self._bridges.copy().items():
            bridge.flush()
            if bridge.closed:
                # Nobody can read what belongs to an event loop that is gone.
                for request in [
                    request for request in self.requests.live if request.buffer.bridge is bridge
                ]:
                    self.requests.abort(request, now)
                self._publish()
                bridge.flush()
                del self._bridges[loop]
        if self.requests.unflushed:
            self.requests.flushed()
