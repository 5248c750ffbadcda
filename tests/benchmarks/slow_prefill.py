"""How late an await ends when its time comes in the middle of a prefill of many seconds.

python -m benchmarks.slow_prefill [SHAPE [TOKENS [SECONDS]]]

The whole prompt is one step of a real model on a CPU, so that no step ends before the wait does.
An event loop is late, too, where the machine is busy: what is promised is 50 ms beyond that.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio

from asyncinfer import AsyncInferError, Engine, EngineConfig, EngineDead
from asyncinfer.bench.checkpoint import write_checkpoint
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.ticker import ticking
from benchmarks.shapes import shape_json

__all__ = ["CASES", "Late", "measure_slow_prefill"]

#: What ends a wait.
CASES: Final = ("deadline", "cancellation", "close", "death")
ALLOWED_MS: Final = 50.0
#: A prefill of ten seconds or so on two cores.
DEFAULTS: Final = ("qwen3-0.6b", "4096", "3.0")


class Late(NamedTuple):
    """Milliseconds."""

    case: str
    #: The error that ended the wait; "answer" where the prefill was over first.
    ended_by: str
    #: From the moment that the wait was to end at until it ended.
    wait: float
    #: The latest tick of the event loop meanwhile.
    loop: float
    #: From the beginning of the wait until the engine was closed, which waits for the step.
    whole: float


def measure_slow_prefill(config: dict[str, Any], tokens: int, after: float) -> list[Late]:
    """The lateness of a `generate()` of `tokens` that is to end in `after` seconds, by case."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint({**config, "max_position_embeddings": tokens + 8}, folder)
        found = [
            run_on("asyncio", partial(_measure, case, folder, tokens, after)) for case in CASES
        ]
        _await_steps()
    return found


async def _measure(case: str, folder: Path, tokens: int, after: float) -> Late:
    prompt = [1 + index % 97 for index in range(tokens)]
    config = EngineConfig(
        max_step_tokens=tokens,
        step_target=1e9,
        drain_timeout=0.0,
        step_timeout=after if case == "death" else 300.0,
    )
    engine = await Engine.open(str(folder), config=config)
    ended_by, ended = "", 0.0
    over = anyio.Event()

    async def ask() -> None:
        nonlocal ended_by, ended
        ended_by = "cancellation"
        try:
            deadline = after if case == "deadline" else None
            await engine.generate(prompt, max_tokens=1, deadline=deadline)
            ended_by = "answer"
        except AsyncInferError as error:
            ended_by = type(error).__name__
        finally:
            ended = time.perf_counter()
            over.set()

    async with (
        ticking() as ticker,
        anyio.create_task_group() as tasks,
        anyio.create_task_group() as asking,
    ):
        began = time.perf_counter()
        due = began + after
        asking.start_soon(ask)
        if case in ("cancellation", "close"):
            await anyio.sleep(after)
            due = time.perf_counter()
        if case == "cancellation":
            asking.cancel_scope.cancel()
        elif case == "close":
            tasks.start_soon(_close, engine)
        with anyio.CancelScope(shield=True):
            await over.wait()
        loop = max(ticker.late, default=0.0)
    await _close(engine)
    whole = time.perf_counter() - began
    return Late(case, ended_by, (ended - due) * 1e3, loop, whole * 1e3)


def _await_steps() -> None:
    """A dead engine's step goes on, and the interpreter cannot end in the middle of it."""
    for thread in threading.enumerate():
        if thread.name == "asyncinfer-decode":
            thread.join()


async def _close(engine: Engine) -> None:
    with suppress(EngineDead):
        await engine.aclose()


def main() -> None:
    shape, tokens, after = (*sys.argv[1:], *DEFAULTS[len(sys.argv) - 1 :])
    found = measure_slow_prefill(shape_json(shape), int(tokens), float(after))
    print(f"{'ended by':18} {'wait, ms':>9} {'loop, ms':>9} {'whole, ms':>10}")
    for each in found:
        print(
            f"{each.ended_by:18} {each.wait:9.1f} {each.loop:9.1f} {each.whole:10.0f}", flush=True
        )
    sys.exit(any(each.wait - each.loop > ALLOWED_MS for each in found))


if __name__ == "__main__":
    main()
