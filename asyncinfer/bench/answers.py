"""`answer_together`: several requests to an engine at once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import anyio

from asyncinfer import Completion, Engine
from asyncinfer.bench.record import BenchError

__all__ = ["answer_together"]


async def answer_together(
    engine: Engine, tokens: int, requests: Sequence[Mapping[str, Any]]
) -> tuple[float, list[Completion]]:
    """Seconds until all of these requests, arguments of `Engine.generate`, have their answers, and
    the answers in order. Raises `BenchError` unless each has this many tokens."""
    done: dict[int, Completion] = {}

    async def ask(index: int) -> None:
        options = {"max_tokens": tokens, "ignore_eos": True, **requests[index]}
        done[index] = await engine.generate(**options)

    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for index in range(len(requests)):
            tasks.start_soon(ask, index)
    seconds = time.perf_counter() - began
    drawn = sum(len(each.token_ids) for each in done.values())
    if drawn != len(requests) * tokens:
        raise BenchError(f"{drawn} tokens came for {len(requests)} x {tokens}")
    return seconds, [done[index] for index in range(len(requests))]
