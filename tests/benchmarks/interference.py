"""What an engine on a real model and its host cost one another."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import anyio

from asyncinfer import Engine, EngineConfig, SamplingParams
from asyncinfer.bench.quantiles import Quantiles
from asyncinfer.bench.record import BenchError, Figure
from asyncinfer.bench.ticker import ticking
from asyncinfer.testing import RandomModel
from benchmarks.shapes import shape_json

__all__ = ["Interference", "InterferenceOptions", "measure_interference"]

#: Token ids, so many of them, that share no block with any others.
Prompts = Callable[[int], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceOptions:
    """The work."""

    shape: str
    device: str
    #: Decoding while a prompt of so many tokens is computed.
    streams: int = 64
    long_prompt: int = 32_768
    #: Of the stream whose tokens are timed, beside an idle and a busy host.
    tokens: int = 400
    #: A prompt whose first part is cached.
    shared: int = 2048
    own: int = 32
    repeat: int = 5


@dataclass(frozen=True, slots=True)
class Interference:
    """Milliseconds."""

    #: Per token of one stream, from its first to its last, beside a host that does nothing, and one
    #: whose loop is busy with Python half of the time.
    itl_idle: float
    itl_busy: float
    #: How late a task of the event loop runs, beside nothing, and beside the streams and the long
    #: prompt.
    idle_lag: Quantiles
    lag: Quantiles
    #: To the first token, cold, and with the shared part cached.
    ttft_cold: float
    ttft_hit: float

    def figures(self, *, targets: bool) -> tuple[Figure, ...]:
        added = max(0.0, self.lag.p99 - self.idle_lag.p99)
        slower, sooner = self.itl_busy / self.itl_idle, self.ttft_cold / self.ttft_hit
        return (
            Figure("ITL beside a busy host", slower, "x", "lower", 1.2 if targets else None),
            Figure("event-loop lag added, p99", added, "ms", "lower", 5.0 if targets else None),
            Figure("TTFT cold over prefix hit", sooner, "x", "higher", 10.0 if targets else None),
        )


async def measure_interference(options: InterferenceOptions) -> Interference:
    from asyncinfer.models import parse_config

    model = RandomModel(parse_config(shape_json(options.shape)))
    config = EngineConfig(
        device=options.device,
        max_running=options.streams + 2,
        max_context=options.long_prompt + options.tokens + 16,
        drain_timeout=0.0,
    )
    numbers = itertools.count(1)
    vocab = model.config.vocab_size

    def prompt(length: int) -> list[int]:
        first = next(numbers)
        return [(first * 7919 + 31 * place * first) % vocab for place in range(length)]

    async with Engine(model, config=config) as engine:
        await _per_token(engine, prompt(64), 32)
        idle = await _median_of(engine, options, prompt)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_half_busy)
            busy = await _median_of(engine, options, prompt)
            tasks.cancel_scope.cancel()
        cold, hit = await _first_tokens(engine, options, prompt)
        async with ticking() as alone:
            await anyio.sleep(0.2)
        lag = await _lag(engine, options, prompt)
    return Interference(idle, busy, Quantiles.of(alone.late), lag, cold, hit)


async def _median_of(engine: Engine, options: InterferenceOptions, prompt: Prompts) -> float:
    return median(
        [await _per_token(engine, prompt(64), options.tokens) for _ in range(options.repeat)]
    )


async def _per_token(engine: Engine, prompt: list[int], tokens: int) -> float:
    """Milliseconds per token: the mean over the stream, because chunks come together while the loop
    is busy."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    began = ended = 0.0
    first = held = 0
    async with engine.stream(prompt, params=params) as stream:
        async for chunk in stream:
            ended = time.perf_counter()
            held += len(chunk.token_ids)
            if not first:
                first, began = held, ended
    if held == first:
        raise BenchError(f"all of {tokens} tokens came at once")
    return 1e3 * (ended - began) / (held - first)


async def _half_busy() -> None:
    """Python for 5 ms, nothing for 5 ms."""
    while True:
        end = time.perf_counter() + 0.005
        while time.perf_counter() < end:
            sum(range(100))
        await anyio.sleep(0.005)


async def _first_tokens(
    engine: Engine, options: InterferenceOptions, prompt: Prompts
) -> tuple[float, float]:
    cold: list[float] = []
    hit: list[float] = []
    for _ in range(options.repeat):
        shared = prompt(options.shared)
        for found, cached in ((cold, 0), (hit, options.shared)):
            began = time.perf_counter()
            done = await engine.generate(
                [*shared, *prompt(options.own)], max_tokens=1, temperature=0.0, ignore_eos=True
            )
            found.append(1e3 * (time.perf_counter() - began))
            if done.usage.cached_tokens != cached:
                raise BenchError(f"{done.usage.cached_tokens} tokens were cached, not {cached}")
    return median(cold), median(hit)


async def _lag(engine: Engine, options: InterferenceOptions, prompt: Prompts) -> Quantiles:
    began = [anyio.Event() for _ in range(options.streams)]

    async def decode(index: int) -> None:
        """Streams without end."""
        params = SamplingParams(max_tokens=options.tokens, seed=index, ignore_eos=True)
        while True:
            async with engine.stream(prompt(64), params=params) as stream:
                async for _ in stream:
                    began[index].set()

    async with anyio.create_task_group() as tasks:
        for index in range(options.streams):
            tasks.start_soon(decode, index)
        for event in began:
            await event.wait()
        async with ticking() as busy:
            await engine.generate(
                prompt(options.long_prompt), max_tokens=1, temperature=0.0, ignore_eos=True
            )
        tasks.cancel_scope.cancel()
    return Quantiles.of(busy.late)
