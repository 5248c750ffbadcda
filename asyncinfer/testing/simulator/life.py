"""`Life`: an engine, its event loops and its consumers, from the opening to the end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from asyncinfer.scheduler import Step
from asyncinfer.testing.invariants import InvariantError, hold
from asyncinfer.testing.simulator.actions import Actions
from asyncinfer.testing.simulator.checks import GRACE, Checks
from asyncinfer.testing.simulator.host import Actor, VirtualHost
from asyncinfer.testing.simulator.model import SimulatedModel
from asyncinfer.testing.simulator.owner import Owner
from asyncinfer.testing.simulator.plugins import Plugins
from asyncinfer.testing.simulator.scenario import Action, Scenario
from asyncinfer.testing.simulator.state import LifeState
from asyncinfer.testing.simulator.timeline import Timeline
from asyncinfer.testing.simulator.world import World

__all__ = ["Life"]


class Life(World):
    """Takes actions one by one until there are none or something does not hold. Then everybody runs
    on until nobody waits any more, and the engine is closed. Checked throughout.

    Args:
        actions: gives the next action, None at the end. An action is the name of a method `do_...`
            of `Actions`, and its arguments.
        plugins: in place of the scenario's. A fault of theirs is a failure.
        every: steps from one check of the scheduler's invariants to the next.
    """

    def __init__(
        self,
        scenario: Scenario,
        actions: Callable[[Life], Action | None],
        *,
        plugins: Plugins | None = None,
        every: int = 1,
    ) -> None:
        host = VirtualHost(self._meanwhile, self._joining)
        state = LifeState(host, scenario)
        model = SimulatedModel(
            scenario,
            point=host.point,
            before_launch=self._before_launch,
            encoding=self._encoding,
            struck=self._struck,
            broke=state.broke,
            clock=host.clock,
        )
        super().__init__(scenario, host, state, model, plugins)
        #: Every action taken.
        self.trace: list[Action] = []
        self.checks = Checks(self, every)
        self.owner = Owner(self, self.checks)
        self.timeline = Timeline(self, self.checks, lambda: self.failed)
        self._actions = Actions(self, self.checks, self.owner, self.timeline, self.give_turn)
        self._next = actions
        self._finishing = False
        self._failure: Exception | None = None
        #: Which actor goes on, and how far.
        self._resumed: tuple[Actor, int | None] | None = None

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
        self.seen["deaths"] += self.state.dead
        for loop in self.loops:
            loop.close()
        if self._failure is not None:
            raise self._failure

    @property
    def failed(self) -> bool:
        """Whether some check failed."""
        return self._failure is not None

    def give_turn(self, actor: Actor, points: int | None) -> None:
        """A thread runs, or goes on."""
        if actor.suspended:
            # It goes on when those that run above it have paused; see `_meanwhile`.
            self._resumed = actor, points
        else:
            self.host.run(actor, points)

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
            getattr(self._actions, "do_" + name)(*arguments)
            self.seen[name] += 1
            self._reap()
            if name in ("turn", "time", "late"):
                self.checks.step()
        except Exception as error:
            # Held here: what lies under it on the stack may take it for its own.
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error

    def _meanwhile(self, actor: Actor) -> None:
        """Others run, until it is the actor's turn again."""
        self.seen[f"interrupted: {actor.name}"] += 1
        self._suspend(actor)
        while (action := self._take()) is not None:
            self._perform(action)
            if self._resumed is not None and self._resumed[0] is actor:
                actor.points = self._resumed[1]
                self._resumed = None
                break
        self._resume(actor)

    def _joining(self, caller: Actor, actor: Actor, until: float) -> None:
        """A thread waits for the end of another one, while everybody else goes on."""
        self.seen[f"joined: {actor.name}"] += 1
        self._suspend(caller)
        while not actor.ended and self.host.now < until and self._failure is None:
            self.timeline.pass_time(min(0.05, until - self.host.now))
        self.seen[f"left behind: {actor.name}"] += not actor.ended
        self._resume(caller)

    def _suspend(self, actor: Actor) -> None:
        if actor.name == "decode":
            core = self.engine.core
            self.state.suspend_decode(None if core is None else core.turn_began)

    def _resume(self, actor: Actor) -> None:
        if actor.name == "decode":
            self.state.resume_decode()

    def _finish(self) -> None:
        """Let everything come to its end."""
        self._finishing = True
        scenario = self.scenario
        for consumer in [*self.consumers.values()]:
            if consumer.ask.then == "sleep" or consumer.ask.pace > 0.1:
                self._actions.do_cancel(consumer.ask.id)
        most = sum(c.ask.n for c in self.consumers.values()) * scenario.max_context
        until = self.host.now + 60.0 + 3 * most * scenario.step_seconds
        while (self.consumers or self.loads) and self._failure is None and self.host.now < until:
            self.timeline.pass_time(1.0)
            self._reap()
        for talk in self.talks.values():
            talk.close()
        for pin in self.pins.values():
            pin.close()
        self.timeline.pass_time(1.0)
        self._reap()
        self.checks.step()
        hold("liveness", not self.consumers, "never ended: {}", [*self.consumers.values()])
        hold("liveness", not self.loads, "loads of adapters never end")
        self.checks.idle()
        self.owner.leave(True)
        self.timeline.pass_time(scenario.drain_timeout + GRACE + 2.0)
        self._reap()
        hold("liveness", self.owner.task.done(), "the engine never closes")
        hold("liveness", all(task.done() for task in self.closers), "a close never ends")
        self.checks.closed()

    def _unwind(self) -> None:
        """After a failure: let tasks end as well as they can."""
        tasks = [consumer.task for consumer in self.consumers.values()]
        everyone = [self.owner.task, *tasks, *self.closers, *self.loads]
        for task in everyone:
            if task is not None and not task.done():
                task.cancel()
        for _ in range(30):
            with suppress(BaseException):
                self.timeline.run_due()
            self.host.now += 1.0
        for task in everyone:
            if task is not None and task.done() and not task.cancelled():
                task.exception()

    def _reap(self) -> None:
        """Look after tasks that are done."""
        for id in [*self.leaving] if self.leaving else ():
            consumer = self.consumers[id]
            task = consumer.task
            if task is not None and task.done():
                if not task.cancelled() and (error := task.exception()) is not None:
                    assert isinstance(error, Exception)
                    raise error
                # One that was cancelled before it began says nothing itself.
                consumer.outcome = consumer.outcome or "cancelled"
                consumer.task = None
                consumer.let_go()
                del self.consumers[id], self.leaving[id]
                self.seen[f"ended: {consumer.outcome}"] += 1
                self.checks.ended(consumer)
                if (talk := self.speaking.pop(id, None)) is not None:
                    self.seen[f"said: {consumer.outcome}"] += 1
                    kept, size = self.nothing_evicted, self.scenario.block_size
                    self.seen["tokens said again"] += talk.ended(consumer, size, kept)
        if self.loads:
            for load in [load for load in self.loads if load.done()]:
                self.loads.discard(load)
                if not load.cancelled():
                    # What it raises is a fault.
                    load.result()
        for closer in self.closers:
            if closer.done() and not closer.cancelled() and closer.exception() is not None:
                raise InvariantError(f"end: a close raised {closer.exception()!r}")
        self.checks.held()

    # -- what the model tells ------------------------------------------------------------------

    def _before_launch(self, plan: Step) -> None:
        self.seen["steps"] += 1
        self.seen["query tokens"] += plan.tokens
        if self.model.adapters is not None:
            self.adapters.launched(plan, self.model.adapters)
        try:
            self.checks.launching()
        except Exception as error:
            self._fail(error)

    def _encoding(self, text: str) -> None:
        asked = self.texts.get(text, [])
        if asked and all(consumer.outcome is not None for consumer in asked):
            self._fail(InvariantError(f"I13: a prompt is tokenised for nobody: {text!r}"))

    def _struck(self, plan: Step, rows: list[int]) -> None:
        self.seen["rows failed"] += len(rows)
