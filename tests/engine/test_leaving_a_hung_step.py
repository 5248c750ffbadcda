"""A process ends although a step of its engine never does."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
import asyncio, threading, warnings
warnings.simplefilter("ignore", ResourceWarning)
from asyncinfer import Engine
from asyncinfer.testing import FakeModel

hung = threading.Event()

def gate(phase, plan):
    hung.set()
    threading.Event().wait()

async def main():
    global engine, stream
    engine = await Engine.open(FakeModel(gate=gate))
    stream = engine.stream("x", max_tokens=10)
    await stream.__aenter__()
    while not hung.is_set():
        await asyncio.sleep(0.001)
    print("leaving", flush=True)
    {leave}

asyncio.run(main())
"""


# fault 17
@pytest.mark.parametrize("leave", ["return", "raise SystemExit(0)"])
def test_the_exit_is_not_held_up(leave: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM.format(leave=leave))],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "leaving\n"), done.stderr
