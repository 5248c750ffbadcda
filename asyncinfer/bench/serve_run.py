"""One workload through an engine, timed from its consumers' side and counted from the engine's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import anyio

from asyncinfer import Engine, SamplingParams
from asyncinfer.bench.record import BenchError
from asyncinfer.bench.workloads import Workload

__all__ = ["Run", "run_workload"]


@dataclass(frozen=True, slots=True)
class Run:
    """Times as the consumers saw them."""

    #: From the first submission to the last token.
    seconds: float
    #: Milliseconds from submission to the first token, request by request.
    ttft: tuple[float, ...]
    #: Milliseconds between one chunk and the next of a request.
    itl: tuple[float, ...]
    cached_tokens: int


async def run_workload(engine: Engine, work: Workload, prompts: Sequence[list[int]]) -> Run:
    """Submit all requests at once and read every stream to its end.

    Raises `BenchError` if other tokens were computed than the workload says: an answer too short,
    a prompt taken from the cache that should not be, or one that should and was not.
    """
    if work.shared:
        warm = [*prompts[0][: work.shared], prompts[0][0]]
        await engine.generate(warm, max_tokens=1, temperature=0.0, ignore_eos=True)
    before = engine.stats()
    arrivals: list[list[float]] = [[] for _ in prompts]

    async def consume(index: int) -> None:
        output = work.requests[index][1]
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        times = arrivals[index]
        times.append(time.perf_counter())
        held = 0
        async with engine.stream(prompts[index], params=params) as stream:
            async for chunk in stream:
                times.append(time.perf_counter())
                held += len(chunk.token_ids)
        if held != output:
            raise BenchError(f"{work.name}: request {index} gave {held} of {output} tokens")

    async with anyio.create_task_group() as tasks:
        for index in range(len(prompts)):
            tasks.start_soon(consume, index)
    after = engine.stats()
    for name, expected in (
        ("cached_tokens", work.cached_tokens),
        ("generated_tokens", work.output_tokens),
        ("preemptions", 0),
    ):
        counted = getattr(after, name) - getattr(before, name)
        if counted != expected:
            raise BenchError(f"{work.name}: {name} rose by {counted} instead of {expected}")
    began = min(times[0] for times in arrivals)
    return Run(
        seconds=max(times[-1] for times in arrivals) - began,
        ttft=tuple((times[1] - times[0]) * 1e3 for times in arrivals),
        itl=tuple(
            (later - earlier) * 1e3 for times in arrivals for earlier, later in pairwise(times[1:])
        ),
        cached_tokens=after.cached_tokens - before.cached_tokens,
    )
