"""Ends that the decode thread came to, and could not tell in time."""

from __future__ import annotations

import contextvars
import logging
import threading
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from asyncinfer import DeadlineExceeded, EngineClosed, EngineDead, Overloaded, SamplingParams
from asyncinfer.chunk import Usage
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.event_loops import current_bridge
from asyncinfer.engine.loop_bridge import Batch
from asyncinfer.engine.options import RequestOptions
from asyncinfer.engine.request import End, Phase, Request
from asyncinfer.engine.stream_buffer import Outcome, StreamBuffer
from asyncinfer.engine.watchdog import Watchdog

pytestmark = pytest.mark.anyio


class World:
    """Requests and a watchdog; time stands still but for `now`."""

    def __init__(self, limit: int = 4, max_bytes: int = 1 << 20) -> None:
        self.now = 0.0
        self.posted: list[Any] = []
        self.admission = Admission(limit, max_bytes, lambda: self.now)
        core: Any = SimpleNamespace(turn_began=0.0, post=lambda *what: self.posted.append(what))
        self.watchdog = Watchdog(
            core, self.admission, 300.0, lambda: self.now, self.posted.append, lambda: None
        )

    def request(self, deadline: float | None = None, held_bytes: int = 0) -> Request:
        options = RequestOptions(
            priority=0, deadline=deadline, cache_scope="", buffer=8, on_full="pause"
        )
        bridge, context = current_bridge({}), contextvars.copy_context()
        return Request("req-1", bridge, SamplingParams(), options, self.now, context, held_bytes)


async def test_usage_of_a_request_whose_end_was_held_up_beyond_its_deadline() -> None:
    """The decode thread ended it, and is in a log handler before it could tell anybody."""
    world = World()
    request = world.request(deadline=1.0)
    world.admission.enter(request)
    world.admission.advance(request, Phase.TAKEN)
    request.prompt_len = 5
    world.now = 0.5
    world.admission.end(request, End.FINISHED, None)
    world.now = 2.0
    world.watchdog.turn()
    with anyio.fail_after(120):
        await request.buffer.wait_for(lambda: request.buffer.outcome)
    outcome = request.buffer.outcome
    assert outcome is not None
    assert isinstance(outcome.error, DeadlineExceeded)
    assert outcome.usage.prompt_tokens == 5
    assert outcome.timings.total == 0.5


class Hanging(logging.Handler):
    """Returns when it may, or says that it could not."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.may_return = threading.Event(), threading.Event()
        self.returned: bool | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.entered.set()
        self.returned = self.may_return.wait(120)


@pytest.mark.parametrize("refused", ["for max_requests", "at once", "while it is prepared"])
async def test_a_log_handler_that_hangs_at_a_refusal_holds_up_no_deadline(refused: str) -> None:
    limit, most = (1, 1000) if refused == "for max_requests" else (2, 1000)
    world = World(limit, most)
    first = world.request(deadline=1.0, held_bytes=600)
    world.admission.enter(first)
    world.admission.advance(first, Phase.TAKEN)
    second = world.request(held_bytes=600 if refused == "at once" else 100)

    def refuse() -> None:
        with pytest.raises(Overloaded):
            if refused == "while it is prepared":
                world.admission.enter(second)
                world.admission.charge(second, 500)
            else:
                world.admission.enter(second)

    handler, logger = Hanging(), logging.getLogger("asyncinfer")
    thread = threading.Thread(target=refuse)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        thread.start()
        assert handler.entered.wait(120)
        world.now = 2.0
        world.watchdog.turn()
        with anyio.fail_after(120):
            await first.buffer.wait_for(lambda: first.buffer.outcome)
        handler.may_return.set()
        thread.join(120)
    finally:
        handler.may_return.set()
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert first.buffer.outcome is not None
    assert isinstance(first.buffer.outcome.error, DeadlineExceeded)
    assert handler.returned
    assert world.admission.refused == 1


async def test_a_request_that_ended_while_it_was_prepared_is_not_refused() -> None:
    world = World(max_bytes=1000)
    request = world.request(held_bytes=600)
    world.admission.enter(request)
    world.admission.end(request, End.ABORTED, None)
    world.admission.charge(request, 200)
    world.admission.charge(request, 5000)
    assert (world.admission.refused, world.admission.held_bytes) == (0, 600)
    world.admission.leave(request)
    assert world.admission.held_bytes == 0


async def test_usage_counts_no_token_that_came_after_the_end() -> None:
    """The watchdog tells of the end while the decode thread is about to hand out a token."""
    buffer = StreamBuffer(current_bridge({}))
    buffer.put(("a", (1,), (), 0, None, None))
    buffer.bridge.flush()
    buffer.put(("b", (2, 3), (), 0, None, None))
    late = Outcome(DeadlineExceeded("late"), Usage(prompt_tokens=5, completion_tokens=3))
    buffer.bridge.send(Batch((buffer, late)))
    buffer.bridge.flush()
    with anyio.fail_after(120):
        await buffer.wait_for(lambda: buffer.outcome)
    assert buffer.outcome is not None
    assert buffer.outcome.usage == Usage(prompt_tokens=5, completion_tokens=1)
    assert [content[0] for content in buffer.chunks] == ["a"]


async def test_later_calls_hear_of_the_first_end_of_the_engine() -> None:
    world = World(max_bytes=1000)
    world.admission.close(lambda: EngineDead("it broke"))
    world.admission.close(lambda: EngineClosed("it was closed"))
    with pytest.raises(EngineDead):
        world.admission.enter(world.request(held_bytes=1))


async def test_a_second_close_is_no_more_patient_than_the_first() -> None:
    world = World()
    for until in (5.0, 3.0, 9.0):
        world.admission.drain(until)
    assert world.admission.drain_until == 3.0


async def test_a_request_that_no_thread_could_prepare_counts_as_refused() -> None:
    world = World()
    request = world.request(held_bytes=1)
    world.admission.enter(request)
    for _ in range(2):
        world.admission.overloaded(request, Overloaded("no thread"))
    assert (world.admission.refused, world.admission.held) == (1, 0)


async def test_a_request_that_ends_in_the_inbox_is_pending_no_more() -> None:
    world = World()
    request = world.request(held_bytes=1)
    world.admission.enter(request)
    assert world.admission.advance(request, Phase.QUEUED)
    world.admission.end(request, End.ABORTED, None)
    world.admission.leave(request)
    assert (world.admission.pending, world.admission.held) == (0, 0)


async def test_several_tasks_wait_for_one_end() -> None:
    buffer = StreamBuffer(current_bridge({}))
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(buffer.wait_for_end)
            await anyio.wait_all_tasks_blocked()
            buffer.tell(Outcome(None))


async def test_a_hang_is_found_out_when_it_becomes_one() -> None:
    """And not at the next of the looks, which are a second apart."""
    world = World()
    world.now = 0.3
    looks = 0
    while (look := world.watchdog.turn()) is not None:
        looks, world.now = looks + 1, look
    assert world.posted == ["a step ran longer than 300 s"]
    assert 300.0 < world.now < 300.005
    assert looks < 305
