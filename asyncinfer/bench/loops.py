"""The event loops a benchmark can run on."""

from __future__ import annotations

import importlib.util
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import anyio

from asyncinfer.bench.record import BenchError
from asyncinfer.errors import AsyncInferError

__all__ = ["LOOPS", "available_loops", "run_on"]

T = TypeVar("T")

LOOPS: Final = ("asyncio", "uvloop", "trio")


def available_loops() -> tuple[str, ...]:
    """The loops of `LOOPS` that are installed."""
    return tuple(name for name in LOOPS if importlib.util.find_spec(name) is not None)


def run_on(loop: str, function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Run an async function on a new event loop of that kind. An error of this package that ends
    it is raised as it is, not in the groups it came through."""
    if loop not in available_loops():
        raise BenchError(f"the event loop {loop!r} is not installed: pip install {loop}")
    backend = "trio" if loop == "trio" else "asyncio"
    options = {} if loop == "trio" else {"use_uvloop": loop == "uvloop"}
    try:
        return anyio.run(function, *args, backend=backend, backend_options=options)
    except BaseExceptionGroup as group:
        ours: BaseException | None = group.subgroup(AsyncInferError)
        while isinstance(ours, BaseExceptionGroup):
            ours = ours.exceptions[0]
        if ours is None:
            raise
        raise ours from group
