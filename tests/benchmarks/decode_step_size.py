"""How much code a decode step with its delivery runs on a CPU:
`PYTHONPATH=tests python -m benchmarks.decode_step_size` lists it by file.

One stream of the shipped model is read as it comes. Counted are the lines of the package that run
in a turn of the decode thread, and in the event loop from one chunk to the next. A line counts if
a quarter of the turns or of the chunks run it. Rarer work, such as a new block or a look after the
event loops, does not: how often it comes depends on when the counting begins.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from asyncinfer import Engine
from asyncinfer.engine.thread import DecodeThread
from benchmarks.count_lines import PACKAGE

__all__ = ["StepSize", "measure"]

#: Chunks that are read before, since the first steps make what later ones use again, such as the
#: texts of tokens: after eight chunks every fourth token is still a new one.
WARMUP: Final = 64
STEPS: Final = 24

Lines = frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class StepSize:
    """Files of the package, by their path in it, and how many of their lines run: each counts once,
    however often it does."""

    files: Counter[str]

    @property
    def lines(self) -> int:
        return self.files.total()

    def __str__(self) -> str:
        return f"decode step with delivery on a CPU: {len(self.files)} files, {self.lines} lines"


class _Tracer:
    """Notes the lines of the package that run on the thread that traces by it."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(str(PACKAGE)):
            return None
        if event == "line":
            self.lines.add((file, frame.f_lineno))
        return self


def measure() -> StepSize:
    """Count the step's lines. Nobody else may trace meanwhile, as a debugger does."""
    assert sys.gettrace() is None
    turns: Counter[Lines] = Counter()
    chunks: Counter[Lines] = Counter()
    asyncio.run(_run(turns, chunks))
    lines = _usual(turns) | _usual(chunks)
    return StepSize(Counter(str(Path(file).relative_to(PACKAGE)) for file, _ in lines))


def _usual(runs: Counter[Lines]) -> Lines:
    """The lines that a quarter of the runs have."""
    each: Counter[tuple[str, int]] = Counter()
    for lines, times in runs.items():
        each.update(dict.fromkeys(lines, times))
    return frozenset(line for line, times in each.items() if 4 * times >= runs.total())


async def _run(turns: Counter[Lines], chunks: Counter[Lines]) -> None:
    counting = False
    turn = DecodeThread.turn

    def traced(self: DecodeThread) -> float | None:
        if not counting:
            return turn(self)
        tracer = _Tracer()
        sys.settrace(tracer)
        try:
            return turn(self)
        finally:
            sys.settrace(None)
            turns[frozenset(tracer.lines)] += 1

    DecodeThread.turn = traced  # type: ignore[method-assign]
    try:
        async with (
            # With more, some steps look at what other programs compute, five times a second.
            Engine(device="cpu", cpu_threads=1) as engine,
            engine.stream("def add(a, b):", max_tokens=400, ignore_eos=True) as stream,
        ):
            for _ in range(WARMUP):
                await anext(stream)
            counting = True
            for _ in range(STEPS):
                tracer = _Tracer()
                sys.settrace(tracer)
                try:
                    await anext(stream)
                finally:
                    sys.settrace(None)
                    chunks[frozenset(tracer.lines)] += 1
            counting = False
    finally:
        DecodeThread.turn = turn  # type: ignore[method-assign]


def main() -> None:
    size = measure()
    for path, lines in sorted(size.files.items()):
        print(f"{lines:5}  {path}")
    print(size)


if __name__ == "__main__":
    main()
