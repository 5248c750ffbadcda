"""Helpers that tests import."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from asyncinfer import Engine, SamplingParams, Stream
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.core import Core
from asyncinfer.engine.frontend import Frontend
from asyncinfer.engine.request import Request
from asyncinfer.engine.thread import DecodeThread
from asyncinfer.runtime import Handle, Threads, Worker
from asyncinfer.scheduler import RowLogprobs

OpenEngine = Callable[..., AbstractAsyncContextManager[Any]]
Until = Callable[[Callable[[], object]], Awaitable[None]]


def heed_ctrl_c() -> None:
    """For a child process, before its program starts: who began the tests may ignore Ctrl-C, as
    shells do for what they run in the background, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def children() -> set[str]:
    """The programs that this thread has started and has not waited for."""
    return set(Path("/proc/thread-self/children").read_text().split())


def computed(task: str) -> float:
    """Seconds for which a program has computed, or the thread `self/task/ID`. Raises
    `AssertionError` of one that has ended."""
    state, *fields = Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()
    assert state not in "ZX"
    return int(fields[10]) / os.sysconf("SC_CLK_TCK")


class Unstarted:
    """The handle of a worker whose turns a test takes."""

    ident = None

    def is_alive(self) -> bool:
        return False

    def join(self, timeout: float | None = None) -> None:
        """There is no thread to wait for."""


class Time(Threads):
    """The time of an engine, which passes when a test says so. The watchdog looks at the engine
    then; every other worker has a real thread."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._watchdog: Worker | None = None

    def clock(self) -> float:
        return self.now

    def start(self, worker: Worker) -> Handle:
        if worker.name != "asyncinfer-watchdog":
            return super().start(worker)
        self._watchdog = worker
        return Unstarted()

    def go_by(self, seconds: float) -> None:
        """Let time pass, in steps that are short for any `step_timeout` of a second or more."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.1)
            if self._watchdog is not None and self._watchdog.turn() is None:
                self._watchdog = None


class TimedEngine(Engine):
    """An engine in a time of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.time = self._runtime = Time()
        super().__init__(*args, **options)


def places(engine: Engine) -> int:
    """Answers that have a place in an engine, whether anybody waits for them or not."""
    return admission_of(engine).held


def admission_of(engine: Engine) -> Admission:
    """Where an engine registers its requests."""
    return engine._admission


def frontend_of(engine: Engine) -> Frontend:
    """The side of an engine that callers' threads see."""
    return engine._frontend


def core_of(engine: Engine) -> Core:
    """What an open engine has on its decode thread."""
    core = frontend_of(engine).core
    assert core is not None
    return core


def thread_of(engine: Engine) -> DecodeThread:
    """The decode thread of an engine that was opened."""
    thread = engine._thread
    assert thread is not None
    return thread


def is_closed(stream: Stream) -> bool:
    """Whether a stream was closed by its consumer."""
    return stream._closed


def request_of(stream: Stream) -> Request:
    """What an engine knows of a stream that was begun."""
    request = stream._request
    assert request is not None
    return request


def fake_runner(engine: Engine) -> Any:
    """The runner of an engine on a `FakeModel`."""
    return core_of(engine).runner


def oracle(engine: Engine, prompt: str, count: int, **sampling: Any) -> list[int]:
    """The right answer of an engine on a `FakeModel`; greedy unless `sampling` has a seed."""
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    tokens: list[int] = fake_runner(engine).oracle(
        list(prompt.encode()), params, params.seed or 0, count
    )
    return tokens


@dataclass
class Columns:
    """Logprobs of consecutive positions, as parallel lists."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    top: list[tuple[tuple[int, float], ...]]


def columns(rows: RowLogprobs) -> Columns:
    """What is packed in `rows`."""
    entries = list(rows)
    return Columns(
        [entry.token_id for entry in entries],
        [entry.logprob for entry in entries],
        [entry.rank for entry in entries],
        [entry.top for entry in entries],
    )


def lines_run(work: Callable[[], object], path: str) -> int:
    """How many lines `work` runs of the file, or of the files in the folder, at `path`: what it
    costs, without a clock."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace if frame.f_code.co_filename.startswith(path) else None

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
