"""The engine without an event loop: the same answers and ends, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from asyncinfer import (
    DeadlineExceeded,
    Engine,
    EngineClosed,
    InvalidRequest,
    ModelLoadError,
    Overloaded,
    StreamBusy,
    SyncEngine,
)
from asyncinfer.testing import FakeModel, StepGate

LOOP = "asyncinfer-sync"


def loops() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == LOOP]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not loops()


@pytest.fixture
def gate() -> StepGate:
    return StepGate()


@pytest.fixture
def engine(gate: StepGate) -> Iterator[SyncEngine]:
    with SyncEngine(FakeModel(gate=gate), drain_timeout=0.0, max_requests=8) as engine:
        yield engine
        gate.open()
    stats = engine.stats()
    assert stats.running == stats.waiting == stats.paused == 0
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total


def script(source: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_answers_are_those_of_the_engine(engine: SyncEngine) -> None:
    options = {"max_tokens": 20, "seed": 5, "n": 2}
    whole = engine.generate("abc", **options)
    assert len(whole.choices) == 2
    texts = ["", ""]
    stream = engine.stream("abc", **options)
    assert stream.usage is None
    with stream:
        for chunk in stream:
            texts[chunk.index] += chunk.text
        assert stream.usage == whole.usage.__class__(3, 0, 40)
        assert stream.timings is not None
        assert stream.request_id == "req-2"
    assert texts == [choice.text for choice in whole.choices]
    assert engine.stream("abc", **options).completion().choices == whole.choices
    assert engine.stats().finished == 3
    assert engine.health().serving
    assert engine.default_params.n == 1
    assert engine.config.max_requests == 8


def test_what_was_read_is_part_of_the_completion(engine: SyncEngine) -> None:
    stream = engine.stream("abc", max_tokens=12, seed=1)
    first = next(stream)
    whole = stream.completion()
    assert whole.text.startswith(first.text)
    assert len(whole.token_ids) == 12
    assert list(stream) == []


def test_errors_are_those_of_the_engine(engine: SyncEngine, gate: StepGate) -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        engine.stream("abc", temperature=-1)
    with pytest.raises(InvalidRequest, match="max_requests=8"):
        engine.generate("abc", n=9)
    gate.close()
    held = [engine.stream("abc") for _ in range(8)]
    for stream in held:
        stream.__enter__()
    with pytest.raises(Overloaded):
        engine.generate("abc")
    gate.open()
    for stream in held:
        stream.close()
    assert engine.generate("abc", max_tokens=2).finish_reason == "length"
    gate.close()
    with pytest.raises(DeadlineExceeded):
        engine.generate("abc", deadline=0.01)


def test_an_engine_that_was_opened_behind_it_is_not_open_here() -> None:
    engine = SyncEngine(FakeModel())

    async def work() -> None:
        async with engine.engine:
            for call in (
                lambda: engine.stream("abc"),
                lambda: engine.generate("abc"),
                lambda: engine.pin("abc").__enter__(),
                lambda: engine.adapters,
            ):
                with pytest.raises(EngineClosed, match=r"use `with SyncEngine"):
                    call()

    asyncio.run(work())


def test_threads_are_decoded_together(engine: SyncEngine, gate: StepGate) -> None:
    gate.close()
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(engine.generate, "abc", max_tokens=5) for _ in range(4)]
        # One is in the step that waits, the others in the inbox.
        while engine.stats().running + engine.stats().waiting < 4:
            assert not any(answer.done() for answer in answers)
        gate.open()
        assert all(len(answer.result(120).token_ids) == 5 for answer in answers)


def test_one_thread_reads_a_stream(engine: SyncEngine, gate: StepGate) -> None:
    gate.close()
    stream = engine.stream("abc", max_tokens=5)
    with stream, ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, stream)
        gate.wait_arrived(1)
        with pytest.raises(StreamBusy):
            while not first.done():
                next(stream)
        gate.open()
        assert first.result(120).token_ids


def test_a_stream_can_be_stopped_and_left(engine: SyncEngine) -> None:
    stream = engine.stream("abc", max_tokens=2000, buffer=4)
    next(stream)
    stream.stop()
    assert [chunk.finish_reason for chunk in stream][-1] == "stopped"
    with engine.stream("abc", max_tokens=2000, buffer=4) as stream:
        next(stream)
    stream.close()
    with pytest.raises(StopIteration):
        next(stream)
    assert engine.stats().aborted == 1


def test_a_stream_that_is_dropped_is_aborted(engine: SyncEngine) -> None:
    stream = engine.stream("abc", max_tokens=2000, buffer=4)
    next(stream)
    with pytest.warns(ResourceWarning, match="was dropped before its end"):
        del stream
    with engine.stream("abc", max_tokens=1):
        pass
    engine.generate("abc", max_tokens=1)
    assert engine.stats().aborted >= 1


@pytest.mark.parametrize("form", ["completion", "next", "generate"])
def test_ctrl_c_ends_the_wait_and_the_request(
    engine: SyncEngine, gate: StepGate, form: str
) -> None:
    gate.close()
    stream = engine.stream("abc", max_tokens=50)
    waits: dict[str, Callable[[], object]] = {
        "completion": stream.completion,
        "next": lambda: next(stream),
        "generate": lambda: engine.generate("abc", max_tokens=50),
    }

    def interrupt() -> None:
        gate.wait_arrived(1)
        signal.pthread_kill(main, signal.SIGINT)

    main = threading.main_thread().ident
    assert main is not None
    thread = threading.Thread(target=interrupt)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            waits[form]()
    finally:
        thread.join()
        signal.signal(signal.SIGINT, handler)
    gate.open()
    # A stream that was read goes on after it.
    if form == "next":
        assert len(stream.completion().token_ids) == 50
    else:
        assert len(engine.generate("abc", max_tokens=3).token_ids) == 3
        assert engine.stats().aborted == 1


def test_ctrl_c_at_any_point_of_a_wait_leaves_no_lock(engine: SyncEngine) -> None:
    """Also where a call takes a lock that the loop's thread takes next."""
    of_the_wait = ("event_loop_thread.py", "threading.py", "_base.py", "base_events.py")
    left = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(of_the_wait):
            return None
        if event in ("line", "return"):
            left -= 1
            if not left:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before, at, interrupted = sys.gettrace(), 0, True
    while interrupted:
        at += 1
        left = at
        try:
            sys.settrace(trace)
            engine.generate("abc", max_tokens=1)
            interrupted = False
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert len(engine.generate("abc", max_tokens=2).token_ids) == 2
    assert at > 30


