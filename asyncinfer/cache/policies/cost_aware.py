"""GreedyDual-Size-Frequency, with the time to recompute for the cost."""

from __future__ import annotations

from asyncinfer.cache.policies.leaves import LeavesFirst
from asyncinfer.protocols.eviction import CachedBlock

__all__ = ["CostAware"]


class CostAware(LeavesFirst):
    """Keeps blocks that are dear to compute and often reused (Cherkasova, "Improving WWW proxies
    performance with Greedy-Dual-Size-Frequency caching", HP Labs 1998): the leaf of the lowest
    `clock + requests * cost` goes, and the clock is the rank of the last victim, so that blocks
    that are not used any more fall behind.

    A block at depth `d` costs its tokens through the layers, and attention over all before them:
    `cost = 1 + d * tokens / balance`.

    Args:
        balance: tokens of context at which a token's attention costs as much as everything else
            of it. For a dense transformer of width `w`, about `6 * w`.

    Raises:
        ValueError: `balance` is not above 0.
    """

    def __init__(self, balance: float = 24_576.0) -> None:
        if not balance > 0:
            raise ValueError(f"balance: {balance!r}; must be above 0")
        super().__init__()
        self._balance = balance
        self._clock = 0.0

    def rank(self, block: CachedBlock) -> float:
        cost = 1 + block.depth * block.tokens / self._balance
        return self._clock + (block.uses + 1) * cost

    def removed(self, block: CachedBlock) -> None:
        self._clock = max(self._clock, self._ranks.get(block.block, 0.0))
        super().removed(block)
