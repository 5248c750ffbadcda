"""Closing: while opening, cancelled, with a thread that hangs, and without holding up a loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from functools import partial
from typing import Any

import anyio
import pytest
from support import OpenEngine, Until, places, thread_of

from asyncinfer import Engine, EngineClosed, EngineDead, Overloaded, PluginError
from asyncinfer.config import EngineConfig
from asyncinfer.engine import Loaded, prompt_workers, thread
from asyncinfer.protocols import Observer
from asyncinfer.runtime import Handle, Threads, Worker
from asyncinfer.testing import FakeModel, StepGate
from asyncinfer.testing.fake_steps import FakeSteps

pytestmark = pytest.mark.anyio


class SlowModel(FakeModel):
    """Loads when it is let to."""

    def __init__(self) -> None:
        super().__init__()
        self.loading = threading.Event()
        self.let_go = threading.Event()

    def load(self, config: EngineConfig, progress: Any = None) -> Loaded:
        self.loading.set()
        assert self.let_go.wait(120)
        return super().load(config, progress)


async def test_closed_while_it_opens(until: Until) -> None:
    model = SlowModel()
    engine = Engine(model)
    assert engine.health().state == "closed"
    told: list[BaseException] = []

    async def enter() -> None:
        try:
            async with engine:
                raise AssertionError("opened")
        except EngineClosed as error:
            told.append(error)
            # Only now is there an end to the loading.
            model.let_go.set()

    with anyio.fail_after(120):
        async with anyio.create_task_group() as group:
            group.start_soon(enter)
            await until(model.loading.is_set)
            assert engine.health().state == "opening"
            await engine.aclose()
    assert "while it was being opened" in str(told[0])
    assert engine.health().state == "closed"
    assert not thread_of(engine).alive
    with pytest.raises(EngineClosed):
        engine.stream("x")


def test_a_native_cancellation_during_the_drain() -> None:
    """The drain ends, what runs is aborted, and the task leaves when the thread has ended."""

    async def main() -> None:
        gate = StepGate(closed=True)
        engine = await Engine.open(FakeModel(gate=gate), drain_timeout=1000.0)
        stream = engine.stream("x", max_tokens=4000)
        gate.let()
        await anext(stream)
        gate.wait_arrived(2)
        closing = asyncio.create_task(engine.aclose())
        while engine.health().state != "draining":
            await asyncio.sleep(0)
        closing.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        # The step still runs.
        assert not closing.done()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(closing, 30)
        assert places(engine) == 0
        assert not thread_of(engine).alive
        with pytest.raises(EngineClosed):
            async for _ in stream:
                pass

    asyncio.run(main())


async def test_a_scope_that_ends_during_the_drain(gate: StepGate) -> None:
    engine = await Engine.open(FakeModel(gate=gate), drain_timeout=1000.0)
    stream = engine.stream("x", max_tokens=4000)
    await anext(stream)
    with anyio.fail_after(120):
        with anyio.move_on_after(0.05):
            await engine.aclose()
    assert engine.health().state == "closed"
    assert places(engine) == 0


async def test_nobody_joins_a_thread_on_the_event_loop(
    gate: StepGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = threading.get_ident()
    join = threading.Thread.join

    def watched(thread: threading.Thread, timeout: float | None = None) -> None:
        assert threading.get_ident() != here or timeout == 0.0
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", watched)
    gate.close()
    engine = await Engine.open(FakeModel(gate=gate), step_timeout=0.1)
    with pytest.raises(EngineDead):
        await engine.generate("x")
    with anyio.fail_after(120):
        with pytest.raises(EngineDead, match=r"longer than 0\.1 s"):
            await engine.aclose()
    gate.open()
    async with Engine(FakeModel()) as healthy:
        await healthy.generate("x" * 1500, max_tokens=1)


class FewThreads(Threads):
    """Starts no thread of these names."""

    def __init__(self, *refused: str) -> None:
        self.refused = {*refused}

    def start(self, worker: Worker) -> Handle:
        if worker.name in self.refused:
            raise RuntimeError("can't start new thread")
        return super().start(worker)


class FewThreadsEngine(Engine):
    def __init__(self, *args: Any, refused: str, **kwargs: Any) -> None:
        self.few = self._runtime = FewThreads(refused)
        super().__init__(*args, **kwargs)


class Lingering(Threads):
    """Threads that are still there for three seconds after their last turn. Time passes when
    somebody looks whether they are."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def start(self, worker: Worker) -> Handle:
        return LingeringHandle(self, super().start(worker))


