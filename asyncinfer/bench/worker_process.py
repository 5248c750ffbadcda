"""`WorkerProcess`: another process for work that must not share the engine's threads.

Two threads that each have OpenMP workers are more threads than cores. The workers of both then
sleep between two operators instead of spinning, which costs a small model half of its speed.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio.to_thread

from asyncinfer.bench.peer import TransformersPeer
from asyncinfer.bench.products import product_seconds
from asyncinfer.bench.workloads import Workload

__all__ = ["WorkerProcess"]

T = TypeVar("T")

_peers: dict[Path, TransformersPeer] = {}


class WorkerProcess:
    """Makes calls in one other process, in order. Errors are raised here as they were there."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    @classmethod
    @contextmanager
    def open(cls) -> Iterator[WorkerProcess]:
        """The process starts with the first call."""
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            yield cls(pool)

    async def peer_seconds(
        self, folder: Path, work: Workload, prompts: Sequence[Sequence[int]]
    ) -> float:
        """Seconds that transformers takes; the model is loaded once."""
        return await self._call(partial(_run_peer, folder, work, prompts))

    async def product_seconds(self, folder: Path, rows: Sequence[int]) -> dict[int, float]:
        """See `product_seconds`."""
        return await self._call(partial(product_seconds, folder, rows))

    async def _call(self, function: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(self._pool.submit(function).result)


def _run_peer(folder: Path, work: Workload, prompts: Sequence[Sequence[int]]) -> float:
    if folder not in _peers:
        _peers[folder] = TransformersPeer(folder)
    return _peers[folder].run(work, prompts)
