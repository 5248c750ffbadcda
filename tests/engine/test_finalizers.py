"""A finalizer runs on any thread at any point, also where that thread holds a lock. It takes none
itself: two threads could hold the locks that the finalizers in the other one want."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server.chat_model import ChatModel
from support import OpenEngine, Until, core_of, places, thread_of

from asyncinfer import Engine, EngineConfig, SyncEngine
from asyncinfer.engine import Loaded
from asyncinfer.engine.event_loop_thread import EventLoopThread
from asyncinfer.engine.preparer import Preparer
from asyncinfer.plugins import supervision
from asyncinfer.testing import FakeModel, StepGate
from asyncinfer.testing.fake_adapters import FakeAdapters

pytestmark = pytest.mark.anyio

#: Characters of a prompt that a worker thread prepares.
LONG = "a long prompt " * 200


class Watched:
    """A lock that notes who takes it while garbage is collected on the same thread."""

    #: Threads that collect garbage, and where locks were taken meanwhile.
    collecting: dict[int, None] = {}  # noqa: RUF012
    taken: list[str] = []  # noqa: RUF012

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def acquire(self, *args: Any, **options: Any) -> bool:
        if threading.get_ident() in self.collecting:
            code = sys._getframe(1).f_code
            if code.co_name == "__enter__":
                code = sys._getframe(2).f_code
            self.taken.append(f"{code.co_filename}:{code.co_qualname}")
        return bool(self._lock.acquire(*args, **options))

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __getattr__(self, name: str) -> Any:
        if name == "_lock":
            # A copy that is not made yet.
            raise AttributeError(name)
        return getattr(self._lock, name)


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Where finalizers took locks of the package, which may be none."""
    originals = {name: getattr(threading, name) for name in ("Lock", "RLock")}

    def watched(name: str) -> Callable[[], Watched]:
        return lambda: Watched(originals[name]())

    for module in [each for key, each in sys.modules.items() if key.startswith("asyncinfer")]:
        for name, original in originals.items():
            if getattr(module, name, None) is original:
                monkeypatch.setattr(module, name, watched(name))
    # `Condition`, `Event` and `Future` make theirs with these.
    monkeypatch.setattr(threading, "Lock", watched("Lock"))
    monkeypatch.setattr(threading, "RLock", watched("RLock"))
    monkeypatch.setattr(supervision, "_lock", Watched(originals["RLock"]()))
    Watched.taken.clear()
    yield Watched.taken
    assert not Watched.taken


def collected(*garbage: Any) -> None:
    """Have the collector find an object that nobody else refers to."""
    circle: list[Any] = [*garbage]
    circle.append(circle)
    del garbage, circle
    gc.collect()


@pytest.fixture(autouse=True)
def watching() -> Iterator[None]:
    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            Watched.collecting[threading.get_ident()] = None
        else:
            Watched.collecting.pop(threading.get_ident(), None)

    gc.callbacks.append(note)
    yield
    gc.callbacks.remove(note)


def begun(call: Coroutine[Any, Any, Any]) -> list[Any]:
    """A call that waits, in no task, so that nothing but the caller keeps it."""
    call.send(None)
    return [call]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("asyncinfer-")]


async def generate(engine: Engine) -> Any:
    return begun(engine.generate("hello", max_tokens=8))


async def in_a_crowd(engine: Engine) -> Any:
    return [begun(engine.generate("hello", max_tokens=8)) for _ in range(40)]


async def streams_in_a_crowd(engine: Engine) -> Any:
    return [begun(anext(engine.stream("hello", max_tokens=8))) for _ in range(40)]


async def prepared_by_a_worker(engine: Engine) -> Any:
    return [begun(engine.generate(LONG, max_tokens=8)) for _ in range(3)]


async def within_a_stream(engine: Engine) -> Any:
    async def read() -> None:
        async with engine.stream("hello", max_tokens=8) as stream:
            async for _ in stream:
                pass

    return begun(read())


async def within_a_session(engine: Engine) -> Any:
    stream = engine.session().stream("hello", max_tokens=8)
    await stream.__aenter__()

    async def read() -> None:
        async with stream:
            async for _ in stream:
                pass

    return begun(read())


