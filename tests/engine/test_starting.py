"""Between a stream's first use and its request: the prompt is prepared, and anything may happen."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from support import (
    OpenEngine,
    TimedEngine,
    Until,
    core_of,
    frontend_of,
    places,
    thread_of,
)

from asyncinfer import (
    DeadlineExceeded,
    Engine,
    EngineClosed,
    EngineDead,
    InvalidRequest,
    ModelLoadError,
    Overloaded,
    RequestFailed,
)
from asyncinfer.engine.core import Core
from asyncinfer.engine.inbox import Command
from asyncinfer.engine.preparer import Preparer
from asyncinfer.runtime import Handle, Threads, Worker
from asyncinfer.testing import FakeModel, StepGate

pytestmark = pytest.mark.anyio

#: Long enough for a worker thread.
LONG_PROMPT = "x" * 1500


@pytest.fixture
def preparing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Holds every prompt on its worker thread until the event is set."""
    prepare, events = Preparer.prepare, []

    def held() -> threading.Event:
        event = threading.Event()
        events.append(event)

        def late(*arguments: Any) -> None:
            assert event.wait(120)
            prepare(*arguments)

        monkeypatch.setattr(Preparer, "prepare", late)
        return event

    return held


@pytest.mark.parametrize("awaited", [False, True])
async def test_closed_while_its_prompt_is_prepared(
    open_engine: OpenEngine, until: Until, preparing: Callable[[], Any], awaited: bool
) -> None:
    async with open_engine() as engine:
        go_on = preparing()
        stream = engine.stream(LONG_PROMPT, max_tokens=2000)
        got: list[Any] = []

        async def read() -> None:
            if awaited:
                got.append((await stream).finish_reason)
            else:
                got.extend([chunk async for chunk in stream])

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await until(lambda: places(engine) == 1)
            await stream.aclose()
            go_on.set()
        assert got == (["aborted"] if awaited else [])
        await until(lambda: engine.stats().aborted == 1)
        assert engine.stats().finished == 0


