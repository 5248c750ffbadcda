"""What a token costs the host, as calls of functions: these do not depend on the machine, as times
do, and grow where work comes in for every token."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import asyncinfer
from asyncinfer.bench.host_tokens import measure_tokens
from asyncinfer.testing import FakeModel, InlineEngine

PACKAGE = Path(asyncinfer.__file__).parent
#: Not counted: the fake model, who measures, and what the text of a token takes (one call, or more
#: where its bytes are part of a character).
OTHERS = ("testing", "bench", "text")
#: Tokens of a prompt, so that the answers are in the middle of a block of 16.
PROMPT = 20
STEPS = 4


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts what the engine's code calls, on this thread and on those begun meanwhile: functions
    of its own by name, and those of the interpreter."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event not in ("call", "c_call") or not path.startswith(str(PACKAGE)):
            return
        if Path(path).relative_to(PACKAGE).parts[0] not in OTHERS:
            name = argument.__qualname__ if event == "c_call" else frame.f_code.co_qualname
            calls[f"{event} {name}"] += 1

    assert sys.getprofile() is None
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def decoding(rows: int) -> InlineEngine:
    """An engine whose next steps decode so many rows, and fill no block."""
    engine = InlineEngine(
        FakeModel(blocks=4 * rows, strict=False), max_running=rows, max_step_tokens=64 * rows
    )
    for index in range(rows):
        prompt = [1 + index % 250, 1 + index // 250] * (PROMPT // 2)
        engine.submit(prompt, max_tokens=40, temperature=0.0, ignore_eos=True)
    engine.pump()
    return engine


def per_row(run: Callable[[InlineEngine], None]) -> Counter[str]:
    """What another row adds to the calls of a step."""
    found = []
    for rows in (16, 48):
        engine = decoding(rows)
        run(engine)
        with counted() as calls:
            for _ in range(STEPS):
                run(engine)
        found.append(calls)
    few, many = found
    added = {name: (many[name] - few[name]) / (32 * STEPS) for name in few | many}
    return Counter({name: count for name, count in added.items() if count})


def test_a_row_is_scheduled_and_committed_without_a_function_of_its_own() -> None:
    def step(engine: InlineEngine) -> None:
        runner, scheduler = engine.core.runner, engine.scheduler
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.update(plan, runner.collect(runner.launch(plan)), 0.0)

    # The token is appended to the answer, whose length is compared with its bound.
    assert per_row(step) == {"c_call list.append": 1, "c_call len": 1}


def test_a_token_takes_two_functions_from_its_draw_to_the_loop() -> None:
    added = per_row(lambda engine: engine.core.step())
    functions = {name: count for name, count in added.items() if name.startswith("call ")}
    assert functions == {
        "call OutputStream.advance": 1,
        "call StreamBuffer.put": 1,
    }, added


def test_a_token_takes_six_functions_from_the_loop_to_its_consumer() -> None:
    """Of a stream that is read token by token, as the engine's threads really run."""
    found = []
    for steps in (8, 24):
        with counted() as calls:
            asyncio.run(measure_tokens(32, steps, 4))
        found.append(calls)
    few, many = found
    added = {name: (many[name] - few[name]) / (32 * 16) for name in many}
    # What runs once a step, or when a block is full, counts for little.
    often = {name: round(n) for name, n in added.items() if name.startswith("call ") and n > 0.5}
    assert often == {
        "call OutputStream.advance": 1,
        "call StreamBuffer.put": 1,
        "call AsyncioBridge.wake": 1,
        # It is called, and goes on once it is woken.
        "call Stream.__anext__": 2,
        "call StreamBuffer.take": 1,
        "call Transcript.add": 1,
        "call AsyncioBridge.begin_wait": 1,
    }, added
