"""The metadata of cached blocks, which policies always see up to date and cannot write to.

A `CachedBlock` is made as an object that can be written to, and changes its class when it is
complete, which takes a quarter of the time of a frozen dataclass. From then on the descriptors of
its slots write to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

from asyncinfer.protocols.eviction import BlockFields, CachedBlock, ConversationState

__all__ = [
    "make_block",
    "set_children",
    "set_conversation",
    "set_conversations",
    "set_created",
    "set_last_use",
    "set_now",
    "set_parent",
    "set_uses",
]

_slots: Final[Any] = BlockFields

set_children: Final[Callable[[CachedBlock, int], None]] = _slots.children.__set__
set_conversation: Final[Callable[[CachedBlock, ConversationState], None]] = (
    _slots.conversation.__set__
)
set_conversations: Final[Callable[[CachedBlock, int], None]] = _slots.conversations.__set__
set_created: Final[Callable[[CachedBlock, int], None]] = _slots.created.__set__
set_last_use: Final[Callable[[CachedBlock, int], None]] = _slots.last_use.__set__
set_now: Final[Callable[[CachedBlock, float], None]] = _slots.now.__set__
set_parent: Final[Callable[[CachedBlock, int | None], None]] = _slots.parent.__set__
set_uses: Final[Callable[[CachedBlock, int], None]] = _slots.uses.__set__


def make_block(
    block: int, parent: int | None, depth: int, tokens: int, scope: str, key: bytes
) -> CachedBlock:
    """The metadata of a block that is published for the first time."""
    made: Any = BlockFields(block, parent, depth, tokens, scope, key)
    made.__class__ = CachedBlock
    return cast(CachedBlock, made)
