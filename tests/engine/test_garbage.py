"""What has ended is given back at once, and not when the garbage collector looks at its oldest
objects: in a large program that may take hours, and a prompt or a model be held as long."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from asyncinfer import AsyncInferError, Engine
from asyncinfer.engine.job import Job
from asyncinfer.engine.output_stream import OutputStream
from asyncinfer.scheduler import Sequence
from asyncinfer.testing import FakeModel

pytestmark = pytest.mark.anyio

#: Characters of a prompt that a worker thread prepares.
LONG = "a long prompt " * 200


def alive() -> list[object]:
    return [each for each in gc.get_objects() if type(each) in (Job, OutputStream, Sequence)]


@pytest.fixture(autouse=True)
def held() -> Iterator[Callable[[], list[object]]]:
    """What is held beside what another test left, with the collector off."""
    gc.collect()
    gc.disable()
    before = alive()
    yield lambda: [each for each in alive() if not any(each is other for other in before)]
    gc.enable()


async def until(true: Callable[[], Any]) -> None:
    """A thread that has done its work may still be about to let go of it."""
    until = time.monotonic() + 30
    while not true():
        assert time.monotonic() < until
        await anyio.sleep(0.001)


async def finish(engine: Engine) -> None:
    await engine.generate("hello", max_tokens=4, n=2)


async def read(engine: Engine) -> None:
    async with engine.stream(LONG, max_tokens=4) as stream:
        async for _ in stream:
            pass


async def leave(engine: Engine) -> None:
    async with engine.stream("hello", max_tokens=1000, buffer=4) as stream:
        await anext(stream)


async def leave_a_paused_one(engine: Engine) -> None:
    async with engine.stream("hello", max_tokens=1000, buffer=4):
        await until(lambda: engine.stats().paused)


async def cancel(engine: Engine) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await engine.generate(LONG, max_tokens=4)


async def refuse(engine: Engine) -> None:
    with pytest.raises(AsyncInferError):
        await engine.generate([{"role": "user", "content": "hello"}])


async def fail(engine: Engine) -> None:
    with pytest.raises(AsyncInferError):
        await engine.generate("hello", max_tokens=1000, deadline=1e-3, buffer=4)


@pytest.mark.parametrize("end", [finish, read, leave, leave_a_paused_one, cancel, refuse, fail])
async def test_a_request_that_has_ended_is_gone(
    end: Callable[[Engine], Any], held: Callable[[], list[object]]
) -> None:
    async with Engine(FakeModel(strict=False), drain_timeout=0.0) as engine:
        await end(engine)
        await until(lambda: not held())


async def test_a_closed_engine_keeps_no_model() -> None:
    model = FakeModel(strict=False)
    engine = await Engine.open(model)
    await finish(engine)
    runner = weakref.ref(model.runner)
    model.runner = None
    await engine.aclose()
    del engine
    await until(lambda: runner() is None)