def test_who_waits_hears_of_the_close(engine: SyncEngine, gate: StepGate) -> None:
    gate.close()
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(engine.generate, "abc", max_tokens=50)
        gate.wait_arrived(1)
        closing = pool.submit(engine.close)
        with pytest.raises(EngineClosed):
            answer.result(120)
        gate.open()
        closing.result(120)
    engine.close()
    for use in (engine.stream, engine.generate):
        with pytest.raises(EngineClosed):
            use("abc")
    assert engine.health().state == "closed"


def test_a_stream_of_a_closed_engine_has_ended(gate: StepGate) -> None:
    with SyncEngine(FakeModel(gate=gate)) as engine:
        stream = engine.stream("abc", max_tokens=3)
        next(stream)
        engine.close(drain_timeout=0.0)
        with pytest.raises(EngineClosed):
            next(stream)
        stream.close()


def test_an_engine_that_does_not_open_leaves_no_thread(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        SyncEngine.open(tmp_path)
    assert not loops()


def test_an_engine_is_opened_once(engine: SyncEngine) -> None:
    with pytest.raises(EngineClosed, match="opened once"):
        engine.__enter__()
    unopened = SyncEngine(FakeModel())
    with pytest.raises(EngineClosed, match="not open"):
        unopened.generate("abc")
    unopened.close()


def test_a_bad_drain_timeout_closes_nothing(engine: SyncEngine) -> None:
    with pytest.raises(ValueError, match="drain_timeout"):
        engine.close(drain_timeout=-1.0)
    assert engine.generate("abc", max_tokens=1).token_ids


def test_an_engine_that_is_dropped_is_closed() -> None:
    engine = SyncEngine.open(FakeModel())
    engine.generate("abc", max_tokens=1)
    (loop,) = loops()
    with pytest.warns(ResourceWarning, match="dropped without"):
        del engine
        gc.collect()
    loop.join(120)
    assert not loop.is_alive()


def test_within_an_event_loop_it_blocks_and_works() -> None:
    import asyncio

    async def main() -> str:
        async with Engine(FakeModel()) as own:
            with SyncEngine(FakeModel()) as engine:
                answer = engine.generate("abc", max_tokens=4, seed=1).text
            assert (await own.generate("abc", max_tokens=4, seed=1)).text == answer
            return answer

    assert asyncio.run(main())


def test_a_program_that_forgets_to_close_ends() -> None:
    done = script(
        """
        from asyncinfer import SyncEngine
        from asyncinfer.testing import FakeModel

        engine = SyncEngine.open(FakeModel())
        stream = engine.stream("abc", max_tokens=2000, buffer=2)
        print(len(next(stream).token_ids) > 0, flush=True)
        """
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_fork_is_told() -> None:
    done = script(
        """
        import os, signal, warnings
        from asyncinfer import EngineClosed, SyncEngine
        from asyncinfer.testing import FakeModel

        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of any fork with threads
        with SyncEngine(FakeModel()) as engine:
            stream = engine.stream("abc", max_tokens=5)
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                told = 0
                for use in (lambda: engine.generate("abc"), lambda: next(stream)):
                    try:
                        use()
                    except EngineClosed as error:
                        told += "fork" in str(error)
                stream.close()
                engine.close()
                os._exit(told)
            _, status = os.waitpid(child, 0)
            print(os.waitstatus_to_exitcode(status), len(stream.completion().token_ids))
        """
    )
    assert done.stdout == "2 5\n", done.stderr


def test_adapters() -> None:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"]}
    name = "base_model.model.model.layers.0.self_attn.o_proj"
    tensors = {
        f"{name}.lora_A.weight": torch.randn(2, 256),
        f"{name}.lora_B.weight": torch.randn(256, 2),
    }
    unopened = SyncEngine()
    with pytest.raises(EngineClosed, match="not open"):
        unopened.adapters.list()
    with SyncEngine() as engine:
        plain = engine.generate("def f(", max_tokens=4, temperature=0)
        loaded = engine.adapters.load("mine", tensors, config=config)
        assert engine.adapters.list() == (loaded,)
        with pytest.raises(ModelLoadError):
            engine.adapters.load("other", {}, config=config)
        options = {"max_tokens": 4, "temperature": 0}
        assert engine.generate("def f(", adapter="mine", **options).usage == plain.usage
        assert engine.generate("def f(", **options).token_ids == plain.token_ids
        engine.adapters.unload("mine")
        with pytest.raises(InvalidRequest, match="mine"):
            engine.generate("def f(", adapter="mine", **options)


class Alarm(RuntimeError):
    """What a signal handler of a program may raise."""


class _Interrupted:
    """Raises an exception in the n-th line that this thread runs of some files."""

    def __init__(self, line: int, raised: type[BaseException]) -> None:
        self.left = line
        self.raised = raised

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        # The whole names: this file's ends like one of them, and its own lines lose what they read.
        name = Path(frame.f_code.co_filename).name
        if name not in ("event_loop_thread.py", "sync_engine.py", "sync_stream.py"):
            return None
        if frame.f_code.co_name == "_stop":
            # A finalizer, in which Python itself drops what is raised.
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise self.raised
        return self


def interrupted(
    work: Callable[[], object], line: int, raised: type[BaseException] = KeyboardInterrupt
) -> bool:
    """Whether the work has so many lines, and was interrupted there."""
    watch = _Interrupted(line, raised)
    before = sys.gettrace()
    sys.settrace(watch)
    try:
        work()
    except raised:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("raised", [KeyboardInterrupt, Alarm])
def test_an_interrupt_in_any_line_loses_no_chunk(
    engine: SyncEngine, raised: type[BaseException]
) -> None:
    right = engine.generate("abc", max_tokens=60, seed=1).text
    stream = engine.stream("abc", max_tokens=60, seed=1)
    text, line = "", 1

    def read() -> None:
        nonlocal text
        chunk = next(stream, None)
        text += "" if chunk is None else chunk.text

    while interrupted(read, line, raised):
        line += 1
    assert line > 8
    for chunk in stream:
        text += chunk.text
    assert text == right


def test_an_interrupt_in_any_line_leaves_no_request(engine: SyncEngine) -> None:
    line = 1
    while interrupted(lambda: engine.generate("abc", max_tokens=2), line):
        line += 1
    assert line > 8


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_interrupt_in_any_line_leaves_no_thread() -> None:
    def open_and_close() -> None:
        with SyncEngine(FakeModel()):
            pass

    line = 1
    while interrupted(open_and_close, line):
        if loops():
            gc.collect()
        for thread in loops():
            thread.join(120)
        assert not loops()
        # An engine is opened for each.
        line += 3
    assert line > 20
