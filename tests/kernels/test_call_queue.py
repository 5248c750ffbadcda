"""A queue of recorded calls, which its threads make without Python."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch

from asyncinfer.kernels import onednn
from asyncinfer.kernels.dispatch import CannotRecord
from asyncinfer.kernels.native import Arena, CallQueue, RecordedCalls, Recording, available
from asyncinfer.kernels.native import call_queue as module
from asyncinfer.kernels.native.between import rms_norm

pytestmark = [
    pytest.mark.skipif(not available(), reason="no native code for this processor"),
    pytest.mark.usefixtures("laid_out"),
]

WIDTH = 512
#: More threads than cores lose their core at any place.
THREADS = 2 * (os.cpu_count() or 1) + 1
#: Seconds after which a test fails that waits for native code.
PATIENCE = 60.0


class Layers:
    """Products and norms of `x` `[4, WIDTH]`, recorded."""

    def __init__(self, layers: int = 4, x: torch.Tensor | None = None) -> None:
        numbers = torch.Generator().manual_seed(5)
        weight = torch.randn(WIDTH, WIDTH, generator=numbers) * 0.05
        #: Its memory is what native code reads.
        self.weight = onednn.reorder(weight)
        product = onednn.blocked(self.weight, (WIDTH, WIDTH))
        if product is None:
            pytest.skip("oneDNN has another layout here")
        self._product = product
        self._layers = layers
        self._scale = torch.randn(WIDTH, generator=numbers)
        self.x = torch.randn(4, WIDTH, generator=numbers) if x is None else x
        self.computed()
        recording = Recording(Arena(), THREADS)
        self.found = self.x
        with recording.begun():
            for _ in range(layers):
                self.found = self._layer(self.found)
                recording.end_layer()
        self.calls = recording.made()

    def computed(self) -> torch.Tensor:
        """What the calls compute, by calls of Python's."""
        found = self.x
        for _ in range(self._layers):
            found = self._layer(found)
        return found

    def _layer(self, x: torch.Tensor) -> torch.Tensor:
        found = rms_norm(self._product(x), self._scale, 1e-5)
        assert found is not None
        return found


@pytest.fixture
def queue() -> Iterator[CallQueue]:
    made = CallQueue(4, THREADS, lambda: None)
    yield made
    made.close()


def test_jobs_compute_what_calls_do(queue: CallQueue) -> None:
    """On any number of threads, each with what the one before has computed."""
    jobs = [Layers()]
    while len(jobs) < 4:
        jobs.append(Layers(x=jobs[-1].found))
    for turn in range(30):
        jobs[0].x.copy_(torch.randn(4, WIDTH))
        for job in jobs:
            job.found.fill_(torch.nan)
        for number, job in enumerate(jobs):
            queue.put(job.calls, 1 + (turn + 3 * number) % THREADS, 1, job)
        before = 0.0
        for job in jobs:
            times = queue.finish()
            assert torch.equal(job.found, job.computed())
            assert times.seconds > 0
            assert times.away > -0.01
            assert before < times.ended <= time.perf_counter()
            before = times.ended


def test_they_are_made_while_python_does_not_let_go_of_the_gil(queue: CallQueue) -> None:
    jobs = [Layers() for _ in range(4)]
    # So all threads wait for a job.
    queue.put(jobs[0].calls, THREADS, 1, jobs[0])
    queue.finish()
    expected = [job.computed() for job in jobs]
    for job in jobs:
        job.found.fill_(torch.nan)
    last = ctypes.c_float.from_address(jobs[-1].found[-1, -1:].data_ptr())
    value = expected[-1][-1, -1].item()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        for job in jobs:
            queue.put(job.calls, THREADS, 1, job)
        end = time.perf_counter() + PATIENCE
        while last.value != value and time.perf_counter() < end:
            pass
        made = last.value == value
    finally:
        sys.setswitchinterval(interval)
    assert made
    for job, right in zip(jobs, expected, strict=True):
        queue.finish()
        assert torch.equal(job.found, right)


def test_a_signal_ends_no_wait(queue: CallQueue) -> None:
    job, came = Layers(100), []
    before = signal.signal(signal.SIGUSR1, lambda *_: came.append(1))
    try:
        queue.put(job.calls, THREADS, 1, job)
        main = threading.main_thread().ident
        assert main is not None
        over = threading.Event()

        def disturb() -> None:
            while not over.is_set():
                # Any thread of the process may get the second one.
                signal.pthread_kill(main, signal.SIGUSR1)
                os.kill(os.getpid(), signal.SIGUSR1)

        thread = threading.Thread(target=disturb)
        thread.start()
        try:
            for _ in range(20):
                queue.finish()
                assert torch.equal(job.found, job.computed())
                queue.put(job.calls, THREADS, 1, job)
        finally:
            over.set()
            thread.join()
        queue.finish()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert came


def threads_of(queue: CallQueue, before: set[threading.Thread]) -> list[threading.Thread]:
    found = [each for each in threading.enumerate() if each not in before]
    assert len(found) == 3
    return found


@pytest.mark.parametrize("closes", [True, False])
def test_threads_end_after_their_jobs(closes: bool) -> None:
    """Also those of a queue that is forgotten. Until then they keep what a job needs."""
    before = set(threading.enumerate())
    queue = CallQueue(4, 3, lambda: None)
    threads = threads_of(queue, before)
    jobs = [Layers() for _ in range(4)]
    expected = [job.computed() for job in jobs]
    results = [job.found for job in jobs]
    needed = [weakref.ref(job) for job in jobs]
    for job in jobs:
        queue.put(job.calls, 3, 1, job)
    del job
    jobs.clear()
    if closes:
        queue.close()
        assert not any(each.is_alive() for each in threads)
        # A second time nothing is left to do.
        queue.close()
    del queue
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    for found, right in zip(results, expected, strict=True):
        assert torch.equal(found, right)
    gc.collect()
    assert [each() for each in needed] == [None] * 4


def test_threads_do_not_end_before_whoever_uses_them_at_exit() -> None:
    """A decode thread goes on until its own exit function is called, which may be the last."""
    program = """
    import atexit, threading

    def leave():
        before = threading.active_count()
        queue.close()
        print(before, threading.active_count())

    atexit.register(leave)
    from asyncinfer.kernels.native import CallQueue

    queue = CallQueue(2, 2, lambda: None)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.split() == ["3", "1"], done.stderr


def test_each_thread_begins_with_what_was_asked_for() -> None:
    names: list[int] = []
    queue = CallQueue(1, 3, lambda: names.append(threading.get_native_id()))
    queue.close()
    assert len(set(names)) == 3


def test_a_system_without_semaphores_has_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = module.semaphore_functions()
    without = functions._replace(init=lambda *_: -1)
    monkeypatch.setattr(module, "semaphore_functions", lambda: without)
    before = threading.active_count()
    with pytest.raises(CannotRecord, match="no semaphores"):
        CallQueue(4, 2, lambda: None)
    assert threading.active_count() == before


def test_threads_end_where_there_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def refused(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="can't start"):
        CallQueue(4, 2, lambda: None)
    gc.collect()
    started[0].join(PATIENCE)
    assert not started[0].is_alive()


def test_calls_have_a_task_for_each_run() -> None:
    job = Layers()
    first = job.calls.task(2, 1)
    assert isinstance(job.calls, RecordedCalls)
    assert first.shape == (3,)
    assert first[-1] == 2
