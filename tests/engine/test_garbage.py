"""What has ended is given back at once, and not when the garbage collector looks at its oldest
objects: in a large program that may take hours, and a prompt or a model be held as long."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from asyncinfer import (
    AsyncInferError,
    DeadlineExceeded,
    Engine,
    EngineClosed,
    ModelLoadError,
    Overloaded,
    RequestFailed,
)
from asyncinfer.engine import Loaded
from asyncinfer.engine.output_stream import OutputStream
from asyncinfer.engine.preparer import Preparer
from asyncinfer.engine.request import Request
from asyncinfer.scheduler import Sequence
from asyncinfer.testing import FakeModel
from asyncinfer.testing.fake_adapters import FakeAdapters

pytestmark = pytest.mark.anyio

#: Characters of a prompt that a worker thread prepares.
LONG = "a long prompt " * 200


def held() -> list[object]:
    """What this test made and something holds. With the collector off all of it is young."""
    kinds = (Request, OutputStream, Sequence)
    return [each for each in gc.get_objects(generation=0) if type(each) in kinds]


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    assert not held()
    yield
    gc.enable()


async def until(true: Callable[[], Any]) -> None:
    """A thread that has done its work may still be about to let go of it."""
    until = time.monotonic() + 120
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


async def overload(engine: Engine) -> None:
    async with engine.stream("hello", max_tokens=1000, buffer=4):
        with pytest.raises(Overloaded):
            await engine.generate("hello", max_tokens=4, n=3)


ENDS = [finish, read, leave, leave_a_paused_one, cancel, refuse, fail, overload]


@pytest.mark.parametrize("end", ENDS)
async def test_a_request_that_has_ended_is_gone(end: Callable[[Engine], Any]) -> None:
    async with Engine(FakeModel(strict=False), drain_timeout=0.0, max_requests=3) as engine:
        async with engine.stream("hello", max_tokens=1000):
            # What is held is found.
            assert held()
        await end(engine)
        await until(lambda: not held())


async def test_a_preparation_that_fails_for_nobody_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_fail, ended = threading.Event(), threading.Event(), threading.Event()

    def failing(self: Preparer, *_: Any) -> None:
        begun.set()
        try:
            assert may_fail.wait(120)
            raise ValueError("odd text")
        finally:
            ended.set()

    monkeypatch.setattr(Preparer, "prepare", failing)
    async with Engine(FakeModel(strict=False)) as engine:
        with pytest.raises(DeadlineExceeded):
            await engine.generate(LONG, deadline=0.2)
        may_fail.set()
        # A machine may be too slow to begin within the deadline.
        await until(lambda: ended.is_set() or not begun.is_set())
        await until(lambda: not held())


async def test_an_adapter_s_error_is_gone() -> None:
    async with Engine(FakeModel(strict=False, adapters=FakeAdapters(0))) as engine:
        with pytest.raises(ModelLoadError) as raised:
            await engine.adapters.load("odd", {"content": 1})
        gone = weakref.ref(raised.value)
        del raised
        await until(lambda: gone() is None)


async def test_a_closed_engine_keeps_no_model() -> None:
    model = FakeModel(strict=False)
    engine = await Engine.open(model)
    await finish(engine)
    runner = weakref.ref(model.runner)
    model.runner = None
    await engine.aclose()
    del engine
    await until(lambda: runner() is None)


class Waiting(FakeModel):
    """Loads, and returns when it may."""

    def __init__(self) -> None:
        super().__init__(strict=False)
        self.reached, self.may_return = threading.Event(), threading.Event()

    def load(self, *args: Any) -> Loaded:
        loaded = super().load(*args)
        self.reached.set()
        assert self.may_return.wait(120)
        return loaded


async def close_while_opening(engine: Engine, model: Waiting) -> None:
    async def open_it() -> None:
        with pytest.raises(EngineClosed):
            await engine.__aenter__()

    async with anyio.create_task_group() as group:
        group.start_soon(open_it)
        await until(model.reached.is_set)
        group.start_soon(engine.aclose)
        await until(lambda: engine.health().state == "closed")
        model.may_return.set()


async def test_an_engine_that_is_closed_while_it_opens_keeps_no_model() -> None:
    model = Waiting()
    engine = Engine(model)
    await close_while_opening(engine, model)
    gone = weakref.ref(engine), weakref.ref(model)
    del engine, model
    await until(lambda: not any(each() for each in gone))


class _Odd(Exception):
    """One that cannot be copied."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


@pytest.mark.parametrize("error", [ModelLoadError("no weights", file="x"), _Odd("a", "b")])
async def test_an_engine_that_cannot_be_opened(error: Exception) -> None:
    model = FakeModel(load_error=error)
    forgotten = weakref.ref(model)
    engine = Engine(model)
    del model
    with pytest.raises(type(error)) as raised:
        await engine.__aenter__()
    assert raised.value is error
    assert raised.value.__traceback__ is not None
    health = engine.health()
    assert health.state == "dead"
    assert str(error) in health.reasons[0]
    del raised, health
    error.__traceback__ = None
    gone = weakref.ref(engine)
    del engine
    await until(lambda: gone() is None and forgotten() is None)


async def test_the_error_of_a_request_keeps_nothing_of_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A consumer may keep it for as long as it likes, and others were in the step."""

    def failing(self: OutputStream, *_: Any) -> None:
        try:
            raise ValueError("odd bytes")
        except ValueError as error:
            raise RequestFailed("no text") from error

    monkeypatch.setattr(OutputStream, "advance", failing)
    async with Engine(FakeModel()) as engine:
        stream = engine.stream("hello", max_tokens=3)
        with pytest.raises(RequestFailed, match="no text") as raised:
            await stream
    cause = raised.value.__cause__
    assert isinstance(cause, ValueError)
    assert cause.__traceback__ is None
    (note,) = cause.__notes__
    assert note.startswith(f"raised by failing, {__file__}:")
    assert not [each for each in held() if isinstance(each, Sequence)]
