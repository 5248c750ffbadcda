"""`Checks`: what holds in a simulated life, at every moment and at its end."""

from __future__ import annotations

from collections import deque
from typing import Final

from asyncinfer.scheduler import Scheduler
from asyncinfer.testing.invariants import check_drained, check_invariants, hold
from asyncinfer.testing.simulator.consumer import Consumer
from asyncinfer.testing.simulator.ends import LATE, Ends
from asyncinfer.testing.simulator.observers import WatchingObserver
from asyncinfer.testing.simulator.state import FOUND_OUT
from asyncinfer.testing.simulator.world import World
from asyncinfer.testing.watched_pages import WatchedPages

__all__ = ["ACK", "GRACE", "Checks"]

#: Seconds that leaving a stream may wait for the engine, and a close for a model that loads.
ACK: Final = 5.0
GRACE: Final = 11.0
#: Seconds that a close may wait for the last steps, and for threads once one is known to hang.
LAST_STEPS: Final = 1.0
#: Fair seconds after which nothing may hold a request that has ended.
FORGOTTEN: Final = 1.0

#: Ends after which everything that was drawn can still be read.
_READ_TO_THE_END: Final = frozenset(
    ("DeadlineExceeded", "StreamStalled", "RequestFailed", "EngineClosed")
)
#: Ends of requests that the engine had taken, whose streams know what was drawn.
_BY_THE_ENGINE: Final = frozenset(("DeadlineExceeded", "StreamStalled", "RequestFailed"))


