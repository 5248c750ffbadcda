"""What happens to engines: fault rows 13-17, 26-31 and overload."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
from typing import Any

import anyio
import pytest
from support import (
    OpenEngine,
    TimedEngine,
    Until,
    core_of,
    heed_ctrl_c,
    oracle,
    places,
    request_of,
    thread_of,
)

from asyncinfer import (
    Engine,
    EngineClosed,
    EngineDead,
    InvalidRequest,
    ModelLoadError,
    Overloaded,
    RequestFailed,
)
from asyncinfer.testing import FakeModel, StepGate

pytestmark = pytest.mark.anyio


def python(
    program: str, *, timeout: float = 240, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
        preexec_fn=heed_ctrl_c,
        check=False,
    )


#: How a program says which event loop it runs on.
ON_EACH_LOOP = pytest.mark.parametrize(
    "loop",
    ["", "backend_options={'use_uvloop': True}", "backend='trio'"],
    ids=["asyncio", "uvloop", "trio"],
)


# fault 13
@ON_EACH_LOOP
def test_a_fork_gets_a_clear_error(loop: str) -> None:
    done = python(
        f"""
        import os, warnings
        import anyio
        from asyncinfer import Engine, EngineClosed
        from asyncinfer.testing import FakeModel

        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of any fork with threads

        async def main():
            async with Engine(FakeModel()) as engine:
                stream = engine.stream("x", max_tokens=1000, buffer=2)
                await anext(stream)
                other = engine.stream("y")
                child = os.fork()
                if child == 0:
                    code = 0
                    try:
                        await engine.aclose()  # not the child's to close
                        begun = stream.__await__().send
                        for use in (engine.stream, other.__await__().send, begun):
                            try:
                                use(None)
                            except EngineClosed as error:
                                code += "fork" in str(error)
                        await stream.aclose()
                    finally:
                        os._exit(code)
                _, status = os.waitpid(child, 0)
                await stream.aclose()
                return os.waitstatus_to_exitcode(status)

        print("child", anyio.run(main, {loop}))
        """
    )
    assert done.stdout == "child 3\n", done.stderr


# fault 13
@ON_EACH_LOOP
def test_a_fork_waits_for_no_lock_of_its_parent(loop: str) -> None:
    """Another thread of the parent held it at that moment, and there is none in a fork."""
    done = python(
        f"""
        import os, signal, threading, warnings
        import anyio
        from asyncinfer import Engine
        from asyncinfer.testing import FakeModel

        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of any fork with threads

        async def main():
            async with Engine(FakeModel()) as engine:
                stream = engine.stream("x", max_tokens=1000, buffer=2)
                await anext(stream)
                held, forked = threading.Event(), threading.Event()

                def hold():
                    with engine._admission._lock:
                        held.set()
                        forked.wait()

                threading.Thread(target=hold, daemon=True).start()
                held.wait()
                child = os.fork()
                if child == 0:
                    signal.alarm(20)
                    await stream.aclose()
                    os._exit(0)
                forked.set()
                _, status = os.waitpid(child, 0)
                await stream.aclose()
                return os.waitstatus_to_exitcode(status)

        print("child", anyio.run(main, {loop}))
        """
    )
    assert done.stdout == "child 0\n", done.stderr


# fault 14
@ON_EACH_LOOP
def test_a_closed_loop_ends_the_thread(loop: str) -> None:
    done = python(
        f"""
        import threading, time, warnings
        import anyio
        from asyncinfer import Engine, EngineClosed
        from asyncinfer.testing import FakeModel

        kept = []

        async def main():
            engine = await Engine.open(FakeModel())
            stream = engine.stream("x", max_tokens=100_000 // 50, buffer=8)
            await anext(stream)
            kept.extend([engine, stream])

        anyio.run(main, {loop})
        thread = kept[0]._thread
        print("ended", thread.join(120))
        try:
            kept[0].stream("y")
        except EngineClosed as error:
            print(error)
        warnings.simplefilter("ignore", ResourceWarning)
        """
    )
    assert done.stdout.startswith("ended True\nthe event loop that opened the engine"), done.stderr


# fault 14
async def test_what_a_closed_loop_leaves_behind_in_a_busy_engine(until: Until) -> None:
    # Too slow to come to its end while anybody waits for what is asserted here.
    model = FakeModel(
        max_context=100_000,
        blocks=10_000,
        strict=False,
        gate=lambda *_: threading.Event().wait(0.005),
    )
    async with Engine(model, drain_timeout=0.0) as engine:
        kept: list[Any] = []

        async def leave() -> None:
            stream = engine.stream("left", max_tokens=1000, buffer=2)
            kept.append(stream)
            await anext(stream)

        thread = threading.Thread(target=lambda: anyio.run(leave))
        async with engine.stream("busy", max_tokens=90_000, buffer=90_000) as busy:
            await anext(busy)
            thread.start()
            await until(lambda: engine.stats().aborted == 1)
            # It was noticed while the engine had no moment of rest.
            assert engine.stats().running == 1
        thread.join()


# fault 15
@ON_EACH_LOOP
def test_keyboard_interrupt_propagates_and_close_is_bounded(loop: str) -> None:
    done = python(
        f"""
        import _thread, threading, time
        import anyio
        from asyncinfer import Engine
        from asyncinfer.testing import FakeModel

        async def main():
            model = FakeModel(max_context=100_000, blocks=10_000)
            async with Engine(model, drain_timeout=1e6) as engine:
                async with engine.stream("x", max_tokens=90_000) as stream:
                    read = 0
                    async for _ in stream:
                        read += 1
                        if read == 5:
                            threading.Thread(target=_thread.interrupt_main).start()

        try:
            anyio.run(main, {loop})
        except KeyboardInterrupt:
            print("interrupted")
        """
    )
    assert done.stdout == "interrupted\n", done.stderr


# fault 15
def test_leaving_the_interpreter_without_closing() -> None:
    done = python(
        """
        import warnings
        warnings.simplefilter("ignore", ResourceWarning)
        import asyncio
        from asyncinfer import Engine
        from asyncinfer.testing import FakeModel

        async def main():
            global engine, stream
            engine = await Engine.open(FakeModel(max_context=100_000, blocks=10_000))
            stream = engine.stream("x", max_tokens=90_000, buffer=80_000)
            await anext(stream)
            print("leaving")

        asyncio.run(main())
        """
    )
    assert (done.stdout, done.returncode) == ("leaving\n", 0), done.stderr


# fault 16
@pytest.mark.parametrize("nth", [1, 2, 5, 20])
@pytest.mark.parametrize("phase", ["launch", "collect"])
async def test_the_decode_loop_dies(phase: str, nth: int) -> None:
    seen = {"launch": 0, "collect": 0}

    def explode(at: Any, plan: Any) -> None:
        seen[at] += 1
        if at == phase and seen[at] == nth:
            raise OSError("the device fell off")

    engine = await Engine.open(FakeModel(gate=explode))
    want = oracle(engine, "hello", 100)
    streams = [engine.stream("hello", max_tokens=100, temperature=0.0) for _ in range(3)]
    failures = []

    async def consume(stream: Any) -> None:
        got = []
        try:
            async for chunk in stream:
                got += chunk.token_ids
        except EngineDead as error:
            failures.append(error)
        assert got == want[: len(got)]

    async with anyio.create_task_group() as group:
        for stream in streams:
            group.start_soon(consume, stream)
    assert len(failures) == 3
    assert len({id(error) for error in failures}) == 3
    assert all(isinstance(error.__cause__, OSError) for error in failures)
    with pytest.raises(EngineDead, match="the device fell off"):
        engine.stream("again")
    with pytest.raises(EngineDead, match="the device fell off"):
        await anext(streams[0])
    await engine.aclose()


# fault 16
async def test_what_is_in_the_inbox_when_the_loop_dies(gate: StepGate) -> None:
    def explode(phase: Any, plan: Any) -> None:
        gate(phase, plan)
        raise OSError("the device fell off")

    engine = await Engine.open(FakeModel(gate=explode))
    gate.close()
    ends = []

    async def consume(stream: Any) -> None:
        with pytest.raises(EngineDead, match="fell off"):
            await anext(stream)
        ends.append(stream)

    async with anyio.create_task_group() as group:
        group.start_soon(consume, engine.stream("in the step"))
        await anyio.wait_all_tasks_blocked()
        gate.wait_arrived(1)
        group.start_soon(consume, engine.stream("in the inbox"))
        await anyio.wait_all_tasks_blocked()
        gate.open()
    assert len(ends) == 2
    assert places(engine) == 0
    await engine.aclose()


# fault 17
async def test_a_step_hangs(gate: StepGate, until: Until) -> None:
    gate.close()
    engine = await Engine.open(FakeModel(gate=gate), step_timeout=0.1)
    stream = engine.stream("hello", max_tokens=100)
    with pytest.raises(EngineDead, match=r"longer than 0\.1 s"):
        await anext(stream)
    with pytest.raises(EngineDead):
        engine.stream("again")
    with pytest.raises(EngineDead, match=r"longer than 0\.1 s"):
        await engine.aclose()
    gate.open()
    await until(lambda: not thread_of(engine).alive)
    await engine.aclose()


# fault 17
async def test_what_ended_just_before_a_step_that_hangs_is_told(until: Until) -> None:
    """Its end is not known to its loop yet when the step begins."""
    hangs, go_on = threading.Event(), threading.Event()
    steps = 0

    def gate(phase: str, plan: Any) -> None:
        nonlocal steps
        if phase == "launch":
            steps += 1
            if steps == 4:
                # Between this step and the next, which hangs.
                stopped.stop()
            elif steps == 5:
                hangs.set()
                go_on.wait()

    engine = await TimedEngine.open(FakeModel(gate=gate), step_timeout=1.0, overlap=1)
    stopped = engine.stream("stopped", max_tokens=100)
    other = engine.stream("other", max_tokens=100)
    await stopped.__aenter__()
    await other.__aenter__()
    await until(hangs.is_set)
    engine.time.go_by(2.0)
    with pytest.raises(EngineDead):
        async for _ in other:
            pass
    with anyio.fail_after(120):
        chunks = [chunk async for chunk in stopped]
    assert chunks[-1].finish_reason == "stopped"
    go_on.set()
    await until(lambda: not thread_of(engine).alive)
    await engine.aclose()


# fault 26
async def test_a_row_fails_alone() -> None:
    bad = {"slot": -1}

    def failing(plan: Any) -> dict[int, Exception]:
        rows = [r for r, slot in enumerate(plan.slots) if slot == bad["slot"] and plan.samples[r]]
        return {row: RequestFailed("the logits are NaN") for row in rows}

    async with Engine(FakeModel(failing=failing)) as engine:
        good = engine.stream("good", max_tokens=50, temperature=0.0)
        await good.__aenter__()
        ill = engine.stream("ill" * 20, max_tokens=50, temperature=0.0, buffer=4)
        got = list((await anext(ill)).token_ids)
        bad["slot"] = request_of(ill).outputs[0].sequence.slot
        with pytest.raises(RequestFailed, match="NaN"):
            async for chunk in ill:
                got += chunk.token_ids
        assert got == oracle(engine, "ill" * 20, 50)[: len(got)]
        bad["slot"] = -1
        assert list((await good).token_ids) == oracle(engine, "good", 50)
        again = await engine.generate("ill" * 20, max_tokens=50, temperature=0.0)
        assert list(again.token_ids) == oracle(engine, "ill" * 20, 50)


# faults 23, 24
async def test_no_memory_for_a_step() -> None:
    """A prompt gets one more try in smaller steps, then it fails alone; decoding goes on."""
    model = FakeModel(no_room=lambda plan: plan.tokens > 48)
    async with Engine(model, max_step_tokens=64) as engine:
        good = engine.stream("good", max_tokens=90, temperature=0.0)
        await good.__aenter__()
        fits = await engine.generate("x" * 90, max_tokens=9, temperature=0.0)
        assert list(fits.token_ids) == oracle(engine, "x" * 90, 9)
        model.runner.no_room = lambda plan: plan.tokens > 8  # type: ignore[union-attr]
        with pytest.raises(RequestFailed, match="no room for a step of"):
            await engine.generate("y" * 90, max_tokens=9, temperature=0.0)
        assert list((await good).token_ids) == oracle(engine, "good", 90)
        assert engine.stats().failed == 1
        model.runner.no_room = None  # type: ignore[union-attr]
        again = await engine.generate("y" * 90, max_tokens=9, temperature=0.0)
        assert list(again.token_ids) == oracle(engine, "y" * 90, 9)


# faults 27, 28, 29, 30, 31, 40
@pytest.mark.parametrize(
    ("prompt", "field", "bound"),
    [
        ("x" * 4096, "prompt", "4096"),
        ([1] * 5000, "prompt", "4096"),
        ([-1], r"prompt\[0\]", "258"),
        ([0, 258], r"prompt\[1\]", "258"),
        ([0, True], r"prompt\[1\]", "integer"),
        ([0, 1.5], r"prompt\[1\]", "integer"),
        ("ab\ud800c", "prompt", "offset 2"),
        ("y" * 30_000, "prompt", "max_prompt_chars=20000"),
        (None, "prompt", "must be a string"),
        (b"bytes", "prompt", "must be a string"),
        ([{"role": "user", "content": "x"}], "prompt", "no chat template"),
    ],
)
async def test_bad_prompts(open_engine: OpenEngine, prompt: Any, field: str, bound: str) -> None:
    async with open_engine(max_prompt_chars=20_000) as engine:
        with pytest.raises(InvalidRequest, match=f"^{field}=.*{bound}"):
            await engine.generate(prompt)
        with pytest.raises(InvalidRequest):
            async with engine.stream(prompt):
                raise AssertionError("entered")
        assert engine.stats().steps == 0
        assert places(engine) == 0
        assert (await engine.generate("fine", max_tokens=2)).usage.completion_tokens == 2


# fault 28
async def test_larger_than_the_pool(open_engine: OpenEngine) -> None:
    async with open_engine(FakeModel(blocks=8)) as engine:
        with pytest.raises(InvalidRequest, match="max_tokens=200"):
            await engine.generate("hello", max_tokens=200)
        with pytest.raises(InvalidRequest, match="prompt"):
            await engine.generate("x" * 300)
        clipped = await engine.generate("hello", temperature=0.0)
        assert clipped.finish_reason == "length"
        assert list(clipped.token_ids) == oracle(engine, "hello", len(clipped.token_ids))


# fault 29
async def test_empty_prompt(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        done = await engine.generate("", max_tokens=3)
        assert done.usage.prompt_tokens == 1  # the BOS token
        core_of(engine).loaded.tokenizer.bos_id = None
        with pytest.raises(InvalidRequest, match="no BOS"):
            await engine.generate("", max_tokens=3)


# fault 30
@pytest.mark.parametrize(
    "options",
    [
        {"stop_token_ids": [258]},
        {"logit_bias": {258: 1.0}},
        {"allowed_token_ids": [258]},
        {"nonsense": 1},
        {"sampler": "nobody"},
        {"priority": 1.5},
        {"deadline": 0},
        {"deadline": float("nan")},
        pytest.param({"deadline": 10**309}, id="deadline-huge"),
        {"buffer": 0},
        {"on_full": "explode"},
        {"cache_scope": 3},
    ],
)
async def test_bad_options_name_the_field(open_engine: OpenEngine, options: dict[str, Any]) -> None:
    async with open_engine() as engine:
        with pytest.raises(InvalidRequest, match=f"^{next(iter(options))}="):
            await engine.generate("x", **options)
        assert places(engine) == 0


async def test_the_bounds_of_a_deadline_are_named(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        with pytest.raises(InvalidRequest, match=r"^deadline=0: must be in \(0, 1e\+09\]$"):
            await engine.generate("x", deadline=0)


# fault 50
async def test_overload_is_refused_at_once(
    open_engine: OpenEngine, gate: StepGate, until: Until
) -> None:
    async with open_engine(max_requests=4) as engine:
        gate.close()
        async with anyio.create_task_group() as group:
            for i in range(4):
                group.start_soon(engine.generate, f"request {i}")
            await until(lambda: places(engine) == 4)
            with pytest.raises(Overloaded, match="max_requests=4"):
                await engine.generate("one too many")
            with pytest.raises(Overloaded):
                await engine.generate("n counts", n=2)
            assert engine.stats().refused == 2
            gate.open()
            group.cancel_scope.cancel()
        await until(lambda: places(engine) == 0)
        assert (await engine.generate("x", max_tokens=1)).finish_reason == "length"


# fault 50
async def test_two_engines_share_nothing() -> None:
    async with Engine(FakeModel(), drain_timeout=0) as one, Engine(FakeModel()) as two:
        prompt = "x" * 100
        await one.generate(prompt, max_tokens=1)
        done = await two.generate(prompt, max_tokens=1)
        assert done.usage.cached_tokens == 0
        assert one.stats().steps == 1
        with pytest.raises(ZeroDivisionError):
            async with Engine(FakeModel()) as third:
                await third.generate("x", max_tokens=1)
                raise ZeroDivisionError
        assert (await two.generate("y", max_tokens=1)).finish_reason == "length"


async def test_loading_fails() -> None:
    with pytest.raises(ModelLoadError, match=r"file model\.safetensors"):
        await Engine.open(FakeModel(load_error=ModelLoadError("is cut", file="model.safetensors")))
    with pytest.raises(ModelLoadError):
        async with Engine(FakeModel(load_error=ModelLoadError("no"))):
            raise AssertionError("opened")


async def test_not_open_and_opened_twice() -> None:
    engine = Engine(FakeModel())
    with pytest.raises(EngineClosed, match="not open"):
        engine.stream("x")
    async with engine:
        with pytest.raises(EngineClosed, match="opened once"):
            await engine.__aenter__()


async def test_an_engine_that_is_dropped_ends_its_thread() -> None:
    engine = await Engine.open(FakeModel())
    thread = thread_of(engine)
    with pytest.warns(ResourceWarning, match="without aclose"):
        del engine
        gc.collect()
    assert thread.join(120)


async def test_nothing_is_left_after_many_engines(until: Until) -> None:
    async def once() -> None:
        async with Engine(FakeModel(blocks=64)) as engine:
            await engine.generate("hello", max_tokens=2)

    await once()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        await once()
    # What others left behind may have ended meanwhile.
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= files


def test_import_and_use_change_nothing_of_the_host() -> None:
    done = python(
        """
        import asyncio, gc, locale, logging, multiprocessing, os, random, signal, sys, threading
        import warnings

        def state():
            return {
                "signals": {s: signal.getsignal(s) for s in signal.valid_signals()},
                "environment": dict(os.environ),
                "logging": (logging.root.level, list(logging.root.handlers), logging.lastResort),
                "start method": multiprocessing.get_start_method(allow_none=True),
                "switch interval": sys.getswitchinterval(),
                "loop policy": type(asyncio.get_event_loop_policy()),
                "random": random.getstate(),
                "gc": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
                "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook),
                "recursion": sys.getrecursionlimit(),
                "locale": locale.setlocale(locale.LC_ALL),
                "warnings": list(warnings.filters),
                "threads": threading.enumerate(),
                "directory": os.getcwd(),
            }

        def of_torch():
            return (
                torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
                torch.get_num_interop_threads(), torch.get_rng_state().tolist(),
                torch.are_deterministic_algorithms_enabled(),
                torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled,
            )

        def same(before, now):
            assert {name for name in before if before[name] != now[name]} == set()

        multiprocessing.set_start_method("fork")
        before = state()
        from asyncinfer import Engine
        same(before, state())
        heavy = {"numpy", "torch", "transformers", "structlog", "rich", "huggingface_hub", "trio"}
        assert heavy & {*sys.modules} == set()

        import torch
        before, torch_before = state(), of_torch()
        async def main():
            async with Engine(kv_bytes=1 << 22, cpu_threads=1) as engine:
                await engine.generate("x", max_tokens=3, temperature=0.5, top_p=0.5, logprobs=1)
        asyncio.run(main())
        same(before, state())
        assert of_torch() == torch_before
        print("same")
        """
    )
    assert done.stdout == "same\n", done.stderr


def test_plain_asyncio_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """# fault 7, without anyio"""
    # Leaving waits so long for a step that does not end.
    monkeypatch.setattr("asyncinfer.engine.stream_buffer.ACK_TIMEOUT", 0.05)

    async def main() -> None:
        gate = StepGate(closed=True)
        async with Engine(FakeModel(gate=gate), drain_timeout=0) as engine:
            with pytest.raises(TimeoutError):
                async with engine.stream("x", max_tokens=4000) as stream, asyncio.timeout(0.05):
                    async for _ in stream:
                        raise AssertionError("the gate is closed")
            gate.open()
            while not engine.stats().aborted:
                await asyncio.sleep(0.001)

    asyncio.run(main())
