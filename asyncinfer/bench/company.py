"""`asyncinfer bench company`: the tokens a second that streams keep beside other work."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio

from asyncinfer import Engine
from asyncinfer.bench.interference import half_busy_program, half_busy_thread, until_quiet
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.record import BenchError, Figure
from asyncinfer.bench.workloads import RANDOM, model_source

__all__ = ["CompanyOptions", "CompanyRates", "CompanyResult", "measure_company"]

#: Tokens of each stream's prompt.
_PROMPT: Final = 32
#: The share of its tokens a second that an engine has to keep beside a thread.
_KEPT: Final = 0.75

#: Who computes beside the engine.
_COMPANY: Final[dict[str, Callable[[], AbstractContextManager[None]]]] = {
    "alone": nullcontext,
    "thread": half_busy_thread,
    "program": half_busy_program,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompanyOptions:
    """Options of the benchmark."""

    #: `SHIPPED`, `RANDOM`, a checkpoint's folder or a hub id.
    model: str = RANDOM
    #: Streams at once, one measurement each.
    streams: tuple[int, ...] = (1, 8)
    #: Of each stream's answer.
    tokens: int = 128
    #: The dtype of weights, activations and KV.
    dtype: str = "float32"
    repeat: int = 5
    #: A smoke run on a smaller model, whose figures mean nothing.
    quick: bool = False
    loop: str = "asyncio"


@dataclass(frozen=True, slots=True)
class CompanyRates:
    """Tokens a second of so many streams, all together; one number for each repetition."""

    streams: int
    alone: tuple[float, ...]
    #: Beside a thread of the program that holds the GIL half of the time.
    thread: tuple[float, ...]
    #: Beside a program that computes half of the time.
    program: tuple[float, ...]

    def kept(self, rates: tuple[float, ...]) -> float:
        """The median over all repetitions of a rate over that without company: a repetition takes
        less time than the machine's speed needs to drift."""
        shares = [rate / alone for rate, alone in zip(rates, self.alone, strict=True)]
        return statistics.median(shares)


@dataclass(frozen=True, slots=True)
class CompanyResult:
    """The rates of each number of streams."""

    rates: tuple[CompanyRates, ...]

    def figures(self) -> tuple[Figure, ...]:
        found = []
        for each in self.rates:
            who = f"{each.streams} stream{'s' if each.streams > 1 else ''}"
            alone = statistics.median(each.alone)
            thread, program = each.kept(each.thread), each.kept(each.program)
            found += [
                Figure(f"{who}, alone", alone, "tok/s", "higher"),
                Figure(f"{who}, beside a thread, of alone", thread, "x", "higher", _KEPT),
                Figure(f"{who}, beside a program, of alone", program, "x", "higher"),
            ]
        return tuple(found)


def measure_company(
    options: CompanyOptions, report: Callable[[str], None] = lambda _: None
) -> CompanyResult:
    """Run all measurements; `report` is called with the current one."""
    with tempfile.TemporaryDirectory(prefix="asyncinfer-bench-") as scratch:
        source = model_source(
            options.model, Path(scratch), quick=options.quick, dtype=options.dtype
        )
        return run_on(options.loop, _measure, source, options, report)


async def _measure(
    model: Path | str, options: CompanyOptions, report: Callable[[str], None]
) -> CompanyResult:
    numbers = random.Random("company")
    found: dict[tuple[int, str], list[float]] = {}
    async with Engine(
        model, device="cpu", dtype=options.dtype, max_running=max(options.streams)
    ) as engine:
        for streams in options.streams:
            report(f"streams {streams}, warm-up")
            await _rate(engine, streams, options.tokens, numbers)
        for repetition in range(options.repeat):
            for streams in options.streams:
                for name, company in _COMPANY.items():
                    report(f"streams {streams}, {name} ({repetition + 1} of {options.repeat})")
                    if not options.quick:
                        # The engine has all of its threads again, and nobody else computes.
                        await until_quiet()
                    with company():
                        rate = await _rate(engine, streams, options.tokens, numbers)
                    found.setdefault((streams, name), []).append(rate)
    rates = (
        CompanyRates(streams, *(tuple(found[streams, name]) for name in _COMPANY))
        for streams in options.streams
    )
    return CompanyResult(tuple(rates))


async def _rate(engine: Engine, streams: int, tokens: int, numbers: random.Random) -> float:
    """Tokens a second of new prompts, of which nothing is cached."""
    vocab, received = engine.model.vocab_size, [0] * streams

    async def read(stream_number: int) -> None:
        prompt = numbers.choices(range(1, vocab), k=_PROMPT)
        async with engine.stream(
            prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True
        ) as stream:
            async for chunk in stream:
                received[stream_number] += len(chunk.token_ids)

    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for number in range(streams):
            tasks.start_soon(read, number)
    seconds = time.perf_counter() - began
    if received != [tokens] * streams:
        raise BenchError(f"streams received {received} tokens, and each asked for {tokens}")
    return streams * tokens / seconds
