"""`BlockManager`: block tables of requests over a pool and a prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncinfer.cache.block_pool import BlockPool
from asyncinfer.cache.chain import TOKEN_BYTES, pack
from asyncinfer.cache.prefix_cache import CacheEntry, PrefixCache, Tenant

__all__ = ["BlockManager", "Tabled"]


class Tabled(Protocol):
    """The part of a request that the block manager reads and writes."""

    tokens: list[int]
    tenant: Tenant
    #: Chain keys of the full blocks of `tokens`, as far as computed.
    keys: list[bytes]
    #: The block table.
    blocks: list[int]
    #: Tokens the table has room for.
    room: int
    #: Leading blocks whose prefix is in the cache, and the entry of the last of them (the tenant
    #: before the first). None: its key belongs to other tokens, so nothing more is published.
    published: int
    node: CacheEntry | Tenant | None


class BlockManager:
    """Everything that takes or gives a reference to a block. Callers check `available` first."""

    def __init__(self, num_blocks: int, block_size: int, cache: PrefixCache | None) -> None:
        assert cache is None or cache.block_size == block_size
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.cache = cache

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free, or cached and unused."""
        cached = 0 if self.cache is None else self.cache.evictable
        return len(self.pool.free) + cached

    def match(self, request: Tabled, limit: int) -> list[CacheEntry]:
        """Cached entries of the request's first `limit` tokens (whole blocks only)."""
        if self.cache is None or limit < self.block_size:
            return []
        return self.cache.match(
            request.keys, request.tokens, request.tenant, limit // self.block_size
        )

    def unused(self, entries: Sequence[CacheEntry]) -> int:
        """How many of the entries' blocks count as available."""
        refs = self.pool.refs
        return sum(1 for entry in entries if not refs[entry.block])

    def open(self, request: Tabled, entries: Sequence[CacheEntry]) -> None:
        """Start the request's table with the matched blocks."""
        assert not request.blocks
        refs = self.pool.refs
        for entry in entries:
            refs[entry.block] += 1
            assert self.cache is not None
            self.cache.reuse(entry)
        request.blocks = [entry.block for entry in entries]
        request.room = len(entries) * self.block_size
        request.published = len(entries)
        request.node = entries[-1] if entries else request.tenant

    def fork(self, request: Tabled, parent: Tabled, length: int) -> tuple[int, int] | None:
        """Start the request's table with the parent's first `length` tokens, whose KV is
        committed: full blocks are shared, a partly filled one gets a block of its own and is to
        be copied. Returns `(source, target)` of the copy; the source is pinned: `unpin` it once
        the step that copies is committed."""
        assert not request.blocks
        assert parent.room >= length
        full, partial = divmod(length, self.block_size)
        refs = self.pool.refs
        for block in parent.blocks[:full]:
            refs[block] += 1
        request.blocks = parent.blocks[:full]
        request.room = full * self.block_size
        request.published, request.node = 0, request.tenant
        if not partial:
            return None
        source = parent.blocks[full]
        refs[source] += 1
        self.grow(request, 1)
        return source, request.blocks[-1]

    def unpin(self, block: int) -> None:
        self._release(block)

    def grow(self, request: Tabled, count: int) -> None:
        """Append `count` blocks to the table; `available` must cover them."""
        pool = self.pool
        missing = count - len(pool.free)
        if missing > 0:
            assert self.cache is not None
            for block in self.cache.evict(missing):
                pool.put(block)
        request.blocks += pool.take(count)
        request.room += count * self.block_size

    def commit(self, request: Tabled, length: int) -> None:
        """The KV of the first `length` tokens is written: publish the blocks it fills."""
        cache, size = self.cache, self.block_size
        first, full = request.published, length // size
        if cache is None or first == full:
            return
        keys, width = request.keys, size * TOKEN_BYTES
        data = pack(request.tokens[first * size : full * size])
        for j in range(first, full):
            if request.node is None:
                return
            its = data[(j - first) * width : (j - first + 1) * width]
            if j == len(keys):
                parent = keys[-1] if keys else cache.hasher.root(*request.tenant)
                keys.append(cache.hasher.next(parent, its))
            request.node = cache.publish(request.blocks[j], keys[j], its, request.node)
            request.published = j + 1

    def close(self, request: Tabled) -> None:
        """Give back the whole table, tail first: prefixes outlive their ends."""
        for block in reversed(request.blocks):
            self._release(block)
        request.blocks = []
        request.room = request.published = 0
        request.node = request.tenant

    def _release(self, block: int) -> None:
        refs = self.pool.refs
        assert refs[block] > 0, "released more often than taken"
        refs[block] -= 1
        if not refs[block] and (self.cache is None or not self.cache.release(block)):
            self.pool.put(block)