class Checks:
    """Checks a life; raises `InvariantError` where something does not hold."""

    def __init__(self, world: World, every: int) -> None:
        self._world = world
        self._every = every
        self._steps = 0
        #: `VirtualHost.turns` when the scheduler was looked at last.
        self._turns = -1
        self._pages: WatchedPages | None = None
        #: Consumers that ended, each with the time in fair seconds.
        self._ended: deque[tuple[float, Consumer]] = deque()
        self.ends = Ends(world)
        #: Requests that the engine may have refused after nobody waited for them any more.
        self._unheard = 0
        #: Steps launched; the last one that each decoding request was in; how many it may miss.
        self._launched = 0
        self._served: dict[int, int] = {}
        self._patience = 2 * world.scenario.max_running + 4
        #: Steps since the budget of a step was a full one.
        self._small_steps = 0

    def opened(self) -> None:
        core, runner = self._world.engine.core, self._world.model.runner
        assert core is not None
        assert runner is not None
        self._pages = WatchedPages(core.scheduler, runner, self._world.adapters.by_key)

    # -- at every moment -----------------------------------------------------------------------

    def step(self) -> None:
        """Check what always holds between two actions."""
        world = self._world
        for loop in world.loops:
            hold("loop", not loop.problems, "{}", loop.problems)
        core = world.engine.core
        if world.state.doubtful and not world.state.dead and world.engine.health().state == "dead":
            world.state.die()
        if world.plugins and core is not None:
            hold("plugin", not core.faults, "{}", "; ".join(core.faults))
        if self._turns != world.host.turns:
            self._turns = world.host.turns
            self._check_scheduler()

    def launching(self) -> None:
        """What holds before each launch."""
        self._check_scheduler()
        if (core := self._world.engine.core) is not None:
            self._check_starving(core.scheduler)
            self._check_budget(core.scheduler)

    def _check_scheduler(self) -> None:
        """I1 to I12: the scheduler and the cache."""
        world, core = self._world, self._world.engine.core
        if self._pages is None or core is None or world.state.dead or world.host.inside:
            return
        self._steps += 1
        if self._steps % self._every:
            self._pages.poison()
            return
        sequences = {
            sequence.id: sequence
            for request in core.requests.live
            for answer in request.outputs
            # A guide is in no collection until it has a slot.
            for sequence in (answer.sequence, answer.sequence.guide)
            if sequence is not None and (sequence.guides is None or sequence.slot >= 0)
        }
        sequences.update(core.scheduler.states.leaving)
        check_invariants(core.scheduler, sequences.values())
        self._pages.check()

    def _check_starving(self, scheduler: Scheduler) -> None:
        """I9: whoever could decode does so, in turns if need be."""
        self._launched += 1
        now, before, self._served = self._launched, self._served, {}
        rows = {sequence.id for sequence in scheduler.in_flight[-1].sequences}
        for sequence in scheduler.states.decoding.values():
            can = sequence.draws_left > 0 and sequence.computed < sequence.capacity
            last = now if sequence.id in rows or not can else before.get(sequence.id, now)
            self._served[sequence.id] = last
            hold("I9", now - last <= self._patience, "{} decodes no more", sequence)

    def _check_budget(self, scheduler: Scheduler) -> None:
        """I9: the budget of a step recovers from a lack of room. It doubles every sixteen steps, or
        every 32 after a second lack and so on, not counting steps with a retracted prompt."""
        if scheduler.planner.budget.tokens == self._world.scenario.max_step_tokens:
            self._small_steps = 0
            return
        self._small_steps += 1
        doublings = self._world.scenario.max_step_tokens.bit_length()
        most = (16 << self._world.model.retractions) * doublings + 64
        hold("I9", self._small_steps <= most, "{} small steps in a row", self._small_steps)

    def close_due(self, seconds: float) -> float:
        """When a close that leaves requests so many seconds must have ended."""
        world = self._world
        if not world.state.opened:
            return world.host.now + seconds + GRACE
        return world.host.now + seconds + self._last_steps

    @property
    def _last_steps(self) -> float:
        """How long a close may wait for running steps. A longer step is abandoned, whether it hangs
        or not."""
        found_out = min(self._world.scenario.step_timeout * (1 + FOUND_OUT), GRACE)
        return found_out + LAST_STEPS

    def late(self) -> None:
        """Check that everybody who waits for the engine is told in time: of an answer's end, a
        deadline, a close, a death, or that the task may leave."""
        world = self._world
        now, excused = world.host.now, max(world.state.jumped, world.state.late)
        for consumer in world.consumers.values():
            if consumer.waiting:
                limit = max(min(consumer.limit, world.state.over), excused) + LATE
                hold("liveness", now <= limit, "{} waits {:.3f} s too long", consumer, now - limit)
        for load in world.loads:
            # A thread may take long to read a prompt, but nobody waits for that past the end.
            limit = max(world.state.over, excused) + LATE
            hold("liveness", load.done() or now <= limit, "a load waits {:.3f} s", now - limit)
        for task, due in world.closers.items():
            if not task.done():
                # Time in which nothing ran says little about a step that hangs.
                limit = max(due, excused + self._last_steps) + LATE
                hold("liveness", now <= limit, "a close waits {:.3f} s too long", now - limit)

    def ended(self, consumer: Consumer) -> None:
        """Check that a consumer's end is allowed, and that it got what was drawn."""
        self._ended.append((self._world.state.fair, consumer))
        self.ends.check(consumer)
        if consumer.outcome == "Overloaded":
            self.ends.overloads += 1
        # Its prompt, or its format, was prepared on a thread.
        if consumer.ask.form in ("worker", "chat") or consumer.ask.format is not None:
            left = consumer.outcome == "cancelled" or consumer.closed
            self._unheard += consumer.retries + left
        usage, ask = consumer.usage, consumer.ask
        got = sum(map(len, consumer.tokens))
        self._world.seen["tokens delivered"] += got
        if consumer.outcome == "whole" and consumer.expected is not None:
            consumer.expected.check_whole(consumer)
            self._world.seen["answers with an adapter"] += ask.adapter is not None
            self._world.seen["answers with a format"] += ask.format is not None
            self._world.seen["answers with samplers"] += ask.sampler is not None
            self._world.seen["answers with guidance"] += ask.guidance is not None
        read = consumer.outcome in _READ_TO_THE_END and ask.how == "iterate"
        if consumer.outcome in _BY_THE_ENGINE and ask.then != "drop":
            # Without this check, a stream that forgets its request would hide its losses.
            hold("I7", usage is not None, "{} does not say what was drawn", consumer)
        if usage is not None and not consumer.closed and (read or consumer.outcome == "whole"):
            drawn = usage.completion_tokens
            hold("I7", got == drawn, "{}: {} tokens drawn, {} delivered", consumer, drawn, got)

    def held(self) -> None:
        """I13: nothing holds a request that ended a while ago."""
        world = self._world
        if (
            not self._ended
            or self._ended[0][0] > world.state.fair - FORGOTTEN
            or world.state.closing
            or world.state.dead
        ):
            return
        if any(actor.suspended for actor in world.host.actors):
            # In the middle of something; it may be about one of these.
            return
        old = []
        while self._ended and self._ended[0][0] <= world.state.fair - FORGOTTEN:
            old.append(self._ended.popleft()[1])
        self._check_held(old)

    def _check_held(self, consumers: list[Consumer]) -> None:
        held = [consumer for consumer in consumers if consumer.held]
        hold("I13", not held, "{} is held after its end", held[0] if held else None)

    # -- at the end ----------------------------------------------------------------------------

    def idle(self) -> None:
        """Check an engine that nobody asks for anything any more."""
        world = self._world
        core, admission = world.engine.core, world.engine.admission
        if core is None or world.state.dead or world.state.closing:
            return
        check_drained(core.scheduler)
        hold("drain", admission.held == 0, "admission holds {}", admission.held)
        hold("drain", admission.held_bytes == 0, "{} bytes are held", admission.held_bytes)
        hold("drain", admission.deadlines.next == float("inf"), "a deadline is held")
        if world.model.adapters is not None:
            held, named = len(world.model.adapters.contents), len(world.engine.adapters.list())
            hold("drain", held == named, "{} adapters are held, {} have names", held, named)
        stats, health = world.engine.stats(), world.engine.health()
        hold("stats", stats.running == stats.waiting == stats.paused == 0, "{}", stats)
        hold("drain", stats.blocks_pinned == 0, "{} blocks are pinned", stats.blocks_pinned)
        overloads = self.ends.overloads
        refused = overloads <= stats.refused <= overloads + self._unheard
        hold("stats", refused, "{} refused, {}", overloads, stats)
        hold("stats", health.state in ("open", "degraded"), "{}", health)

    def closed(self) -> None:
        """Check an engine that was closed, and whose consumers have all ended."""
        world = self._world
        actors = [actor.name for actor in world.host.actors]
        hold("drain", not actors, "threads are left: {}", actors)
        admission = world.engine.admission
        held = admission.held, admission.held_bytes
        hold("drain", held == (0, 0), "admission holds {} requests, {} bytes", *held)
        if not world.state.dead and not world.state.closing:
            self._check_held([consumer for _, consumer in self._ended])
        for loop in world.loops:
            hold("loop", not loop.problems, "{}", loop.problems)
        state = world.engine.health().state
        hold("stats", state in ("closed", "dead"), "a closed engine is {}", state)
        for observer in world.engine.config.observers:
            if isinstance(observer, WatchingObserver):
                self._check_observer(observer)

    def _check_observer(self, observer: WatchingObserver) -> None:
        """What an observer was told is what the protocol promises."""
        hold("observer", not observer.problems, "{}: {}", observer, observer.problems)
        seen = observer.opened or observer.closed
        hold("observer", observer.closed == bool(seen), "{} closed {}", observer, observer.closed)
        if not observer.sound or not observer.opened:
            return
        hold("observer", observer.ended == 1, "{} is not told of the end", observer)
        hold("observer", not observer.unended, "{}: no end of {}", observer, observer.unended)
