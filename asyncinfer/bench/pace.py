"""`asyncinfer bench pace`: how evenly streams go on while a long prompt is computed beside them."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Final

import anyio

from asyncinfer import Engine
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.median import median
from asyncinfer.bench.quantiles import Quantiles
from asyncinfer.bench.record import BenchError, Figure
from asyncinfer.bench.workloads import RANDOM, model_source

__all__ = ["PaceFigures", "PaceOptions", "PaceResult", "measure_pace"]

#: Tokens of the streams' prompts, and the most of a warm-up's prompt.
_PROMPT: Final = 8
_WARM_UP: Final = 512
#: Seconds within which streams must have begun.
_BEGIN: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceOptions:
    """Options of the benchmark."""

    #: `SHIPPED`, `RANDOM`, a checkpoint's folder or a hub id.
    model: str = RANDOM
    streams: int = 8
    prompt_tokens: int = 8000
    #: Seconds: see `EngineConfig.step_target`.
    step_target: float = 0.1
    #: The dtype of weights, activations and KV.
    dtype: str = "float32"
    repeat: int = 3
    #: A smoke run on a smaller model, whose figures mean nothing.
    quick: bool = False
    loop: str = "asyncio"


@dataclass(frozen=True, slots=True)
class PaceFigures:
    """The times of one prompt beside streams."""

    #: Seconds to the prompt's first token: by itself, the mean of one before the streams and one
    #: after them, since a machine's speed drifts; and beside the streams.
    alone: float
    beside: float
    #: Milliseconds between the tokens of each stream while the prompt was computed.
    gaps: Quantiles

    @property
    def slower(self) -> float:
        """How many times as long the prompt took beside the streams."""
        return self.beside / self.alone


@dataclass(frozen=True, slots=True)
class PaceResult:
    """The median repetitions: with the target by p99, and without one likewise."""

    step_target: float
    paced: PaceFigures
    unpaced: PaceFigures

    def figures(self) -> tuple[Figure, ...]:
        paced, unpaced, most = self.paced, self.unpaced, 2e3 * self.step_target
        return (
            Figure("between tokens p50", paced.gaps.p50, "ms", "lower"),
            Figure("between tokens p99", paced.gaps.p99, "ms", "lower", most),
            Figure("prompt alone", paced.alone, "s", "lower"),
            Figure("prompt beside streams, over alone", paced.slower, "x", "lower", 1.25),
            Figure("between tokens p99, no target", unpaced.gaps.p99, "ms", "lower"),
            Figure("prompt over alone, no target", unpaced.slower, "x", "lower"),
        )


def measure_pace(
    options: PaceOptions, report: Callable[[str], None] = lambda _: None
) -> PaceResult:
    """Run all measurements; `report` is called with the current one."""
    with tempfile.TemporaryDirectory(prefix="asyncinfer-bench-") as scratch:
        about = {
            "max_position_embeddings": options.prompt_tokens + 1024,
            "dtype": options.dtype,
        }
        source = model_source(options.model, Path(scratch), quick=options.quick, **about)
        return run_on(options.loop, _measure, source, options, report)


async def _measure(
    model: Path | str, options: PaceOptions, report: Callable[[str], None]
) -> PaceResult:
    targets = (options.step_target, inf)
    found: dict[float, list[PaceFigures]] = {target: [] for target in targets}
    for repetition in range(options.repeat):
        for target in targets:
            report(f"a target of {target:g} s ({repetition + 1} of {options.repeat})")
            # One engine at a time: even idle threads of a second engine would make those of the
            # first one sleep after each operator.
            async with Engine(
                model,
                device="cpu",
                dtype=options.dtype,
                step_target=target,
                max_running=options.streams + 1,
                drain_timeout=0.0,
            ) as engine:
                work = _Work(engine, options, repetition)
                await work.warm_up(min(options.prompt_tokens, _WARM_UP))
                found[target].append(await work.run(options.prompt_tokens))
    paced, unpaced = (median(found[target], lambda pace: pace.gaps.p99) for target in targets)
    return PaceResult(options.step_target, paced, unpaced)


class _Work:
    """A prompt alone, streams, a prompt of the same length beside them, and one alone again."""

    def __init__(self, engine: Engine, options: PaceOptions, repetition: int) -> None:
        self._engine = engine
        self._random = random.Random(f"pace {repetition}")
        self._vocab = engine.model.vocab_size
        self._missing = options.streams
        self._all_began = anyio.Event()
        #: When each stream got its chunks.
        self._times: list[list[float]] = [[] for _ in range(options.streams)]

    async def warm_up(self, prompt_tokens: int) -> None:
        """Compute a short prompt and a few tokens."""
        prompt = self._tokens(prompt_tokens)
        await self._engine.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)

    async def run(self, prompt_tokens: int) -> PaceFigures:
        before = await self._prompt(prompt_tokens)
        async with anyio.create_task_group() as tasks:
            for times in self._times:
                tasks.start_soon(self._stream, times)
            with anyio.fail_after(_BEGIN):
                await self._all_began.wait()
            began = time.monotonic()
            beside = await self._prompt(prompt_tokens)
            ended = time.monotonic()
            tasks.cancel_scope.cancel()
        after = await self._prompt(prompt_tokens)
        gaps = [
            1e3 * (later - earlier)
            for times in self._times
            for earlier, later in pairwise(times)
            if later > began and earlier < ended
        ]
        if not gaps:
            raise BenchError("no stream got two tokens while the prompt was computed")
        return PaceFigures((before + after) / 2, beside, Quantiles.of(gaps))

    async def _prompt(self, prompt_tokens: int) -> float:
        """Seconds to the first token of a prompt of which nothing is cached."""
        began = time.monotonic()
        await self._engine.generate(self._tokens(prompt_tokens), max_tokens=1, temperature=0.0)
        return time.monotonic() - began

    async def _stream(self, times: list[float]) -> None:
        """Read streams without end; when one reaches the end of its context, another follows."""
        while True:
            tokens = self._tokens(_PROMPT)
            async with self._engine.stream(tokens, temperature=0.0, ignore_eos=True) as stream:
                async for _ in stream:
                    times.append(time.monotonic())
                    if len(times) == 2:
                        self._missing -= 1
                        if not self._missing:
                            self._all_began.set()

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(1, self._vocab), k=count)
