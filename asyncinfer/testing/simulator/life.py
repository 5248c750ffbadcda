"""`Life`: an engine, its event loops and its consumers, from the opening to the end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

from asyncinfer.config import EngineConfig
from asyncinfer.errors import AsyncInferError, InvalidRequest
from asyncinfer.scheduler import Step, check_fits
from asyncinfer.testing.invariants import InvariantError, hold
from asyncinfer.testing.simulator.checks import ACK, FOUND_OUT, GRACE, Checks
from asyncinfer.testing.simulator.consumer import Consumer
from asyncinfer.testing.simulator.engine import SimulatedEngine
from asyncinfer.testing.simulator.expected import Expected
from asyncinfer.testing.simulator.host import Actor, VirtualHost
from asyncinfer.testing.simulator.loop import VirtualLoop
from asyncinfer.testing.simulator.model import SimulatedModel
from asyncinfer.testing.simulator.plugins import CACHE_POLICIES, SCHEDULERS
from asyncinfer.testing.simulator.scenario import Action, Ask, Scenario
from asyncinfer.testing.simulator.vocabulary import simulated_tokenizer

__all__ = ["Life", "Plugins"]

#: By option of `EngineConfig`: a name, a name with arguments, or what makes a plugin.
Plugins: TypeAlias = Mapping[str, Any]


class Life:
    """Takes actions one by one until there are none or something does not hold. Then everybody runs
    on until nobody waits any more, and the engine is closed. Checked throughout.

    Args:
        actions: gives the next action, None at the end. An action is the name of a method `do_...`
            and its arguments.
        plugins: in place of the scenario's. A fault of theirs is a failure.
        every: the scheduler's invariants are checked at every so manieth step.
    """

    def __init__(
        self,
        scenario: Scenario,
        actions: Callable[[Life], Action | None],
        *,
        plugins: Plugins | None = None,
        every: int = 1,
    ) -> None:
        self.scenario = scenario
        #: Every action taken.
        self.trace: list[Action] = []
        #: What happened, and how often.
        self.seen = Counter[str]()
        self.host = VirtualHost(self._meanwhile)
        self.loops = [VirtualLoop(lambda: self.host.now) for _ in range(scenario.loops)]
        self.model = SimulatedModel(
            scenario,
            point=self.host.point,
            before_launch=self._before_launch,
            encoding=self._encoding,
            struck=self._struck,
            broke=self.dies,
        )
        #: Whose faults are failures: those of the scenario are meant to be.
        self.plugins = dict(plugins or {})
        self.engine = SimulatedEngine(self.host, self.model, self._config())
        #: Consumers that have not ended.
        self.consumers: dict[int, Consumer] = {}
        #: Tasks that close something, and when they must be done.
        self.closers: list[tuple[asyncio.Task[None], float]] = []
        self.owner = self.loops[0].create_task(self._own())
        self.opened = False
        #: When nobody can be answered any more, as the simulation knows it: the drain of a close, a
        #: death. Seconds; inf while open.
        self.over = float("inf")
        self.closing = False
        self.dead = False
        #: Seconds that passed while everybody could run, and when they last did not.
        self.fair = 0.0
        self.jumped = self.host.now
        #: Every such moment, and for how long nobody ran.
        self.jumps: list[tuple[float, float]] = []
        self.checks = Checks(self, every)
        self._next = actions
        self._finishing = False
        self._failure: Exception | None = None
        self._leave = asyncio.Event()
        self._clean = True
        #: Who is to go on, and how far.
        self._resumed: tuple[Actor, int | None] | None = None
        #: Fair seconds that the decode thread has been in the middle of a turn.
        self._hung: float | None = None
        #: As many that the watchdog may count besides, because the process was stopped; whether it
        #: may have declared a death.
        self._doubt = 0.0
        self.doubtful = False
        #: Who asked with a text.
        self._texts: dict[str, list[Consumer]] = {}

    def run(self) -> None:
        """Raises `InvariantError` where something does not hold; any other exception is a fault of
        the engine's that nobody caught."""
        try:
            while (action := self._take()) is not None:
                self._perform(action)
            if self._failure is None:
                self._finish()
        except Exception as error:
            self._fail(error)
        if self._failure is not None:
            self._unwind()
        for loop in self.loops:
            loop.close()
        if self._failure is not None:
            raise self._failure

    @property
    def hangs(self) -> bool:
        """Whether the decode thread is in the middle of a turn."""
        return self._hung is not None

    # -- actions -------------------------------------------------------------------------------

    def do_submit(self, values: dict[str, Any]) -> None:
        """A consumer asks for something."""
        ask = Ask.from_json(values)
        loop = self._loop(ask.loop)
        if ask.id in self.consumers or loop is None:
            return
        prompt: Any = ask.prompt
        if ask.form != "ids":
            prompt = text = simulated_tokenizer().decode(ask.prompt)
        expected = None
        with suppress(InvalidRequest):
            total = check_fits(self.model.spec, len(ask.prompt), ask.max_tokens)
            expected = Expected(self.scenario, ask, ask.prompt, total)
        if ask.form == "chat":
            if not prompt.strip():
                # Whether that is a message is the template's affair.
                return
            prompt = [{"role": "user", "content": prompt}]
        consumer = Consumer(self.engine, ask, prompt, expected)
        if ask.form != "ids":
            self._texts.setdefault(text, []).append(consumer)
        self.consumers[ask.id] = consumer
        consumer.task = loop.create_task(consumer.run())

    def do_cancel(self, id: int) -> None:
        """`Task.cancel` of a consumer."""
        if (consumer := self.consumers.get(id)) is not None and consumer.task is not None:
            consumer.leave_by(self.host.now + ACK)
            consumer.task.cancel()

    def do_stop(self, id: int) -> None:
        """`Stream.stop` beside the reader."""
        consumer = self.consumers.get(id)
        if consumer is not None and consumer.stream is not None:
            consumer.stopped = True
            consumer.stream.stop()

    def do_aclose(self, id: int) -> None:
        """Another task closes the stream under its reader."""
        consumer = self.consumers.get(id)
        if consumer is not None and consumer.stream is not None:
            consumer.closed = True
            task = self.loops[consumer.ask.loop].create_task(consumer.stream.aclose())
            self.closers.append((task, self.host.now + ACK))

    def do_loop(self, index: int, count: int) -> None:
        """So many callbacks of an event loop run."""
        if (loop := self._loop(index)) is not None:
            for _ in range(count):
                if not loop.run_one():
                    break

    def do_turn(self, name: str, which: int, points: int | None) -> None:
        """A thread runs, or goes on, until it has passed so many points (None: to the end of its
        turn)."""
        named = [actor for actor in self.host.actors if actor.name == name]
        if not named:
            return
        actor = named[which % len(named)]
        if actor.suspended:
            # It goes on when those that run above it have paused; see `_meanwhile`.
            self._resumed = actor, points
        else:
            self.host.run(actor, points)

    def do_time(self, seconds: float) -> None:
        """Everybody runs as they are due, but for suspended threads."""
        until = self.host.now + seconds
        while self._failure is None:
            self._run_due()
            dues = [actor.due for actor in self.host.actors if not actor.suspended]
            timers = [loop.next_timer for loop in self.loops]
            later = max(self.host.now, min([until, *dues, *timers]))
            self.checks.late()
            self._pass(later)
            if later >= until:
                break
        self._run_due()

    def do_jump(self, seconds: float) -> None:
        """The process was stopped: time went on without anybody."""
        self.jumps.append((self.host.now, seconds))
        if self._hung is not None:
            # Two looks of the watchdog count at most.
            self._doubt += min(seconds, self.scenario.step_timeout / 2)
        self.host.now += seconds
        self.jumped = self.host.now

    def do_fault(self, kind: Any, which: int = 0) -> None:
        """The next step fails in this way."""
        self.model.faults[kind] = which

    def do_refuse_threads(self, count: int) -> None:
        """So many of the next threads cannot be started."""
        self.host.refused = count

    def do_close(self, drain: float | None) -> None:
        """`Engine.aclose` in a task of its own."""
        seconds = self.scenario.drain_timeout if drain is None else drain
        task = self.loops[0].create_task(self._close(drain))
        self.closers.append((task, self.host.now + seconds + GRACE))
        self._end_by(self.host.now + seconds)

    def do_leave(self, clean: bool) -> None:
        """The block around the engine ends, or is left by an exception."""
        self._clean = clean
        self._leave.set()
        if self.opened:
            self._end_by(self.host.now + (self.scenario.drain_timeout if clean else 0.0))

    def do_cancel_owner(self) -> None:
        """`Task.cancel` of the task around the engine, perhaps while it drains or opens."""
        if not self.owner.done():
            self.owner.cancel()
            self._end_by(self.host.now)

    # -- tasks of the program around the engine ------------------------------------------------

    async def _own(self) -> None:
        outcome = "closed"
        try:
            async with self.engine:
                self.opened = True
                self.checks.opened()
                await self._leave.wait()
                # Again, for it may have been asked for while the engine opened.
                self.do_leave(self._clean)
                if not self._clean:
                    raise ZeroDivisionError
        except asyncio.CancelledError:
            outcome = "cancelled"
        except (ZeroDivisionError, RuntimeError, AsyncInferError) as error:
            outcome = type(error).__name__
        self.seen[f"owner: {outcome}"] += 1
        self._end_by(self.host.now)

    async def _close(self, drain: float | None) -> None:
        try:
            await self.engine.aclose(drain_timeout=drain)
        except AsyncInferError as error:
            self.seen[f"close: {type(error).__name__}"] += 1

    # -- how it goes on ------------------------------------------------------------------------

    def _take(self) -> Action | None:
        if self._failure is not None or self._finishing:
            return None
        action = self._next(self)
        if action is not None:
            self.trace.append(action)
        return action

    def _perform(self, action: Action) -> None:
        name, *arguments = action
        try:
            self.host.blocked = 0.0
            getattr(self, "do_" + name)(*arguments)
            self.seen[name] += 1
            self._reap()
            if name in ("turn", "time"):
                self.checks.step()
        except Exception as error:
            # Held here: what lies under it on the stack may take it for its own.
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error

    def _meanwhile(self, actor: Actor) -> None:
        """Others run, until it is the actor's turn again."""
        self.seen[f"interrupted: {actor.name}"] += 1
        if actor.name == "decode":
            self._hung, self._doubt = 0.0, 0.0
        while (action := self._take()) is not None:
            self._perform(action)
            if self._resumed is not None and self._resumed[0] is actor:
                actor.points = self._resumed[1]
                self._resumed = None
                break
        if actor.name == "decode":
            self._hung = None

    def _pass(self, later: float) -> None:
        """Time goes on, and everybody could have run."""
        passed, self.host.now = later - self.host.now, later
        suspended = [actor.name for actor in self.host.actors if actor.suspended]
        if not suspended:
            self.fair += passed
        if "watchdog" in suspended:
            # It calls nothing that could hold it up so long.
            self.jumped = later
        if self._hung is not None and self.opened:
            self._hung += passed
            timeout = self.scenario.step_timeout
            self.doubtful = self.doubtful or self._hung + self._doubt > timeout
            if self._hung > timeout * (1 + FOUND_OUT) and later > self.jumped:
                self.dies()

    def _run_due(self) -> None:
        """Everybody who is due has a turn, until nobody is."""
        host = self.host
        for _ in range(10_000):
            for loop in self.loops:
                if not loop.is_closed():
                    host.blocked = 0.0
                    loop.run_ready()
            due = [actor for actor in host.actors if actor.is_due(host.now)]
            # What a step takes keeps the decode thread from its next turn, news or not.
            due = [
                actor
                for actor in due
                if actor.name != "decode" or actor.due <= host.now or not self._steps()
            ]
            if not due:
                return
            for actor in due:
                if not actor.ended:
                    host.run(actor)
                    if actor.name == "decode" and self._steps():
                        actor.due = host.now + self.scenario.step_seconds
        raise InvariantError("I9: the engine's threads never rest")

    def _steps(self) -> bool:
        core = self.engine.core
        return core is not None and core.busy

    def _finish(self) -> None:
        """Let everything come to its end."""
        self._finishing = True
        scenario = self.scenario
        for consumer in [*self.consumers.values()]:
            if consumer.ask.then == "sleep" or consumer.ask.pace > 0.1:
                self.do_cancel(consumer.ask.id)
        most = sum(c.ask.n for c in self.consumers.values()) * scenario.max_context
        until = self.host.now + 60.0 + 3 * most * scenario.step_seconds
        while self.consumers and self._failure is None and self.host.now < until:
            self.do_time(1.0)
            self._reap()
        self.do_time(1.0)
        self._reap()
        self.checks.step()
        hold("liveness", not self.consumers, "never ended: {}", [*self.consumers.values()])
        self.checks.idle()
        self.do_leave(True)
        self.do_time(scenario.drain_timeout + GRACE + 2.0)
        self._reap()
        hold("liveness", self.owner.done(), "the engine never closes")
        hold("liveness", all(task.done() for task, _ in self.closers), "a close never ends")
        self.checks.closed()

    def _unwind(self) -> None:
        """After a failure: let tasks end as well as they can."""
        tasks = [consumer.task for consumer in self.consumers.values()]
        everyone = [self.owner, *tasks, *(task for task, _ in self.closers)]
        for task in everyone:
            if task is not None and not task.done():
                task.cancel()
        for _ in range(30):
            with suppress(BaseException):
                self._run_due()
            self.host.now += 1.0
        for task in everyone:
            if task is not None and task.done() and not task.cancelled():
                task.exception()

    def _reap(self) -> None:
        """Look after tasks that are done."""
        for id, consumer in [*self.consumers.items()]:
            task = consumer.task
            if task is not None and task.done():
                if not task.cancelled() and (error := task.exception()) is not None:
                    assert isinstance(error, Exception)
                    raise error
                # One that was cancelled before it began says nothing itself.
                consumer.outcome = consumer.outcome or "cancelled"
                consumer.task = None
                del self.consumers[id]
                self.seen[f"ended: {consumer.outcome}"] += 1
                self.checks.ended(consumer)
        for closer, _ in self.closers:
            if closer.done() and not closer.cancelled() and closer.exception() is not None:
                raise InvariantError(f"end: a close raised {closer.exception()!r}")
        self.checks.held()

    def dies(self) -> None:
        """From now on everybody must hear that the engine is dead."""
        if not self.dead:
            self.seen["deaths"] += 1
            self.dead = True
            self._over(self.host.now)

    def _end_by(self, when: float) -> None:
        self.closing = True
        self._over(when)

    def _over(self, when: float) -> None:
        self.over = min(self.over, when)

    def _loop(self, index: int) -> VirtualLoop | None:
        """An event loop that is there."""
        if index >= len(self.loops) or self.loops[index].is_closed():
            return None
        return self.loops[index]

    # -- what the model tells ------------------------------------------------------------------

    def _before_launch(self, plan: Step) -> None:
        self.seen["steps"] += 1
        self.seen["query tokens"] += plan.tokens
        try:
            self.checks.step()
            self.checks.starving()
        except Exception as error:
            self._fail(error)

    def _encoding(self, text: str) -> None:
        asked = self._texts.get(text, [])
        if asked and all(consumer.outcome is not None for consumer in asked):
            self._fail(InvariantError(f"I13: a prompt is tokenised for nobody: {text!r}"))

    def _struck(self, plan: Step, rows: list[int]) -> None:
        self.seen["rows failed"] += len(rows)

    def _config(self) -> EngineConfig:
        scenario = self.scenario
        config = EngineConfig(
            block_size=scenario.block_size,
            max_running=scenario.max_running,
            max_requests=scenario.max_requests,
            max_step_tokens=scenario.max_step_tokens,
            prefix_cache=scenario.prefix_cache,
            cache_policy=_made(CACHE_POLICIES, scenario.cache_policy, self.host),
            scheduler=_made(SCHEDULERS, scenario.scheduler, self.host),
            overlap=scenario.overlap,
            stall_timeout=scenario.stall_timeout,
            step_timeout=scenario.step_timeout,
            drain_timeout=scenario.drain_timeout,
        )
        chosen = {}
        for name, plugin in self.plugins.items():
            # An object of its own for each life: it may keep what it saw.
            chosen[name] = plugin() if callable(plugin) else plugin
            if isinstance(plugin, list):
                chosen[name] = tuple(plugin)
        return config.replace(**chosen)


def _made(known: Mapping[str, Callable[[VirtualHost], Any]], name: str, host: VirtualHost) -> Any:
    """A misbehaving plugin of the simulation's own, or the name of another."""
    return known[name](host) if name in known else name
