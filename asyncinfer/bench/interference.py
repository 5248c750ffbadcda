"""Programs and threads that keep cores busy, to measure an engine beside them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import anyio

from asyncinfer.machine import allowed_cores, busy_seconds

__all__ = ["busy_programs", "half_busy_program", "half_busy_thread", "until_quiet"]

#: Seconds between looks whether the machine is idle, the most looks, and the cores that may be
#: busy.
_REST: Final = 0.25
_RESTS: Final = 12
_AT_REST: Final = 0.2

#: Computes until it is killed, or the program that started it has ended.
_BUSY: Final = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """Run `count` programs inside the block, each a loop in Python that wants a core for itself."""
    with ExitStack() as stack:
        for _ in range(count):
            program = stack.enter_context(subprocess.Popen([sys.executable, "-c", _BUSY]))
            stack.callback(program.kill)
        yield


#: Seconds for which what is half busy computes, and sleeps.
_HALF: Final = 0.005

#: Computes half of the time until it is killed, or the program that started it has ended.
_HALF_BUSY: Final = f"""
import os, time
parent = os.getppid()
while os.getppid() == parent:
    end = time.perf_counter() + {_HALF}
    while time.perf_counter() < end:
        pass
    time.sleep({_HALF})
"""


@contextmanager
def half_busy_program() -> Iterator[None]:
    """Run a program inside the block that wants a core half of the time."""
    with subprocess.Popen([sys.executable, "-c", _HALF_BUSY]) as program:
        try:
            yield
        finally:
            program.kill()


@contextmanager
def half_busy_thread() -> Iterator[None]:
    """Run a thread of this process inside the block that wants the GIL half of the time."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(_HALF):
            end = time.perf_counter() + _HALF
            while time.perf_counter() < end:
                pass

    thread = threading.Thread(target=run, name="half busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


async def until_quiet(busy_cores: int = 0) -> None:
    """Wait up to three seconds until at most `busy_cores` are busy, where the system tells. An
    engine's threads may go on after its turn: vLLM's poll for work for a second."""
    most = (busy_cores + _AT_REST) * _REST
    before = busy_seconds(allowed_cores())
    for _ in range(_RESTS):
        await anyio.sleep(_REST)
        busy = busy_seconds(allowed_cores())
        if busy is None or before is None or busy - before <= most:
            break
        before = busy
