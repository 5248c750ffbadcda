"""What the decode thread sends to an event loop: in order, in turns, and never lost."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asyncinfer.engine.event_loops import AsyncioBridge, current_bridge
from asyncinfer.engine.loop_bridge import BURST, END_COST, Latch, LoopBridge, Waiter
from asyncinfer.engine.stream_buffer import Content, Outcome, StreamBuffer

pytestmark = pytest.mark.anyio

MANY = 8 * BURST


def content(number: int) -> Content:
    return (str(number), (number,), (), 0, None)


async def read_to_the_end(buffer: StreamBuffer) -> list[int]:
    got: list[int] = []
    while True:
        await buffer.wait_for(lambda: buffer.chunks or buffer.outcome)
        if not buffer.chunks:
            return got
        got += buffer.take().token_ids


async def test_thousands_of_wake_ups_are_not_one_turn() -> None:
    bridge = current_bridge({})
    buffers = [StreamBuffer(bridge) for _ in range(MANY)]
    woken = 0
    turns: list[int] = []

    async def consume(buffer: StreamBuffer) -> None:
        nonlocal woken
        await buffer.wait_for(lambda: buffer.chunks)
        woken += 1

    async with anyio.create_task_group() as tasks:
        for buffer in buffers:
            tasks.start_soon(consume, buffer)
        with anyio.fail_after(120):
            while any(buffer.waiting is None for buffer in buffers):
                await anyio.lowlevel.checkpoint()
            for buffer in buffers:
                buffer.put(content(0))
            bridge.flush()
            while woken < MANY:
                before = woken
                await anyio.lowlevel.checkpoint()
                turns.append(woken - before)
    # trio runs what is due in any order, so that two bursts may lie between two of our turns.
    assert max(turns) <= 2 * BURST
    assert sum(turns) == MANY


async def test_steps_that_met_a_blocked_loop_are_not_one_turn() -> None:
    """Each step asks for a delivery, and a loop that was blocked runs all that were asked for."""
    bridge = current_bridge({})
    buffers = [StreamBuffer(bridge) for _ in range(2 * BURST)]
    for _ in range(20):
        for buffer in buffers:
            buffer.put(content(0))
        bridge.flush()
    turns = [0]
    with anyio.fail_after(120):
        while turns[-1] < 20 * len(buffers):
            await anyio.lowlevel.checkpoint()
            turns.append(sum(len(buffer.chunks) for buffer in buffers))
    # trio runs what is due in any order, so that two bursts may lie between two of our turns.
    assert max(after - before for before, after in pairwise(turns)) <= 2 * BURST


async def test_thousands_of_ends_are_not_one_turn() -> None:
    bridge = current_bridge({})
    buffers = [StreamBuffer(bridge) for _ in range(MANY)]
    for buffer in buffers:
        buffer.close(Outcome(None))
    bridge.flush()
    turns = [0]
    with anyio.fail_after(120):
        while turns[-1] < MANY:
            await anyio.lowlevel.checkpoint()
            turns.append(sum(buffer.outcome is not None for buffer in buffers))
    # An end has its task do more than a chunk has.
    assert max(after - before for before, after in pairwise(turns)) <= 2 * BURST // END_COST


#: Turns of an event loop within which what was posted to it is there.
TURNS = 10


async def test_a_delivery_that_was_broken_off_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the interrupt came before its first line, and nothing more is sent."""
    bridge = current_bridge({})
    buffer = StreamBuffer(bridge)
    buffer.put(content(0))
    buffer.close(Outcome(None))
    with monkeypatch.context() as patch:
        patch.setattr(type(bridge), "post", lambda *_: None)
        bridge.flush()
    bridge.redeliver()
    for _ in range(TURNS):
        await anyio.lowlevel.checkpoint()
    assert buffer.outcome is not None
    assert await read_to_the_end(buffer) == [0]


@pytest.mark.parametrize("streams", [1, BURST, BURST + 1, 3 * BURST + 5])
async def test_chunks_keep_their_order_and_the_end_is_last(streams: int) -> None:
    """Also where one batch is still handed out in turns while the next ones arrive."""
    bridge = current_bridge({})
    buffers = [StreamBuffer(bridge) for _ in range(streams)]
    got: dict[int, list[int]] = {}

    async def consume(index: int) -> None:
        got[index] = await read_to_the_end(buffers[index])

    def decode() -> None:
        for step in range(20):
            for buffer in buffers if step % 2 else reversed(buffers):
                buffer.put(content(step))
            if step == 19:
                for buffer in buffers:
                    buffer.close(Outcome(None))
            bridge.flush()

    async with anyio.create_task_group() as tasks:
        for index in range(streams):
            tasks.start_soon(consume, index)
        await anyio.to_thread.run_sync(decode)
    assert got == {index: list(range(20)) for index in range(streams)}