class LingeringHandle:
    def __init__(self, runtime: Lingering, thread: Handle) -> None:
        self.runtime, self.thread = runtime, thread

    @property
    def ident(self) -> int | None:
        return self.thread.ident

    def is_alive(self) -> bool:
        if self.thread.is_alive():
            return True
        # No further: another thread may still be in its last turn.
        self.runtime.now = min(3.0, self.runtime.now + 0.5)
        return self.runtime.now < 3.0

    def join(self, timeout: float | None = None) -> None:
        self.thread.join(timeout)


class LingeringEngine(Engine):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._runtime = Lingering()
        super().__init__(*args, **kwargs)


async def test_threads_that_are_slow_to_go_do_not_hang() -> None:
    """On a busy machine it may take seconds until a thread that has ended is gone."""
    engine = await LingeringEngine.open(FakeModel())
    await engine.generate("x", max_tokens=2)
    await engine.aclose()
    assert engine.health().state == "closed"


@pytest.mark.parametrize("load_error", [None, RuntimeError("broken")])
async def test_free_memory_is_given_back_once_at_the_end(
    load_error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread that had the model: it takes milliseconds, which no event loop has."""
    trimmed: list[tuple[str, bool]] = []
    model = FakeModel(load_error=load_error)

    def counted() -> None:
        closed = model.runner is None or model.runner.closed
        trimmed.append((threading.current_thread().name, closed))

    monkeypatch.setattr(thread, "trim_heap", counted)
    engine = Engine(model)
    if load_error is None:
        await engine.__aenter__()
        assert not trimmed
        await engine.aclose()
    else:
        with pytest.raises(RuntimeError, match="broken"):
            await engine.__aenter__()
        for running in threading.enumerate():
            if running.name == "asyncinfer-decode":
                running.join(60)
    await engine.aclose()
    assert trimmed == [("asyncinfer-decode", True)]


async def test_threads_that_are_greenlets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gevent and eventlet make them. Each replaces this function."""
    number = threading.get_ident
    monkeypatch.setattr(threading, "get_ident", lambda: number())
    with anyio.fail_after(120), pytest.raises(EngineDead, match=r"patch_all\(thread=False"):
        await Engine.open(FakeModel())


@pytest.mark.parametrize("refused", ["asyncinfer-decode", "asyncinfer-watchdog"])
async def test_a_thread_that_cannot_be_started(refused: str) -> None:
    model = FakeModel()
    engine = FewThreadsEngine(model, refused=refused)
    with anyio.fail_after(120), pytest.raises(EngineDead, match="can't start new thread"):
        async with engine:
            raise AssertionError("opened")
    await engine.aclose()
    assert engine.health().state in ("closed", "dead")


async def test_a_worker_that_cannot_be_started() -> None:
    async with FewThreadsEngine(FakeModel(), refused="asyncinfer-intake") as engine:
        for _ in range(2):
            with anyio.fail_after(120), pytest.raises(Overloaded, match="can't start new thread"):
                await engine.generate("x" * 1500, max_tokens=1)
        assert places(engine) == 0
        assert len((await engine.generate("x", max_tokens=2)).token_ids) == 2
        engine.few.refused.clear()
        assert len((await engine.generate("x" * 1500, max_tokens=2)).token_ids) == 2


def test_one_worker_is_enough() -> None:
    class One(Threads):
        started = 0

        def start(self, worker: Worker) -> Handle:
            if self.started:
                raise RuntimeError("can't start new thread")
            self.started = 1
            return super().start(worker)

    pool = prompt_workers.PromptWorkers(One())
    done = threading.Event()
    pool.give(lambda: None, 1)
    pool.give(done.set, prompt_workers.HUGE)
    assert done.wait(120)
    pool.close()


def test_a_prompt_that_a_close_overtakes_is_refused() -> None:
    class Late(Threads):
        """A worker that finds nothing to do before the prompt is queued."""

        def start(self, worker: Worker) -> Handle:
            pool.close()
            return threading.Thread()

    pool = prompt_workers.PromptWorkers(Late())
    task = partial(print, "not run")
    with pytest.raises(EngineClosed):
        pool.give(task, 1)
    assert not pool.drop(task)


def test_leaving_the_interpreter_while_it_loads() -> None:
    """The loading is told to stop, and waited for."""
    program = """
    import asyncio, threading, time
    from asyncinfer import Engine, EngineClosed
    from asyncinfer.stats import LoadProgress
    from asyncinfer.engine import thread
    from asyncinfer.testing import FakeModel

    thread.EXIT_TIMEOUT = 50.0
    loading = threading.Event()

    class Slow(FakeModel):
        def load(self, config, progress):
            loading.set()
            try:
                while True:
                    progress(LoadProgress(1, 2))
                    time.sleep(0.001)
            except EngineClosed:
                print("stopped", flush=True)
                raise

    def run():
        try:
            asyncio.run(main())
        except BaseException:
            pass

    async def main():
        await Engine.open(Slow())

    threading.Thread(target=run, daemon=True).start()
    loading.wait()
    """
    assert left(program) == ("stopped\n", 0)


def test_leaving_the_interpreter_while_a_long_step_computes() -> None:
    """A step ends between two layers: a thread that came back from torch while the interpreter is
    torn down would abort the process."""
    program = """
    import asyncio, sys, threading
    import torch
    from asyncinfer import Engine
    from asyncinfer.engine import thread
    from asyncinfer.models import Decoder, parse_config
    from asyncinfer.testing import RandomModel

    thread.EXIT_TIMEOUT = 200.0
    begun, layers = threading.Event(), 200
    matrix = torch.randn(1000, 1000)

    class Slow:
        def __init__(self, layer, last):
            self.layer, self.last = layer, last

        def __call__(self, x, one):
            if len(x) > 16:
                begun.set()
                matrix @ matrix
                if self.last:
                    print("computed", flush=True)
            return self.layer(x, one)

    made = Decoder.__init__

    def make(decoder, *arguments):
        made(decoder, *arguments)
        decoder.layers = [Slow(each, n == layers - 1) for n, each in enumerate(decoder.layers)]

    Decoder.__init__ = make
    config = parse_config(
        {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300,
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": layers,
            "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 64,
        }
    )

    async def main():
        engine = await Engine.open(RandomModel(config), device="cpu")
        task = asyncio.ensure_future(engine.generate([5] * 40, max_tokens=3))
        await asyncio.to_thread(begun.wait)

    asyncio.run(main())
    sys.exit(7)
    """
    assert left(program) == ("", 7)


def left(program: str) -> tuple[str, int]:
    """What a Python of its own prints that runs the program, and its exit code."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    print(done.stderr)
    return done.stdout, done.returncode


async def test_a_thousand_streams(open_engine: OpenEngine) -> None:
    model = FakeModel(blocks=8192, strict=False)
    engine = await Engine.open(model, max_running=1000)
    streams = [engine.stream("x", max_tokens=2000) for _ in range(1000)]
    ends: list[str] = []

    async def read(stream: Any) -> None:
        try:
            async for _ in stream:
                pass
        except EngineClosed as error:
            ends.append(str(error))

    with anyio.fail_after(120):
        async with anyio.create_task_group() as group:
            for stream in streams:
                group.start_soon(read, stream)
            while places(engine) < 1000:
                await anyio.sleep(0.001)
            await engine.aclose(drain_timeout=0.0)
    assert len(ends) == 1000
    assert places(engine) == 0


async def test_an_observer_whose_thread_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was opened before is given back, that of the runner and of the other observers."""
    closed: list[str] = []

    class Closing(Observer):
        def __init__(self, name: str) -> None:
            self.name = name

        def observe(self, event: Any) -> None: ...

        def close(self) -> None:
            closed.append(self.name)

    start, started = threading.Thread.start, []

    def few(thread: threading.Thread) -> None:
        if thread.name == "asyncinfer-observer":
            if started:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", few)
    monkeypatch.setattr(FakeSteps, "close", lambda runner: closed.append("runner"))
    with anyio.fail_after(120), pytest.raises(PluginError, match="can't start new thread"):
        await Engine.open(FakeModel(), observers=[Closing("first"), Closing("second")])
    started[0].join(120)
    assert sorted(closed) == ["first", "runner", "second"]
