"""Requests answered alone, batched and preempted: a seed gives the same tokens each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio

from asyncinfer import Engine


async def answers(engine: Engine, requests: Sequence[dict[str, Any]]) -> list[list[int]]:
    """All at once."""
    got: dict[int, list[int]] = {}

    async def one(i: int) -> None:
        options = {"max_tokens": 40, "ignore_eos": True, **requests[i]}
        got[i] = list((await engine.generate(**options)).token_ids)

    async with anyio.create_task_group() as group:
        for i in range(len(requests)):
            group.start_soon(one, i)
    return [got[i] for i in range(len(requests))]


async def check_preempted(
    open_tiny: Any, requests: Sequence[dict[str, Any]], alone: list[list[int]]
) -> None:
    """The answers are those of each request alone, where not all find room together."""
    # 12 blocks of 16 tokens: four or five requests of 50 to 75 tokens do not fit together.
    for overlap in (1, 2):
        async with open_tiny(
            kv_bytes=12 * 16 * 2 * 16 * 4, prefix_cache=False, overlap=overlap
        ) as engine:
            assert await answers(engine, requests) == alone
            assert engine.stats().preemptions > 0