async def test_the_buffer_of_what_is_awaited_is_never_full(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However fast the engine is, and however slow the consumer to say that it reads nothing."""
    post = Core.post

    def slow(core: Core, command: Command, argument: Any = None) -> None:
        post(core, command, argument)
        if command is Command.SUBMIT:
            while argument.delivered < 4 and not argument.ended:
                threading.Event().wait(0.001)

    monkeypatch.setattr(Core, "post", slow)
    async with open_engine(buffer=1, on_full="cancel") as engine:
        assert len((await engine.generate("x", max_tokens=8)).token_ids) == 8


def _workers() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "asyncinfer-intake"}


async def test_workers_of_an_engine_that_died_and_was_dropped(until: Until) -> None:
    def broken(*_: Any) -> Any:
        raise OSError("planted")

    before = _workers()
    engine = await Engine.open(FakeModel(gate=broken))
    with pytest.raises(EngineDead):
        await engine.generate(LONG_PROMPT, max_tokens=1)
    assert _workers() - before
    # Not the thread: it knows the core, and by way of the error the engine.
    closed = thread_of(engine).closed
    await until(lambda: closed.is_set)
    del engine

    def ended() -> bool:
        gc.collect()
        return _workers() <= before

    await until(ended)


async def test_no_worker_is_started_once_the_engine_is_closed(
    open_engine: OpenEngine, preparing: Callable[[], Any]
) -> None:
    """Another thread closes the engine between a request's check and its prompt."""
    async with open_engine() as engine:
        preparing().set()
        before = _workers()
        frontend_of(engine).dismiss()
        with pytest.raises(EngineClosed):
            await engine.generate(LONG_PROMPT, max_tokens=1)
        assert _workers() <= before


@pytest.mark.parametrize("seconds", [float("nan"), -1, "x", pytest.param(10**309, id="huge")])
async def test_a_bad_drain_timeout_closes_nothing(open_engine: OpenEngine, seconds: Any) -> None:
    async with open_engine() as engine:
        with pytest.raises(ValueError, match="drain_timeout="):
            await engine.aclose(drain_timeout=seconds)
        assert len((await engine.generate("x", max_tokens=2)).token_ids) == 2


@pytest.mark.parametrize(
    ("prompt", "options", "inline"),
    [
        ("x" * 1000, {}, True),
        ([5] * 4000, {}, True),
        ("x", {"bad_words": ["one", "two"]}, True),
        ("x" * 1500, {}, False),
        ("x" * 200, {"n": 8}, False),
        ([5] * 3000, {"n": 2}, False),
        ("x", {"bad_words": [f"word {n}" for n in range(500)]}, False),
    ],
)
async def test_what_takes_long_is_prepared_off_the_loop(
    open_engine: OpenEngine,
    monkeypatch: pytest.MonkeyPatch,
    prompt: Any,
    options: dict[str, Any],
    inline: bool,
) -> None:
    prepare, threads = Preparer.prepare, []

    def watched(*arguments: Any) -> None:
        threads.append(threading.current_thread())
        prepare(*arguments)

    monkeypatch.setattr(Preparer, "prepare", watched)
    async with open_engine() as engine:
        await engine.generate(prompt, max_tokens=1, **options)
    assert (threads == [threading.current_thread()]) == inline


async def test_a_prompt_that_is_bad_after_its_deadline_has_a_line_in_the_log(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is counted as failed, so it is told of as such."""
    told = threading.Event()

    def late(*_: Any) -> None:
        assert told.wait(120)
        raise InvalidRequest("prompt", "x", "is bad")

    monkeypatch.setattr(Preparer, "prepare", late)
    with caplog.at_level("WARNING", "asyncinfer"):
        async with open_engine() as engine:
            with pytest.raises(DeadlineExceeded):
                await engine.generate(LONG_PROMPT, deadline=0.01)
            told.set()
        assert engine.stats().failed == 1
    assert [record.getMessage().split()[0] for record in caplog.records] == ["request_failed"]


class PanicException(BaseException):
    """What a library in Rust raises when it panics."""


@pytest.mark.parametrize("prompt", ["x", LONG_PROMPT])
async def test_a_panic_while_a_prompt_is_prepared_fails_its_request(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    async with open_engine() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Preparer, "prepare", _raiser(PanicException("index out of range")))
            with pytest.raises(RequestFailed, match="index out of range") as caught:
                await engine.generate(prompt, max_tokens=1)
        assert isinstance(caught.value.__cause__, PanicException)
        assert len((await engine.generate(prompt, max_tokens=1)).token_ids) == 1


async def test_a_panic_while_the_model_is_loaded_is_an_error_of_loading() -> None:
    model = FakeModel()
    model.load = _raiser(PanicException("bad header"))  # type: ignore[method-assign]
    with pytest.raises(ModelLoadError, match="PanicException: bad header"):
        await Engine.open(model)


async def test_a_prompt_that_there_is_no_thread_for_counts_as_refused(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Threads.start

    def refused(self: Threads, worker: Worker) -> Handle:
        if worker.name == "asyncinfer-intake":
            raise RuntimeError("can't start new thread")
        return start(self, worker)

    monkeypatch.setattr(Threads, "start", refused)
    async with open_engine() as engine:
        with pytest.raises(Overloaded, match="can't start new thread"):
            await engine.generate(LONG_PROMPT, max_tokens=1)
        assert engine.stats().refused == 1
        assert engine.stats().waiting == 0


@pytest.mark.parametrize("hangs", [False, True])
async def test_an_engine_that_has_ended_keeps_no_command(until: Until, hangs: bool) -> None:
    """A command holds a request, with its prompt."""
    gate = StepGate()
    engine = await TimedEngine.open(FakeModel(gate=gate), step_timeout=1.0)
    stream = engine.stream("hello", max_tokens=2000, buffer=1)
    await anext(stream)
    core, thread = core_of(engine), thread_of(engine)

    async def read() -> None:
        with pytest.raises(EngineDead):
            async for _ in stream:
                pass

    if hangs:
        gate.close()
        before = gate.arrived
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await until(lambda: gate.arrived > before)
            engine.time.go_by(2.0)
    else:
        await engine.aclose(drain_timeout=0.0)
    stream.stop()
    frontend_of(engine).post(Command.ABORT, stream)
    assert core.inbox.empty()
    gate.open()
    await until(lambda: not thread.alive)
    await engine.aclose()


def _raiser(error: BaseException) -> Callable[..., Any]:
    def raiser(*_: Any) -> Any:
        raise error

    return raiser
