"""The watchdog, turn by turn, in a time of its own."""

from __future__ import annotations

from typing import Any

import pytest

from asyncinfer import DeadlineExceeded, EngineClosed
from asyncinfer.engine.watchdog import GRACE, Watchdog
from asyncinfer.testing import FakeModel, InlineEngine


class World:
    """An inline engine and its watchdog; a step runs while `step` is called."""

    def __init__(self, step_timeout: float = 8.0) -> None:
        self.during: list[Any] = []
        self.engine = InlineEngine(FakeModel(gate=self.gate))
        self.hung = 0
        self.why = ""
        #: The call into a plugin that the decode thread is in.
        self.call: object = None
        self.watchdog = Watchdog(
            self.engine.core,
            self.engine.admission,
            step_timeout,
            lambda: self.engine.now,
            self.hang,
            lambda: self.call,
        )

    def hang(self, why: str) -> None:
        self.hung += 1
        self.why = why

    def gate(self, phase: str, plan: Any) -> None:
        if phase == "launch" and self.during:
            self.during.pop()()

    def look(self, after: float) -> float | None:
        """Let time pass; seconds until the next look."""
        self.engine.now += after
        due = self.watchdog.turn()
        return None if due is None else due - self.engine.now


def test_a_step_that_takes_long_is_a_hang_by_the_looks_at_it() -> None:
    world = World()
    seen: list[int] = []

    def step() -> None:
        for _ in range(12):
            if world.look(1.0) is None:
                break
            seen.append(world.hung)

    world.during.append(step)
    world.engine.submit([1], max_tokens=3)
    world.engine.pump()
    # Eight seconds and the look that finds more.
    assert world.hung == 1
    assert 7 <= len(seen) <= 9


def test_a_process_that_was_stopped_is_none() -> None:
    """The clock went on, and nobody looked: the step had no chance to end."""
    world = World()

    def step() -> None:
        assert world.look(1.0) is not None
        for _ in range(3):
            assert world.look(3600.0) is not None

    world.during.append(step)
    world.engine.submit([1], max_tokens=3)
    world.engine.run()
    assert world.hung == 0


def test_many_short_steps_are_none() -> None:
    world = World()

    def step() -> None:
        world.during.append(step)
        assert world.look(1.0) is not None

    world.during.append(step)
    world.engine.submit([1], max_tokens=40)
    world.engine.run()
    assert world.hung == 0


def test_it_looks_at_the_next_deadline() -> None:
    world = World()
    stream = world.engine.submit([1], max_tokens=1000, deadline=5.5)
    assert world.watchdog.ready
    assert world.look(0.0) == 1.0
    assert world.look(5.0) == pytest.approx(0.5 + GRACE)
    assert not stream.ended
    # The decode thread has its chance to do it in order.
    assert world.look(0.5) == pytest.approx(GRACE)
    assert not stream.ended
    world.look(GRACE)
    assert isinstance(stream.error, DeadlineExceeded)
    assert world.engine.admission.held == 1
    world.engine.run()
    assert world.engine.admission.held == 0
    assert world.engine.stats().failed == 1


def test_a_look_that_is_held_up_makes_the_next_one_no_later() -> None:
    """The process was stopped between the reading of the clock and the wait for the next look."""
    world = World()
    world.engine.submit([1], max_tokens=1000, deadline=0.5)
    read = world.engine.now

    def stopped() -> float:
        world.engine.now = read + 2.0
        return read

    engine = world.engine
    watchdog = Watchdog(engine.core, engine.admission, 8.0, stopped, world.hang, lambda: None)
    engine.now = read
    due = watchdog.turn()
    assert due == pytest.approx(read + 0.5 + GRACE)


def test_the_decode_thread_was_first() -> None:
    world = World()
    stream = world.engine.submit([1], max_tokens=1000, deadline=5.5)
    world.engine.pump(3)
    world.engine.now = 5.5
    world.engine.pump()
    told = stream.error
    assert isinstance(told, DeadlineExceeded)
    world.look(1.0)
    assert stream.error is told
    assert world.engine.stats().failed == 1


def test_a_drain_that_is_over() -> None:
    world = World()
    streams = [world.engine.submit([1], max_tokens=1000) for _ in range(3)]
    world.engine.pump()
    world.engine.admission.drain(2.0)
    assert world.look(0.0) == pytest.approx(1.0)
    assert world.look(1.5) == pytest.approx(0.5 + 0.02, abs=0.021)
    world.look(0.6)
    assert all(isinstance(stream.error, EngineClosed) for stream in streams)
    world.engine.pump()
    assert world.engine.admission.held == 0


def looks_at_a_close(world: World, *calls: object) -> int | None:
    """After how many looks, a tenth of a second apart, it says that a close is held up."""
    for number, call in enumerate(calls):
        world.call = call
        if world.look(0.1) is None:
            return number
    return None


def test_a_close_waits_a_second_for_a_call_into_a_plugin() -> None:
    world = World(step_timeout=300.0)
    world.engine.submit([1], max_tokens=1000)
    world.engine.pump()
    world.engine.core.turn_began = 0.0
    # Not while requests have time.
    world.engine.admission.drain(10.0)
    assert looks_at_a_close(world, *["hangs"] * 90) is None
    assert looks_at_a_close(world, *["hangs"] * 90) in (20, 21, 22)
    assert world.why == "a plugin's call kept a close waiting for 1 s"


@pytest.mark.parametrize("calls", [range(60), [None] * 60, [*"aaaaaaa", None] * 8])
def test_calls_that_return_are_waited_for(calls: Any) -> None:
    world = World(step_timeout=300.0)
    world.engine.submit([1], max_tokens=1000)
    world.engine.pump()
    world.engine.admission.drain(0.0)
    assert looks_at_a_close(world, *calls) is None


def test_a_process_that_was_stopped_holds_up_no_close() -> None:
    world = World(step_timeout=300.0)
    world.engine.submit([1], max_tokens=1000)
    world.engine.pump()
    world.engine.admission.drain(0.0)
    world.call = "slow"
    for _ in range(4):
        assert world.look(3600.0) is not None


def test_a_close_that_waits_for_nobody_ends_at_once() -> None:
    """Requests have time to go on, and there are none."""
    world = World(step_timeout=300.0)
    world.engine.admission.drain(1000.0)
    assert looks_at_a_close(world, *["hangs"] * 40) in (10, 11, 12)


def test_it_ends_with_the_decode_thread() -> None:
    world = World()
    world.watchdog.stop()
    assert world.watchdog.ready
    assert world.look(0.0) is None
