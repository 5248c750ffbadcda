"""What a prefix-cache eviction policy implements.

The engine owns references, the free list and the set of evictable blocks; a policy sees metadata
and ranks victims. Whatever it answers is checked, so a bad policy can cost hits, never
correctness: a policy that raises, takes too long, or names a block it may not, is reported once and
replaced by LRU.

Thread: the engine's decode thread only. Time: the `now` of the block, never a clock of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass
from typing import Literal, Protocol, runtime_checkable

__all__ = [
    "EVICTION_PROTOCOL_VERSION",
    "CachedBlock",
    "CapacityAware",
    "ConversationAware",
    "ConversationState",
    "EvictionPolicy",
]

EVICTION_PROTOCOL_VERSION = 1

#: The state of a conversation: it has an answer or waits for its user; it has called a tool and
#: waits for the result; or it has ended.
ConversationState = Literal["live", "waiting", "over"]


# Compared by identity, since the fields change.
@dataclass(slots=True, eq=False)
class BlockFields:
    """The fields of a `CachedBlock`, which the engine keeps current."""

    block: int
    #: The block before this one in its prefix, None at the root. It may have been evicted already.
    parent: int | None
    #: Blocks before this one in its prefix, 0 at the root.
    depth: int
    #: Tokens to compute again if the block is evicted: those of this block.
    tokens: int
    #: The `cache_scope` of its request ("" is the shared one).
    scope: str
    #: Names the prefix that ends with this block, whatever block holds it: equal in one engine
    #: for equal tokens, scope and adapter. A block number is given to another prefix once its
    #: block was removed; a key is how a policy knows a prefix that comes back. Opaque: a keyed
    #: hash, so it tells nothing of the tokens, and the next engine has other keys.
    key: bytes
    #: Published blocks whose parent is this one.
    children: int = 0
    #: Requests that reused it.
    uses: int = 0
    #: Logical time of publication and of the last use. It grows with every cache operation.
    created: int = 0
    last_use: int = 0
    #: Monotonic seconds of the last use.
    now: float = 0.0
    #: The state of its conversations: "waiting" if one of them is, else "live" if one of them is,
    #: else "over"; None if it never belonged to one.
    conversation: ConversationState | None = None
    #: How many conversations it has belonged to. Above 1 it is a beginning that they share.
    conversations: int = 0


class CachedBlock(BlockFields):
    """Metadata of one published block, kept current by the engine as long as the block is
    published. To write to it is an `AttributeError`."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        # A field may be written once, when a block is made.
        if hasattr(self, name):
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")


@runtime_checkable
class EvictionPolicy(Protocol):
    """Ranks evictable blocks. A block's life: `published` -> (`released` <-> `reused`)* ->
    `removed`. It is evictable between `released` and `reused` or `removed`."""

    def published(self, block: CachedBlock) -> None:
        """A block became part of the cache. It is in use, not evictable yet."""

    def released(self, block: CachedBlock) -> None:
        """No request uses the block any more, and no conversation pins it: it is evictable from
        now on."""

    def reused(self, block: CachedBlock) -> None:
        """A request hit the block, whose `uses` and `last_use` are current already. If it was
        evictable, it no longer is."""

    def removed(self, block: CachedBlock) -> None:
        """The block left the cache, whoever decided that. Forget it."""

    def victims(self, count: int) -> Sequence[int]:
        """Up to `count` evictable blocks to evict, in that order; at least one if any is evictable.
        The engine calls `removed` for each block that it evicts."""


@runtime_checkable
class CapacityAware(Protocol):
    """An optional method of an eviction policy, for a ranking that depends on the number of
    blocks."""

    def opened(self, capacity_blocks: int) -> None:
        """The engine has so many blocks, for cached blocks and running requests together. Called
        once, before any block is published; it may take a second."""


@runtime_checkable
class ConversationAware(Protocol):
    """An optional method of an eviction policy, for a ranking that depends on
    `CachedBlock.conversation`."""

    def conversation_changed(self, block: CachedBlock) -> None:
        """The `conversation` of an evictable block has changed. The field of a block in use is
        current when the block is released."""
