"""`Actions`: what can happen in a simulated life, one method `do_...` for each."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from asyncinfer.errors import AsyncInferError, InvalidRequest
from asyncinfer.scheduler import check_fits
from asyncinfer.testing.simulator.checks import ACK
from asyncinfer.testing.simulator.consumer import Consumer
from asyncinfer.testing.simulator.expected import Expected
from asyncinfer.testing.simulator.scenario import Ask
from asyncinfer.testing.simulator.vocabulary import simulated_tokenizer

if TYPE_CHECKING:
    from asyncinfer.testing.simulator.life import Life

__all__ = ["Actions"]


class Actions:
    """Each does nothing where there is nobody to do it to, so that an action can be left out of a
    trace without those after it becoming senseless."""

    def __init__(self, life: Life) -> None:
        self._life = life

    # -- consumers -----------------------------------------------------------------------------

    def do_submit(self, values: dict[str, Any]) -> None:
        """A consumer asks for something."""
        life, ask = self._life, Ask.from_json(values)
        loop = life.open_loop(ask.loop)
        if ask.id in life.consumers or loop is None:
            return
        prompt: Any = ask.prompt
        if ask.form != "ids":
            prompt = text = simulated_tokenizer().decode(ask.prompt)
        expected = None
        with suppress(InvalidRequest):
            total = check_fits(life.model.spec, len(ask.prompt), ask.max_tokens)
            expected = Expected(life.scenario, ask, ask.prompt, total)
        if ask.form == "chat":
            if not prompt.strip():
                # Whether that is a message is the template's affair.
                return
            prompt = [{"role": "user", "content": prompt}]
        consumer = Consumer(life.engine, ask, prompt, expected, life.leaving)
        if ask.form != "ids":
            life.texts.setdefault(text, []).append(consumer)
        life.consumers[ask.id] = consumer
        consumer.task = loop.create_task(consumer.run())

    def do_cancel(self, id: int) -> None:
        """`Task.cancel` of a consumer."""
        life = self._life
        if (consumer := life.consumers.get(id)) is not None and consumer.task is not None:
            consumer.leave_by(life.host.now + ACK)
            consumer.task.cancel()
            # One that is cancelled before it began says nothing itself.
            life.leaving[id] = None

    def do_stop(self, id: int) -> None:
        """`Stream.stop` beside the reader."""
        consumer = self._life.consumers.get(id)
        if consumer is not None and consumer.stream is not None:
            consumer.stopped = True
            consumer.stream.stop()

    def do_aclose(self, id: int) -> None:
        """Another task closes the stream under its reader."""
        life = self._life
        consumer = life.consumers.get(id)
        if consumer is not None and consumer.stream is not None:
            consumer.closed = True
            task = life.loops[consumer.ask.loop].create_task(consumer.stream.aclose())
            life.closers[task] = life.host.now + ACK

    # -- time and threads ----------------------------------------------------------------------

    def do_loop(self, index: int, count: int) -> None:
        """So many callbacks of an event loop run."""
        if (loop := self._life.open_loop(index)) is not None:
            for _ in range(count):
                if not loop.run_one():
                    break

    def do_turn(self, name: str, which: int, points: int | None) -> None:
        """A thread runs, or goes on, until it has passed so many points (None: to the end of its
        turn)."""
        life = self._life
        named = [actor for actor in life.host.actors if actor.name == name]
        if named:
            life.give_turn(named[which % len(named)], points)

    def do_time(self, seconds: float) -> None:
        """Everybody runs as they are due, but for suspended threads."""
        self._life.pass_time(seconds)

    def do_jump(self, seconds: float) -> None:
        """The process was stopped: time went on without anybody."""
        self._life.state.jump(seconds)

    # -- faults --------------------------------------------------------------------------------

    def do_fault(self, kind: Any, which: int = 0) -> None:
        """The next step fails in this way."""
        self._life.model.faults[kind] = which
        self._life.seen[f"fault: {kind}"] += 1

    def do_refuse_threads(self, count: int) -> None:
        """So many of the next threads cannot be started."""
        self._life.host.refused = count

    # -- the engine's end ----------------------------------------------------------------------

    def do_close(self, drain: float | None) -> None:
        """`Engine.aclose` in a task of its own."""
        life = self._life
        life.state.closing = True
        task = life.loops[0].create_task(self._close(drain))
        life.closers[task] = float("inf")

    def do_leave(self, clean: bool) -> None:
        """The block around the engine ends, or is left by an exception."""
        self._life.owner.leave(clean)

    def do_cancel_owner(self) -> None:
        """`Task.cancel` of the task around the engine, perhaps while it drains or opens."""
        self._life.owner.cancel()

    async def _close(self, drain: float | None) -> None:
        life = self._life
        # From now on, for the event loop may have been kept from running.
        seconds = life.scenario.drain_timeout if drain is None else drain
        life.state.close(life.host.now + seconds)
        task = asyncio.current_task()
        assert task is not None
        life.closers[task] = life.checks.close_due(seconds)
        try:
            await life.engine.aclose(drain_timeout=drain)
        except AsyncInferError as error:
            life.seen[f"close: {type(error).__name__}"] += 1
