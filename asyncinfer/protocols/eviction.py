"""What a prefix-cache eviction policy implements.

The engine owns references, the free list and the set of evictable blocks; a policy sees metadata
and ranks victims. Whatever it answers is checked, so a bad policy can cost hits, never
correctness: one that raises, or names a block it may not, is reported once and replaced by LRU.

Thread: the engine's decode thread only. Time: the `now` of the block, never a clock of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["EVICTION_PROTOCOL_VERSION", "CachedBlock", "EvictionPolicy"]

EVICTION_PROTOCOL_VERSION = 1


@dataclass(slots=True)
class CachedBlock:
    """Metadata of one published block. Read it, never write it: the engine keeps it current."""

    block: int
    #: The block that holds the tokens before this one's, None at the root. May be gone already.
    parent: int | None
    #: Blocks before this one in its prefix, 0 at the root.
    depth: int
    #: Tokens to compute again if it goes: those of this block.
    tokens: int
    #: Prefix-cache tenant ("" is the shared one).
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
    #: Logical time of publication and of the last use: grows with every cache operation.
    created: int = 0
    last_use: int = 0
    #: Monotonic seconds of the last use, as the engine was told them.
    now: float = 0.0


@runtime_checkable
class EvictionPolicy(Protocol):
    """Ranks evictable blocks. A block's life: `published` -> (`released` <-> `reused`)* ->
    `removed`. It is evictable between `released` and `reused` or `removed`."""

    def published(self, block: CachedBlock) -> None:
        """A block became part of the cache. It is in use, not evictable yet."""

    def released(self, block: CachedBlock) -> None:
        """No request uses the block any more: it is evictable from now on."""

    def reused(self, block: CachedBlock) -> None:
        """A request hit the block (`uses` and `last_use` are already current). If it was
        evictable, it no longer is."""

    def removed(self, block: CachedBlock) -> None:
        """The block left the cache, whoever decided it. Forget it."""

    def victims(self, count: int) -> Sequence[int]:
        """Up to `count` evictable blocks to give up, first to go first; at least one if any is
        evictable. The engine calls `removed` for each that it takes."""
