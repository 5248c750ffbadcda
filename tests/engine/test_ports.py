"""What the decode thread sends to an event loop: in order, in turns, and never lost."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asyncinfer.engine.loops import AsyncioPort, current_port
from asyncinfer.engine.mailbox import Content, Mailbox, Outcome
from asyncinfer.engine.ports import BURST, Cell, Latch, Port

pytestmark = pytest.mark.anyio

MANY = 8 * BURST


def content(number: int) -> Content:
    return (str(number), (number,), (), 0, None)


async def read_to_the_end(mailbox: Mailbox) -> list[int]:
    got: list[int] = []
    while True:
        await mailbox.wait_for(lambda: mailbox.chunks or mailbox.outcome)
        if not mailbox.chunks:
            return got
        got += mailbox.take().token_ids


async def test_thousands_of_wake_ups_are_not_one_turn() -> None:
    port = current_port({})
    mailboxes = [Mailbox(port) for _ in range(MANY)]
    woken = 0
    turns: list[int] = []

    async def consume(mailbox: Mailbox) -> None:
        nonlocal woken
        await mailbox.wait_for(lambda: mailbox.chunks)
        woken += 1

    async with anyio.create_task_group() as tasks:
        for mailbox in mailboxes:
            tasks.start_soon(consume, mailbox)
        with anyio.fail_after(30):
            while any(mailbox.waiter is None for mailbox in mailboxes):
                await anyio.lowlevel.checkpoint()
            for mailbox in mailboxes:
                mailbox.put(content(0))
            port.flush()
            while woken < MANY:
                before = woken
                await anyio.lowlevel.checkpoint()
                turns.append(woken - before)
    # trio runs what is due in any order, so that two bursts may lie between two of our turns.
    assert max(turns) <= 2 * BURST
    assert sum(turns) == MANY


@pytest.mark.parametrize("streams", [1, BURST, BURST + 1, 3 * BURST + 5])
async def test_chunks_keep_their_order_and_the_end_is_last(streams: int) -> None:
    """Also where one batch is still handed out in turns while the next ones arrive."""
    port = current_port({})
    mailboxes = [Mailbox(port) for _ in range(streams)]
    got: dict[int, list[int]] = {}

    async def consume(index: int) -> None:
        got[index] = await read_to_the_end(mailboxes[index])

    def decode() -> None:
        for step in range(20):
            for mailbox in mailboxes if step % 2 else reversed(mailboxes):
                mailbox.put(content(step))
            if step == 19:
                for mailbox in mailboxes:
                    mailbox.close(Outcome(None))
            port.flush()

    async with anyio.create_task_group() as tasks:
        for index in range(streams):
            tasks.start_soon(consume, index)
        await anyio.to_thread.run_sync(decode)
    assert got == {index: list(range(20)) for index in range(streams)}


# fault 10
async def test_no_wake_up_is_lost_however_it_meets_the_reader() -> None:
    """The other thread never waits for the reader, nor the reader for it: in thousands of turns
    they meet before, while and after it begins to wait."""
    port = current_port({})
    mailbox = Mailbox(port)
    turns = 20_000

    def decode() -> None:
        for number in range(turns):
            mailbox.put(content(number))
            if number == turns - 1:
                mailbox.close(Outcome(None))
            port.flush()

    thread = threading.Thread(target=decode)
    thread.start()
    with anyio.fail_after(60):
        assert await read_to_the_end(mailbox) == list(range(turns))
    thread.join()


async def test_what_is_awaited_whole_wakes_nobody_before_its_end() -> None:
    port = current_port({})
    mailbox = Mailbox(port)
    mailbox.quiet = True
    for number in range(3):
        mailbox.put(content(number))
        port.flush()
        await anyio.lowlevel.checkpoint()
    assert not mailbox.chunks
    mailbox.close(Outcome(None))
    port.flush()
    with anyio.fail_after(30):
        await mailbox.wait_for(lambda: mailbox.outcome)
    assert [mailbox.take().token_ids for _ in range(3)] == [(0,), (1,), (2,)]


async def test_other_cells_are_told_after_all_that_was_sent_before() -> None:
    """A latch that says that an engine is closed opens when its streams know how they ended."""
    port = current_port({})
    mailboxes = [Mailbox(port) for _ in range(MANY)]
    for mailbox in mailboxes:
        mailbox.put(content(0))
        mailbox.close(Outcome(None))
    latch = Latch()
    async with anyio.create_task_group() as tasks:

        async def wait() -> None:
            await latch.wait(port)
            assert all(mailbox.outcome for mailbox in mailboxes)

        tasks.start_soon(wait)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        port.flush()
        latch.set()


def test_the_end_is_known_where_the_loop_is_gone() -> None:
    async def leave() -> tuple[Mailbox, asyncio.Future[None]]:
        mailbox = Mailbox(current_port({}))
        mailbox.port.announce(mailbox)
        return mailbox, mailbox.waiter

    mailbox, waiter = asyncio.run(leave())
    mailbox.put(content(0))
    mailbox.close(Outcome(None))
    mailbox.port.flush()
    assert mailbox.port.closed
    assert mailbox.outcome == Outcome(None)
    assert not waiter.done()


def test_a_loop_that_takes_no_calls_is_one_that_is_gone() -> None:
    class Refusing(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *args: Any, **options: Any) -> Any:
            raise OSError("no more calls")

    loop = Refusing()
    try:
        port = AsyncioPort(loop)
        port.post(print)
        assert port.closed
    finally:
        loop.close()


async def test_an_interrupt_in_the_middle_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C in a notebook, whose loop goes on."""
    port = current_port({})
    monkeypatch.setattr(type(port), "post", lambda *_: None)
    monkeypatch.setattr(type(port), "soon", lambda *_: None)
    mailboxes = [Mailbox(port) for _ in range(BURST // 2)]
    wakes = 0

    def wake(self: Port, cell: Cell) -> None:
        nonlocal wakes
        wakes += 1
        if wakes in (3, BURST // 2 + 2):
            raise KeyboardInterrupt

    monkeypatch.setattr(type(port), "wake", wake)
    for step in range(2):
        for mailbox in mailboxes:
            mailbox.waiter = object()
            mailbox.put(content(step))
        if step:
            for mailbox in mailboxes:
                mailbox.close(Outcome(None))
        port.flush()
    interrupts = 0
    for _ in range(5):
        try:
            port._hand_out()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 2
    assert all([its[1][0] for its in mailbox.chunks] == [0, 1] for mailbox in mailboxes)
    assert all(mailbox.outcome for mailbox in mailboxes)