# fault 10
async def test_no_wake_up_is_lost_however_it_meets_the_reader() -> None:
    """The other thread never waits for the reader, nor the reader for it: in thousands of turns
    they meet before, while and after it begins to wait."""
    bridge = current_bridge({})
    buffer = StreamBuffer(bridge)
    turns = 20_000

    def decode() -> None:
        for number in range(turns):
            buffer.put(content(number))
            if number == turns - 1:
                buffer.close(Outcome(None))
            bridge.flush()

    thread = threading.Thread(target=decode)
    thread.start()
    with anyio.fail_after(120):
        assert await read_to_the_end(buffer) == list(range(turns))
    thread.join()


async def test_what_is_awaited_whole_wakes_nobody_before_its_end() -> None:
    bridge = current_bridge({})
    buffer = StreamBuffer(bridge)
    buffer.quiet = True
    for number in range(3):
        buffer.put(content(number))
        bridge.flush()
        await anyio.lowlevel.checkpoint()
    assert not buffer.chunks
    buffer.close(Outcome(None))
    bridge.flush()
    with anyio.fail_after(120):
        await buffer.wait_for(lambda: buffer.outcome)
    assert [buffer.take().token_ids for _ in range(3)] == [(0,), (1,), (2,)]


async def test_other_cells_are_told_after_all_that_was_sent_before() -> None:
    """A latch that says that an engine is closed opens when its streams know how they ended."""
    bridge = current_bridge({})
    buffers = [StreamBuffer(bridge) for _ in range(MANY)]
    for buffer in buffers:
        buffer.put(content(0))
        buffer.close(Outcome(None))
    latch = Latch()
    async with anyio.create_task_group() as tasks:

        async def wait() -> None:
            await latch.wait(bridge)
            assert all(buffer.outcome for buffer in buffers)

        tasks.start_soon(wait)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        bridge.flush()
        latch.set()


def test_the_end_is_known_where_the_loop_is_gone() -> None:
    async def leave() -> tuple[StreamBuffer, asyncio.Future[None]]:
        buffer = StreamBuffer(current_bridge({}))
        buffer.bridge.begin_wait(buffer)
        return buffer, buffer.waiting

    buffer, waiter = asyncio.run(leave())
    buffer.put(content(0))
    buffer.close(Outcome(None))
    buffer.bridge.flush()
    assert buffer.bridge.closed
    assert buffer.outcome == Outcome(None)
    assert not waiter.done()


def test_a_loop_that_takes_no_calls_is_one_that_is_gone() -> None:
    class Refusing(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *args: Any, **options: Any) -> Any:
            raise OSError("no more calls")

    loop = Refusing()
    try:
        bridge = AsyncioBridge(loop)
        bridge.post(print)
        assert bridge.closed
    finally:
        loop.close()


async def test_an_interrupt_in_the_middle_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C in a notebook, whose loop goes on."""
    bridge = current_bridge({})
    monkeypatch.setattr(type(bridge), "post", lambda *_: None)
    monkeypatch.setattr(type(bridge), "soon", lambda *_: None)
    buffers = [StreamBuffer(bridge) for _ in range(BURST // 2)]
    wakes = 0

    def wake(self: LoopBridge, waiter: Waiter) -> None:
        nonlocal wakes
        wakes += 1
        if wakes in (3, BURST // 2 + 2):
            raise KeyboardInterrupt

    monkeypatch.setattr(type(bridge), "wake", wake)
    for step in range(2):
        for buffer in buffers:
            buffer.waiting = object()
            buffer.put(content(step))
        if step:
            for buffer in buffers:
                buffer.close(Outcome(None))
        bridge.flush()
    interrupts = 0
    for _ in range(END_COST + 5):
        try:
            bridge.deliver()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 2
    assert all([chunk[1][0] for chunk in buffer.chunks] == [0, 1] for buffer in buffers)
    assert all(buffer.outcome for buffer in buffers)


class HangingBridge(AsyncioBridge):
    """Its loop's `call_soon_threadsafe` is the host's own, and hangs."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop())
        self.entered, self.may_return = threading.Event(), threading.Event()
        self.returned: bool | None = None

    def post(self, function: Any, *args: Any) -> None:
        self.entered.set()
        self.returned = self.may_return.wait(120)
        super().post(function, *args)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_loop_that_hangs_when_it_is_told_holds_up_no_other() -> None:
    """The watchdog goes on to the other loops of an engine that is dead."""
    bridge = HangingBridge()
    buffer = StreamBuffer(bridge)
    buffer.put(content(0))
    thread = threading.Thread(target=bridge.flush)
    thread.start()
    assert bridge.entered.wait(120)
    buffer.put(content(1))
    bridge.rescue()
    bridge.may_return.set()
    thread.join(120)
    assert bridge.returned
    buffer.close(Outcome(None))
    bridge.flush()
    assert await read_to_the_end(buffer) == [0, 1]
