"""`Checks`: what holds in a simulated life, at every moment and at its end."""

from __future__ import annotations

import gc
from collections import deque
from typing import TYPE_CHECKING, Final

from asyncinfer.testing.invariants import check_drained, check_invariants, hold
from asyncinfer.testing.simulator.consumer import Consumer
from asyncinfer.testing.watched_pages import WatchedPages

if TYPE_CHECKING:
    from asyncinfer.testing.simulator.life import Life

__all__ = ["ACK", "FOUND_OUT", "GRACE", "Checks"]

#: Seconds by which a wait may outlive its time, and what finding out that a step hangs may take
#: beyond `step_timeout`, as a share of it.
LATE: Final = 0.05
FOUND_OUT: Final = 0.75
#: Seconds that leaving a stream may wait for the engine, and a close for the step that runs.
ACK: Final = 5.0
GRACE: Final = 11.0
#: Fair seconds after which nothing may hold a request that has ended.
FORGOTTEN: Final = 1.0

#: Ends that leave everything that was drawn to be read.
_READ_TO_THE_END: Final = frozenset(
    ("DeadlineExceeded", "StreamStalled", "RequestFailed", "EngineClosed")
)


class Checks:
    """Raises `InvariantError` where something does not hold."""

    def __init__(self, life: Life, every: int) -> None:
        self._life = life
        self._every = every
        self._steps = 0
        self._pages: WatchedPages | None = None
        #: Consumers that ended, and when, in fair seconds.
        self._ended: deque[tuple[float, Consumer]] = deque()
        #: Requests that the engine refused.
        self._refused = 0
        #: Steps launched; the last one that each decoding request was in; how many it may miss.
        self._launched = 0
        self._served: dict[int, int] = {}
        self._patience = 4 * life.scenario.max_running + 8

    def opened(self) -> None:
        core, runner = self._life.engine.core, self._life.model.runner
        assert core is not None
        assert runner is not None
        self._pages = WatchedPages(core.scheduler, runner)

    # -- at every moment -----------------------------------------------------------------------

    def step(self) -> None:
        """I1 to I12 of the scheduler and the cache."""
        life = self._life
        for loop in life.loops:
            hold("loop", not loop.problems, "{}", loop.problems)
        core = life.engine.core
        if life.doubtful and not life.dead and life.engine.health().state == "dead":
            life.dies()
        if life.plugins and core is not None:
            hold("plugin", not core.faults, "{}", "; ".join(core.faults))
        if self._pages is None or core is None or life.dead or life.host.inside:
            return
        self._steps += 1
        if self._steps % self._every:
            self._pages.poison()
            return
        requests = {
            answer.request.id: answer.request for job in life.engine.jobs for answer in job.outputs
        }
        requests.update(core.scheduler.states.leaving)
        check_invariants(core.scheduler, requests.values())
        self._pages.check()

    def starving(self) -> None:
        """I9: whoever could decode does so, in turns if need be. Called before each launch."""
        core = self._life.engine.core
        if core is None:
            return
        scheduler = core.scheduler
        self._launched += 1
        now, before, self._served = self._launched, self._served, {}
        rows = {request.id for request in scheduler.in_flight[-1].sequences}
        for request in scheduler.states.decoding.values():
            can = request.draws_left > 0 and request.computed < request.capacity
            last = now if request.id in rows or not can else before.get(request.id, now)
            self._served[request.id] = last
            hold("I9", now - last <= self._patience, "{} decodes no more", request)

    def late(self) -> None:
        """Whoever waits for the engine is told in time: of an answer's end, a deadline, a close, a
        death, or that it may leave."""
        life = self._life
        now = life.host.now
        for consumer in life.consumers.values():
            if consumer.waiting:
                limit = max(min(consumer.limit, life.over), life.jumped) + LATE
                hold("liveness", now <= limit, "{} waits {:.3f} s too long", consumer, now - limit)
        for task, due in life.closers:
            if not task.done():
                limit = max(due, life.jumped) + LATE
                hold("liveness", now <= limit, "a close waits {:.3f} s too long", now - limit)

    def ended(self, consumer: Consumer) -> None:
        """A consumer's end is one that it may have, and it was given what was drawn."""
        self._ended.append((self._life.fair, consumer))
        self._check_end(consumer)
        if consumer.outcome == "Overloaded":
            self._refused += 1
        usage, ask = consumer.usage, consumer.ask
        got = sum(map(len, consumer.tokens))
        if consumer.outcome == "whole" and consumer.expected is not None:
            consumer.expected.check_whole(consumer)
        read = consumer.outcome in _READ_TO_THE_END and ask.how == "iterate"
        if usage is not None and not consumer.closed and (read or consumer.outcome == "whole"):
            drawn = usage.completion_tokens
            hold("I7", drawn == got, "{}: {} tokens drawn, {} delivered", consumer, drawn, got)

    def _check_end(self, consumer: Consumer) -> None:
        life, outcome, ask = self._life, consumer.outcome, consumer.ask
        allowed = True
        match outcome:
            case "whole":
                # One that was closed before anybody looked at its prompt ends like any other.
                allowed = consumer.expected is not None or consumer.closed
            case "InvalidRequest":
                allowed = consumer.expected is None
            case "DeadlineExceeded":
                allowed = ask.deadline is not None and (
                    life.host.now >= consumer.began + ask.deadline
                )
            case "StreamStalled":
                allowed = ask.on_full == "pause" and (
                    self._unread(consumer) >= life.scenario.stall_timeout
                )
            case "RequestFailed":
                full = ask.on_full == "cancel" and "is full" in consumer.message
                allowed = full or "fault" in consumer.message or "no room" in consumer.message
            case "EngineClosed":
                allowed = life.closing or consumer.early or consumer.closed
            case "EngineDead":
                allowed = life.dead or life.doubtful
                if allowed:
                    life.dies()
        hold("end", allowed, "{}: {}", consumer, consumer.message)

    def _unread(self, consumer: Consumer) -> float:
        """For how long it could have read at most, and did not, before its end."""
        end = consumer.began + consumer.seconds
        last = max([consumer.began, *(at for at in consumer.reads if at < end)])
        if not consumer.seconds:
            # Dropped: nobody can say when it ended.
            return float("inf")
        # Of a time in which nobody ran, as much as of any other between two turns.
        counted = 1.0
        gone = [seconds - counted for at, seconds in self._life.jumps if last <= at <= end]
        doubt = counted if gone else LATE
        return end - last - sum(seconds for seconds in gone if seconds > 0) + doubt

    def held(self) -> None:
        """I13: nothing holds a request that ended a while ago."""
        life = self._life
        if (
            not self._ended
            or self._ended[0][0] > life.fair - FORGOTTEN
            or life.closing
            or life.dead
        ):
            return
        if any(actor.suspended for actor in life.host.actors):
            # In the middle of something; it may be about one of these.
            return
        old = []
        while self._ended and self._ended[0][0] <= life.fair - FORGOTTEN:
            old.append(self._ended.popleft()[1])
        self._check_held(old)

    def _check_held(self, consumers: list[Consumer]) -> None:
        if any(consumer.held for consumer in consumers):
            # By a cycle, perhaps.
            gc.collect()
            for consumer in consumers:
                hold("I13", not consumer.held, "{} is held after its end", consumer)

    # -- at the end ----------------------------------------------------------------------------

    def idle(self) -> None:
        """Nobody asks for anything any more."""
        life = self._life
        core, admission = life.engine.core, life.engine.admission
        if core is None or life.dead or life.closing:
            return
        check_drained(core.scheduler)
        hold("drain", admission.held == 0, "admission holds {}", admission.held)
        hold("drain", admission.next_deadline == float("inf"), "a deadline is held")
        stats, health = life.engine.stats(), life.engine.health()
        hold("stats", stats.running == stats.waiting == stats.paused == 0, "{}", stats)
        hold("stats", stats.refused == self._refused, "{} refused, {}", self._refused, stats)
        hold("stats", health.state in ("open", "degraded"), "{}", health)

    def closed(self) -> None:
        """The engine was closed, and everybody has ended."""
        life = self._life
        actors = [actor.name for actor in life.host.actors]
        hold("drain", not actors, "threads are left: {}", actors)
        held = life.engine.admission.held
        hold("drain", held == 0, "admission holds {}", held)
        if not life.dead and not life.closing:
            self._check_held([consumer for _, consumer in self._ended])
        for loop in life.loops:
            hold("loop", not loop.problems, "{}", loop.problems)
        state = life.engine.health().state
        hold("stats", state in ("closed", "dead"), "a closed engine is {}", state)
