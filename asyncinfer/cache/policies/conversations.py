"""By conversation: what is over goes first."""

from __future__ import annotations

from asyncinfer.cache.policies.ranked import LowestFirst
from asyncinfer.protocols.eviction import CachedBlock

__all__ = ["ByConversation"]

#: What goes first. A beginning that several conversations have shared may be that of the next one.
_OVER, _OTHER, _WAITING = range(3)


class ByConversation(LowestFirst):
    """Gives up what conversations that are over had for themselves; then what is shared, alone or
    waits for its user; and last what goes on as soon as a tool is done. Least recently used first
    in each. O(log n) per block."""

    def rank(self, block: CachedBlock) -> tuple[int, int]:
        return _state(block), block.last_use

    def conversation_changed(self, block: CachedBlock) -> None:
        """Its rank is another one."""
        self.released(block)


def _state(block: CachedBlock) -> int:
    if block.conversation == "waiting":
        return _WAITING
    own = block.conversations == 1
    return _OVER if block.conversation == "over" and own else _OTHER
