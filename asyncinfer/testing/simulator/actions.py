"""`Actions`: what can happen in a simulated life, one method `do_...` for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from asyncinfer.errors import (
    AsyncInferError,
    EngineClosed,
    EngineDead,
    InvalidRequest,
    ModelLoadError,
)
from asyncinfer.scheduler import check_fits, check_guided
from asyncinfer.testing.invariants import hold
from asyncinfer.testing.simulator.checks import ACK, Checks
from asyncinfer.testing.simulator.consumer import Consumer
from asyncinfer.testing.simulator.expected import Expected
from asyncinfer.testing.simulator.host import Actor
from asyncinfer.testing.simulator.owner import Owner
from asyncinfer.testing.simulator.samplers import samplers_of
from asyncinfer.testing.simulator.scenario import Ask
from asyncinfer.testing.simulator.talks import Talk
from asyncinfer.testing.simulator.timeline import Timeline
from asyncinfer.testing.simulator.vocabulary import prompt_of, simulated_tokenizer
from asyncinfer.testing.simulator.world import World

__all__ = ["Actions"]


class Actions:
    """An action does nothing where it finds no target, so that actions can be left out of a trace
    without making later ones invalid."""

    def __init__(
        self,
        world: World,
        checks: Checks,
        owner: Owner,
        timeline: Timeline,
        give_turn: Callable[[Actor, int | None], None],
    ) -> None:
        """`give_turn` runs or resumes a thread until it has passed so many points."""
        self._world = world
        self._checks = checks
        self._owner = owner
        self._timeline = timeline
        self._give_turn = give_turn

    # -- consumers -----------------------------------------------------------------------------

    def do_submit(self, values: dict[str, Any]) -> None:
        """A consumer makes a request."""
        world, ask = self._world, Ask.from_json(values)
        loop = world.open_loop(ask.loop)
        if ask.id in world.consumers or loop is None:
            return
        prompt, text = prompt_of(ask), simulated_tokenizer().decode(ask.prompt)
        if ask.form == "chat" and not text.strip():
            # Whether that is a message is the template's affair.
            return
        expected = None
        with suppress(InvalidRequest):
            spec, length = world.model.spec, len(ask.prompt)
            total = check_fits(spec, length, ask.max_tokens)
            if ask.guide:
                total = check_guided(spec, length, len(ask.guide), total, ask.max_tokens)
            expected = Expected(world.scenario, ask, ask.prompt, total, world.adapters)
        samplers = None if ask.sampler is None else samplers_of(ask.sampler, world.host)
        consumer = Consumer(world.engine, ask, prompt, expected, world.leaving, samplers)
        if ask.form != "ids":
            world.texts.setdefault(text, []).append(consumer)
        world.consumers[ask.id] = consumer
        consumer.task = loop.create_task(consumer.run())

        world.count_blocks(ask)

    def do_cancel(self, id: int) -> None:
        """`Task.cancel` of a consumer's task."""
        world = self._world
        if (consumer := world.consumers.get(id)) is not None and consumer.task is not None:
            consumer.leave_by(world.host.now + ACK)
            consumer.task.cancel()
            # A task that is cancelled before it began reports no end itself.
            world.leaving[id] = None

    def do_stop(self, id: int) -> None:
        """`Stream.stop`, called beside the reader."""
        consumer = self._world.consumers.get(id)
        if consumer is not None and consumer.stream is not None:
            consumer.stopped = True
            consumer.stream.stop()

    def do_aclose(self, id: int) -> None:
        """Another task closes the stream under its reader."""
        world = self._world
        consumer = world.consumers.get(id)
        if consumer is not None and consumer.stream is not None:
            consumer.closed = True
            task = world.loops[consumer.ask.loop].create_task(consumer.stream.aclose())
            world.closers[task] = world.host.now + ACK

    # -- conversations -------------------------------------------------------------------------

    def do_talk(self, id: int, index: int, scope: str, ttl: float | None) -> None:
        """A session is opened."""
        world = self._world
        with suppress(EngineClosed, EngineDead):
            world.talks[id] = Talk(world.engine.session(ttl=ttl, cache_scope=scope), index, scope)

    def do_say(self, id: int, values: dict[str, Any]) -> None:
        """A consumer sends a message in a session."""
        world, said = self._world, Ask.from_json(values)
        talk = world.talks.get(id)
        if talk is None or talk.consumer is not None or said.id in world.consumers:
            return
        ask, loop = talk.whole(said), world.open_loop(talk.loop)
        if loop is None or not talk.new_text(said.prompt).strip():
            return
        expected = None
        with suppress(InvalidRequest):
            total = check_fits(world.model.spec, len(ask.prompt), ask.max_tokens)
            expected = Expected(world.scenario, ask, ask.prompt, total, world.adapters)
        consumer = Consumer(
            world.engine, ask, said.prompt, expected, world.leaving, begin=talk.begin
        )
        world.count_blocks(ask)
        talk.speaks(consumer, said)
        world.texts.setdefault(talk.new_text(said.prompt), []).append(consumer)
        world.consumers[ask.id] = consumer
        world.speaking[ask.id] = talk
        consumer.task = loop.create_task(consumer.run())

    def do_fork(self, id: int, made: int) -> None:
        """A conversation is forked."""
        talks = self._world.talks
        if id in talks and talks[id].consumer is None:
            talks[made] = talks[id].fork()

    def do_rewind(self, id: int, count: int) -> None:
        """The last messages of a conversation are taken back."""
        talk = self._world.talks.get(id)
        if talk is not None and talk.consumer is None:
            talk.rewind(count)

    def do_part(self, id: int, dropped: bool) -> None:
        """A session is closed, perhaps while it is answered, or dropped."""
        talk = self._world.talks.get(id)
        if talk is not None and (talk.consumer is None or talk.consumer.stream is not None):
            del self._world.talks[id]
            if not dropped:
                talk.close()

    def do_pin(self, id: int, index: int, prompt: list[int], ttl: float | None) -> None:
        """A prompt is pinned."""
        if (loop := self._world.open_loop(index)) is not None:
            self._world.loads.add(loop.create_task(self._pin(id, prompt, ttl)))

    def do_unpin(self, id: int) -> None:
        """A pinned prompt is released."""
        if (pin := self._world.pins.pop(id, None)) is not None:
            pin.close()

    async def _pin(self, id: int, prompt: list[int], ttl: float | None) -> None:
        world = self._world
        outcome = "entered"
        try:
            world.pins[id] = await world.engine.pin(prompt, ttl=ttl).__aenter__()
        except AsyncInferError as error:
            self._checks.ends.refused(error, pin=True)
            outcome = type(error).__name__
        world.seen[f"pin: {outcome}"] += 1

    # -- adapters ------------------------------------------------------------------------------

    def do_load(self, name: str, adapter: int, index: int) -> None:
        """An adapter is loaded under a name, perhaps in place of another."""
        if (loop := self._world.open_loop(index)) is not None:
            self._world.loads.add(loop.create_task(self._load(name, adapter)))

    def do_unload(self, name: str) -> None:
        """An adapter's name is taken away."""
        world = self._world
        world.loads.add(world.loops[0].create_task(self._unload(name)))

    def do_cancel_loads(self) -> None:
        """`Task.cancel` of all tasks that load adapters."""
        for load in self._world.loads:
            load.cancel()

    async def _load(self, name: str, adapter: int) -> None:
        world = self._world
        world.adapters.asked(name, adapter)
        outcome = "loaded"
        try:
            source: Any = {"content": adapter}
            await world.engine.adapters.load(name, source)
            world.adapters.loaded(name, adapter)
        except ModelLoadError as error:
            # There may be room again by now.
            meant = "fault" in str(error) or "room for" in str(error)
            hold("end", meant, "adapter {}: {}", name, error)
            outcome = "ModelLoadError"
        except AsyncInferError as error:
            self._checks.ends.refused(error)
            outcome = type(error).__name__
        world.seen[f"adapter: {outcome}"] += 1

    async def _unload(self, name: str) -> None:
        world = self._world
        known = world.adapters.known(name)
        try:
            await world.engine.adapters.unload(name)
            world.adapters.unloaded(name, known)
        except InvalidRequest:
            hold("end", not known, "adapter {} is unknown", name)
        except AsyncInferError as error:
            self._checks.ends.refused(error)

    # -- time and threads ----------------------------------------------------------------------

    def do_loop(self, index: int, count: int) -> None:
        """An event loop runs so many callbacks."""
        if (loop := self._world.open_loop(index)) is not None:
            for _ in range(count):
                if not loop.run_one():
                    break

    def do_turn(self, name: str, which: int, points: int | None) -> None:
        """A thread runs or resumes until it has passed so many points (None: to the end of its
        turn)."""
        world = self._world
        named = [actor for actor in world.host.actors if actor.name == name]
        if named:
            self._give_turn(named[which % len(named)], points)

    def do_time(self, seconds: float) -> None:
        """Time passes, and all loops and threads run when due, except suspended threads."""
        self._timeline.pass_time(seconds)

    def do_late(self, index: int, seconds: float) -> None:
        """The same, but this event loop does not run, and then hears of everything at once. Its
        tasks have made their requests before."""
        if (loop := self._world.open_loop(index)) is not None:
            loop.run_ready()
            self._timeline.pass_time(seconds, late=loop)

    def do_jump(self, seconds: float) -> None:
        """The process was stopped: time passed in which nothing ran."""
        self._world.state.jump(seconds)

    # -- faults --------------------------------------------------------------------------------

    def do_fault(self, kind: Any, which: int = 0) -> None:
        """The next step fails in this way."""
        self._world.model.faults[kind] = which
        self._world.seen[f"fault: {kind}"] += 1

    def do_refuse_threads(self, count: int) -> None:
        """The next `count` threads cannot be started."""
        self._world.host.refused = count

    # -- the engine's end ----------------------------------------------------------------------

    def do_close(self, drain: float | None) -> None:
        """`Engine.aclose` in a task of its own."""
        world = self._world
        world.state.closing = True
        task = world.loops[0].create_task(self._close(drain))
        world.closers[task] = float("inf")

    def do_leave(self, clean: bool) -> None:
        """The block around the engine ends, or is left by an exception."""
        self._owner.leave(clean)

    def do_cancel_owner(self) -> None:
        """`Task.cancel` of the task around the engine, perhaps while the engine drains or opens."""
        self._owner.cancel()

    async def _close(self, drain: float | None) -> None:
        world = self._world
        # Counted from now on, since the event loop may have been kept from running.
        seconds = world.scenario.drain_timeout if drain is None else drain
        world.state.close(world.host.now + seconds)
        task = asyncio.current_task()
        assert task is not None
        world.closers[task] = self._checks.close_due(seconds)
        try:
            await world.engine.aclose(drain_timeout=drain)
        except AsyncInferError as error:
            world.seen[f"close: {type(error).__name__}"] += 1
