"""By conversation: what is over goes first."""

from __future__ import annotations

from asyncinfer.cache.policies.ranked import LowestFirst
from asyncinfer.protocols.eviction import CachedBlock

__all__ = ["ByConversation"]

#: In order of eviction. A block that several conversations share stays in the middle when one of
#: them ends, since the next conversation may begin with it, too.
_OVER, _OTHER, _WAITING = range(3)


class ByConversation(LowestFirst):
    """Evicts first the blocks that only ended conversations used, last those of conversations that
    wait for a tool, and all other blocks between. Of each kind the least recently used goes first.
    O(log n) per block."""

    def rank(self, block: CachedBlock) -> tuple[int, int]:
        return _state(block), block.last_use

    def conversation_changed(self, block: CachedBlock) -> None:
        """Rank the block again."""
        self.released(block)


def _state(block: CachedBlock) -> int:
    if block.conversation == "waiting":
        return _WAITING
    own = block.conversations == 1
    return _OVER if block.conversation == "over" and own else _OTHER
