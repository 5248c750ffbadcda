"""Least hit density among the leaves of the prefix tree: the policy that learns."""

from __future__ import annotations

from typing import Final

from asyncinfer.cache.policies.aged import Aged, Kind
from asyncinfer.cache.policies.ghosts import Ghosts
from asyncinfer.cache.policies.leaves import LeavesFirst
from asyncinfer.protocols.eviction import CachedBlock

__all__ = ["PrefixLHD"]

#: Prefixes with more uses than this are one kind, the evergreens.
EVERGREEN: Final = 8
#: Uses beyond this number, and up to `EVERGREEN`, are not told apart.
APART: Final = 4
#: Prefixes remembered, for each cached block.
MEMORY: Final = 4
#: Calls of `ended` between two of `learn`.
LESSON: Final = 256


class PrefixLHD(LeavesFirst):
    """Gives up the leaf whose room earns the fewest hits, by what it has learned.

    A block's kind is how many requests have used its prefix, also before the prefix was last given
    up, and whether the block ends a prompt that no request has continued. For each kind the policy
    learns how soon such blocks are used again. It learns from blocks that it gave up as well: it
    remembers their keys, and a prefix that comes back counts as a hit at its age.

    Ages are ticks of the cache's logical time. A victim costs O(1), whatever the number of
    blocks; learning costs a burst of about 0.2 ms once in a few hundred blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        # Before anything is learned, the least used go first: equals are ranked by their number.
        self._kinds = [Kind(number) for number in range(APART + 3)]
        self._aged = Aged(self._kinds)
        self._leaves = self._aged
        #: Uses before the block was published, of prefixes that came back.
        self._before: dict[int, int] = {}
        self._ghosts = Ghosts[tuple[Kind, int, int]]()
        self._most = 0
        self._ends = 0

    def published(self, block: CachedBlock) -> None:
        super().published(block)
        self._aged.time = block.last_use
        self._most = max(self._most, len(self._blocks))
        ghost = self._ghosts.take(block.key)
        if ghost is not None:
            kind, since, uses = ghost
            self._before[block.block] = uses + 1
            self._ended(kind, block.last_use - since, hit=True)

    def released(self, block: CachedBlock) -> None:
        self._aged.time = block.last_use
        super().released(block)

    def reused(self, block: CachedBlock) -> None:
        self._aged.time = block.last_use
        rank = self._ranks.get(block.block)
        super().reused(block)
        if rank is not None:
            kind, since = rank
            self._ended(kind, block.last_use - since, hit=True)

    def removed(self, block: CachedBlock) -> None:
        kind, since = self._ranks.get(block.block) or self.rank(block)
        super().removed(block)
        uses = block.uses + self._before.pop(block.block, 0)
        self._ghosts.add(block.key, (kind, since, uses))
        for kind, since, _ in self._ghosts.trim(MEMORY * self._most):
            self._ended(kind, self._aged.time - since, hit=False)

    def rank(self, block: CachedBlock) -> tuple[Kind, int]:
        uses = block.uses + self._before.get(block.block, 0)
        if not uses and not block.children:
            kind = self._kinds[0]
        elif uses > EVERGREEN:
            kind = self._kinds[-1]
        else:
            kind = self._kinds[1 + min(uses, APART)]
        return kind, block.last_use

    def _ended(self, kind: Kind, age: int, *, hit: bool) -> None:
        kind.lifetimes.ended(age, hit)
        self._ends += 1
        lesson, rest = divmod(self._ends, LESSON)
        if not rest:
            self._kinds[lesson % len(self._kinds)].lifetimes.learn()
            self._aged.sort()
