"""Loads of adapters that are slow, left or many: each ends with the engine, and none leaves a
thread, a slot or a name."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from support import core_of

from asyncinfer import (
    Engine,
    EngineClosed,
    EngineDead,
    InvalidRequest,
    ModelLoadError,
    Overloaded,
)
from asyncinfer.testing import FakeModel
from asyncinfer.testing.fake_adapters import FakeAdapters

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Reading:
    """A read of an adapter that waits until it is told to go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.go_on.wait(120)


@pytest.fixture
def reading() -> Iterator[Reading]:
    reading = Reading()
    yield reading
    reading.go_on.set()
    for thread in loaders():
        thread.join(120)
    assert not loaders()


def loaders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "asyncinfer-adapter"]


async def begun(reading: Reading) -> None:
    while not reading.begun.is_set():
        await anyio.sleep(0.001)


def source(number: int) -> Any:
    return {"content": number}


async def test_a_load_ends_with_a_close(reading: Reading) -> None:
    adapters, told = FakeAdapters(2, reading), anyio.Event()

    async def load(engine: Engine) -> None:
        with pytest.raises(EngineClosed):
            await engine.adapters.load("a", source(1))
        told.set()

    async with anyio.create_task_group() as group:
        async with Engine(FakeModel(adapters=adapters)) as engine:
            group.start_soon(load, engine)
            await begun(reading)
        with anyio.fail_after(120):
            await told.wait()
    # What is read to its end has no engine to belong to.
    reading.go_on.set()
    for thread in loaders():
        thread.join(120)
    assert adapters.contents == {}
    assert core_of(engine).adapters.pool is None


async def test_a_load_ends_with_a_death(reading: Reading) -> None:
    def broken(*step: Any) -> None:
        raise RuntimeError("broken")

    model = FakeModel(adapters=FakeAdapters(2, reading))
    async with Engine(model) as engine, anyio.create_task_group() as group:

        async def load() -> None:
            with pytest.raises(EngineDead):
                await engine.adapters.load("a", source(1))

        group.start_soon(load)
        await begun(reading)
        assert model.runner is not None
        model.runner.gate = broken
        with pytest.raises(EngineDead):
            await engine.generate("abc", max_tokens=1)


async def test_loads_that_are_left_have_no_threads(reading: Reading) -> None:
    adapters = FakeAdapters(2, reading)
    async with Engine(FakeModel(adapters=adapters)) as engine:
        for number in range(40):
            with anyio.move_on_after(0.001):
                await engine.adapters.load("a", source(number))
        await begun(reading)
        assert len(loaders()) == 1
        async with anyio.create_task_group() as group:
            for number in range(16):
                group.start_soon(engine.adapters.load, "b", source(number))
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(Overloaded, match="16 adapters wait"):
                await engine.adapters.load("b", source(99))
            reading.go_on.set()
        # The first was left in the middle of it; every other one took the name of the one before.
        assert [info.name for info in engine.adapters.list()] == ["b"]
        assert list(adapters.contents.values()) == [15]
        with pytest.raises(InvalidRequest, match="adapter"):
            engine.stream("abc", adapter="a")


async def test_a_load_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Engine(FakeModel(adapters=FakeAdapters(1))) as engine:

        def none_left(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            with pytest.raises(Overloaded, match="no thread can be started"):
                await engine.adapters.load("a", source(1))
        await engine.adapters.load("a", source(2))
        with anyio.fail_after(120):
            assert await engine.generate("abc", adapter="a", max_tokens=3) is not None


async def test_an_error_that_nobody_takes_is_forgotten(reading: Reading) -> None:
    """The task is cancelled when the load has failed, and has not heard of it."""
    failed: list[weakref.ref[Exception]] = []

    class Unreadable(ModelLoadError):
        def __init__(self) -> None:
            super().__init__("it cannot be read")
            failed.append(weakref.ref(self))

    def fail() -> None:
        reading()
        raise Unreadable

    async with Engine(FakeModel(adapters=FakeAdapters(2, fail))) as engine:
        gc.disable()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(engine.adapters.load, "a", source(1))
                await begun(reading)
                reading.go_on.set()
                # The event loop stands still meanwhile.
                for thread in loaders():
                    thread.join(120)
                group.cancel_scope.cancel()
            assert [error() for error in failed] == [None]
        finally:
            gc.enable()


@pytest.mark.parametrize("late", [False, True])
async def test_an_adapter_that_nobody_hears_of_is_not_left(reading: Reading, late: bool) -> None:
    """The task is cancelled when its adapter has a name, or is about to get it."""
    adapters = FakeAdapters(2)
    async with Engine(FakeModel(adapters=adapters)) as engine:
        await engine.adapters.load("b", source(0))
        registry = core_of(engine).adapters
        put = registry.put

        def held_up(name: str, loaded: Any) -> Any:
            if late:
                reading()
            info = put(name, loaded)
            if not late:
                reading()
            return info

        registry.put = held_up  # type: ignore[method-assign]
        for name in "ab":
            reading.begun.clear()
            reading.go_on.clear()
            async with anyio.create_task_group() as group:
                group.start_soon(engine.adapters.load, name, source(1))
                await begun(reading)
                if not late:
                    # The event loop stands still meanwhile.
                    reading.go_on.set()
                    for thread in loaders():
                        thread.join(120)
                group.cancel_scope.cancel()
            reading.go_on.set()
            for thread in loaders():
                thread.join(120)
            # One in the place of another stays: that is gone.
            assert [info.name for info in engine.adapters.list()] == ["b"]
        assert list(adapters.contents.values()) == [1]