async def a_stream(engine: Engine) -> Any:
    stream = engine.stream("hello", max_tokens=8)
    await stream.__aenter__()
    return stream


async def a_session(engine: Engine) -> Any:
    return [engine.pin("hello"), begun(engine.pin("hello").__aenter__())]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    "leave",
    [
        generate,
        in_a_crowd,
        streams_in_a_crowd,
        prepared_by_a_worker,
        within_a_stream,
        within_a_session,
        a_stream,
        a_session,
    ],
)
async def test_what_is_dropped_takes_no_lock(
    leave: Callable[[Engine], Any],
    open_engine: OpenEngine,
    gate: StepGate,
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare, may_prepare = Preparer.prepare, threading.Event()

    def waiting(self: Preparer, request: Any, prompt: Any, *rest: Any) -> Any:
        assert prompt != LONG or may_prepare.wait(20)
        return prepare(self, request, prompt, *rest)

    monkeypatch.setattr(Preparer, "prepare", waiting)
    async with open_engine(ChatModel(gate=gate)) as engine:
        gate.close()
        collected(await leave(engine))
        may_prepare.set()
        gate.open()
        # All of it is given back nevertheless.
        await until(lambda: not places(engine))
        assert core_of(engine).requests.live == {}
        assert engine.stats().held_bytes == 0
        assert (await engine.generate("hello", max_tokens=8)).usage.completion_tokens == 8


async def test_a_load_that_is_dropped_takes_no_lock(until: Until) -> None:
    reads, go_on = threading.Event(), threading.Event()

    def read() -> None:
        reads.set()
        assert go_on.wait(120)

    adapters = FakeAdapters(2, read)
    async with Engine(FakeModel(adapters=adapters)) as engine:
        loads = [begun(engine.adapters.load(name, {"content": 1})) for name in ("a", "b")]
        await until(reads.is_set)
        collected(loads.pop(), loads.pop())
        go_on.set()
        await engine.adapters.load("c", {"content": 3})
        assert [each.name for each in engine.adapters.list()] == ["c"]
        assert list(adapters.contents.values()) == [3]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("how", ["opening", "open", "in a block"])
async def test_an_engine_that_is_dropped_takes_no_lock(how: str, until: Until) -> None:
    gate, thread, may_load = StepGate(), None, threading.Event()

    class Loading(FakeModel):
        def load(self, config: EngineConfig, progress: Any = None) -> Loaded:
            assert may_load.wait(20)
            return super().load(config, progress)

    def left_in_a_block() -> Any:
        """The pending task of a loop that was closed."""
        engine, loop = Engine(FakeModel(gate=gate)), asyncio.new_event_loop()

        async def live() -> None:
            async with engine:
                loop.stop()
                await asyncio.Event().wait()

        task = loop.create_task(live())
        loop.run_forever()
        loop.close()
        return task, thread_of(engine)

    async def dropped() -> Any:
        nonlocal thread
        if how == "opening":
            return begun(Engine.open(Loading(gate=gate)))
        if how == "in a block":
            with ThreadPoolExecutor(1) as other:
                task, thread = other.submit(left_in_a_block).result()
            return [task]
        engine = await Engine.open(FakeModel(gate=gate), drain_timeout=60.0)
        thread = thread_of(engine)
        call = engine.generate(LONG, max_tokens=8)
        call.send(None)
        await until(lambda: engine.stats().running)
        return [call, engine]

    gate.close()
    collected(await dropped())
    may_load.set()
    gate.open()
    await until(lambda: not threads())
    assert thread is None or not thread.alive


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_a_sync_engine_that_is_dropped_takes_no_lock(until: Until) -> None:
    def opened() -> Any:
        engine = SyncEngine.open(FakeModel())
        engine.generate("hello", max_tokens=2)
        return [engine]

    with ThreadPoolExecutor(1) as other:
        collected(other.submit(opened).result())
    await until(lambda: not threads())


async def test_an_event_loop_is_ended_without_a_lock(until: Until) -> None:
    class Owner:
        def __init__(self) -> None:
            self.loop = EventLoopThread("asyncinfer-sync")

        def __del__(self) -> None:
            self.loop.stop_soon()

    collected(Owner())
    await until(lambda: not threads())
