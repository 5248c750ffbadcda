"""The most hits that any policy could have had, knowing the future."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from asyncinfer.bench.cache_trace import TraceRow

__all__ = ["optimal_hits"]


def optimal_hits(rows: Sequence[TraceRow], blocks: int) -> int:
    """Hits of Belady's policy ("A study of replacement algorithms for a virtual-storage
    computer", IBM Systems Journal 1966) that may also decline to keep a block: what is used last
    goes first, be it new or not.

    A prefix is used whenever what follows it is, so the next use of a block never comes before
    its parent's. Ends go before beginnings where both come at once, and a hit is therefore never
    behind a gap: this is the optimum for prefixes too. It is a bound: room for the request being
    served is not counted.
    """
    following = _next_uses(rows)
    #: Latest next use first, then the deepest block.
    heap: list[tuple[int, int, int]] = []
    cached: dict[int, int] = {}
    hits = 0
    for row, nexts in zip(rows, following, strict=True):
        for depth, (block, use) in enumerate(zip(row.ids, nexts, strict=True)):
            hits += cached.pop(block, None) is not None
            if use < len(rows):
                cached[block] = use
                heappush(heap, (-use, -depth, block))
        while len(cached) > blocks:
            use, _, block = heappop(heap)
            if cached.get(block) == -use:
                del cached[block]
    return hits


def _next_uses(rows: Sequence[TraceRow]) -> list[list[int]]:
    """For every block of every row, the row that uses it next; `len(rows)` if none does."""
    latest: dict[int, int] = {}
    found = []
    for index in reversed(range(len(rows))):
        ids = rows[index].ids
        found.append([latest.get(block, len(rows)) for block in ids])
        latest.update(dict.fromkeys(ids, index))
    return found[::-1]
