"""Time is monotonic time: a wall clock that is set anew moves no deadline."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import anyio
import pytest

import asyncinfer
from asyncinfer import DeadlineExceeded, Engine
from asyncinfer.testing import FakeModel

ROOT = Path(asyncinfer.__file__).parent
#: The wall clock, as data to be shown: a chat template's date, when a record was made, and when an
#: answer over HTTP or by LiteLLM was.
SHOWN = {
    *("text/sandbox.py", "bench/record.py", "cli/simulate.py", "integrations/litellm.py"),
    *("server/usage.py", "server/response_answer.py", "server/models.py"),
    # The times of files are the wall clock's.
    *("weights/hub.py", "weights/weight_cache.py"),
}
WALL = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime"}


# fault 52
@pytest.mark.anyio
@pytest.mark.parametrize("jump", [-1e6, 1e6])
async def test_a_wall_clock_that_jumps(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    model = FakeModel(max_context=60_000, blocks=4096, strict=False)
    async with Engine(model, stall_timeout=60.0, drain_timeout=0.0) as engine:
        async with engine.stream("x", max_tokens=50_000, deadline=60.0, ignore_eos=True) as stream:
            await anext(stream)
            wall = time.time
            monkeypatch.setattr(time, "time", lambda: wall() + jump)
            # More than a stream holds: some of them were made after the jump.
            for _ in range(2 * engine.config.buffer):
                await anext(stream)
        with anyio.fail_after(120), pytest.raises(DeadlineExceeded):
            await engine.generate("y", max_tokens=50_000, deadline=0.05, ignore_eos=True)


# fault 52
def test_nothing_asks_the_wall_clock() -> None:
    asks = [
        f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).as_posix() not in SHOWN
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr in WALL
        and isinstance(node.value, ast.Name)
        and node.value.id in ("time", "datetime", "date")
    ]
    assert not asks
