"""An event loop whose time is the test's."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from asyncinfer.testing.simulator.loop import VirtualLoop


class Clock:
    now = 100.0


def run(loop: VirtualLoop, clock: Clock, task: asyncio.Task[None]) -> None:
    while not task.done():
        loop.run_ready()
        if not task.done():
            clock.now = loop.next_timer
    task.result()


def test_time_passes_when_it_is_told_to() -> None:
    clock = Clock()
    loop = VirtualLoop(lambda: clock.now)

    async def main() -> None:
        await asyncio.sleep(3600)
        assert clock.now == 3700.0
        with anyio.move_on_after(2.0) as scope:
            await anyio.sleep(10)
        assert scope.cancelled_caught
        assert clock.now == 3702.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await anyio.Event().wait()
        assert anyio.current_time() == clock.now == 3705.0

    run(loop, clock, loop.create_task(main()))
    assert loop.next_timer == float("inf")
    assert not loop.problems
    loop.close()


def test_callbacks_run_in_their_order_one_at_a_time() -> None:
    clock, seen = Clock(), list[str]()
    loop = VirtualLoop(lambda: clock.now)
    loop.call_soon(seen.append, "first")
    loop.call_later(1.0, seen.append, "later")
    loop.call_soon_threadsafe(seen.append, "second")
    gone = loop.call_later(0.5, seen.append, "never")
    gone.cancel()
    assert loop.run_one()
    assert seen == ["first"]
    assert loop.run_ready() == 1
    assert loop.next_timer == 101.0
    clock.now = 101.0
    assert loop.run_ready() == 1
    assert seen == ["first", "second", "later"]
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon(seen.append, "too late")


def test_what_a_callback_raises_is_kept() -> None:
    loop = VirtualLoop(lambda: 0.0)
    loop.call_soon(lambda: 1 // 0)
    loop.run_ready()
    (problem,) = loop.problems
    assert isinstance(problem["exception"], ZeroDivisionError)
    loop.close()
