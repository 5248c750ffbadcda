"""`CacheEntry`: one published block."""

from __future__ import annotations

from asyncinfer.cache import metadata
from asyncinfer.cache.chain import TOKEN_BYTES, unpack
from asyncinfer.cache.untracked import untrack

__all__ = ["CacheEntry", "Namespace"]

#: Scope and adapter, in which requests must agree to share blocks.
Namespace = tuple[str, str]


class CacheEntry:
    """A published block. Entries outlive eviction as long as others name them as `parent`."""

    __slots__ = (
        *("block", "children", "data", "depth", "key", "live", "meta"),
        *("parent", "pins", "scope", "uses", "waiting"),
    )

    def __init__(self, key: bytes, data: bytes, parent: CacheEntry | Namespace, block: int) -> None:
        self.key = key
        #: The token ids, packed by `asyncinfer.cache.chain.pack`.
        self.data = data
        #: The entry of the block before this one; the namespace at the root.
        self.parent = parent
        self.block = block
        self.children = 0
        self.uses = 0
        #: How many conversations hold it, of which wait for a tool, and pin it; written by
        #: `Conversations` alone.
        self.live = self.waiting = self.pins = 0
        self.depth: int = 0
        self.scope: str
        above: int | None = None
        if isinstance(parent, CacheEntry):
            above, self.depth, self.scope = parent.block, parent.depth + 1, parent.scope
        else:
            self.scope = parent[0]
        #: The eviction policy's view. `metadata` alone writes it, and the engine never reads it.
        tokens = len(data) // TOKEN_BYTES
        self.meta = metadata.make_block(block, above, self.depth, tokens, self.scope, key)
        # Entries form trees, and metadata hold numbers and strings: neither makes cycles.
        untrack(self.meta)
        untrack(self)

    @property
    def tokens(self) -> list[int]:
        return unpack(self.data)

    def adopted(self, children: int) -> None:
        """Count `children` more published blocks with this parent; fewer if negative."""
        self.children += children
        metadata.set_children(self.meta, self.children)
