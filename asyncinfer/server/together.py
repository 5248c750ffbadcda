"""`together`: several requests of one call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

from asyncinfer.errors import renaming

__all__ = ["at_place", "together"]

T = TypeVar("T")


async def at_place(field: str, index: int | None, call: Callable[[], Awaitable[T]]) -> T:
    """The call's result. An error of `field` names the entry `index` of it, unless that is None."""
    with renaming(field, field if index is None else f"{field}[{index}]"):
        return await call()


async def together(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """The results of the calls, in order. The first error cancels the others and is raised."""
    if len(calls) == 1:
        return [await calls[0]()]
    found: dict[int, T] = {}
    failed: list[Exception] = []

    async def run(index: int, call: Callable[[], Awaitable[T]]) -> None:
        try:
            found[index] = await call()
        except Exception as error:
            failed.append(error)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for index, call in enumerate(calls):
            tasks.start_soon(run, index, call)
    if failed:
        try:
            raise failed[0]
        finally:
            # Its traceback refers to the frames that have this list.
            failed.clear()
    return [found[index] for index in range(len(calls))]
