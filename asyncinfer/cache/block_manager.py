"""`BlockManager`: block tables of requests over a pool and a prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncinfer.cache.block_pool import BlockPool
from asyncinfer.cache.chain import TOKEN_BYTES, pack
from asyncinfer.cache.prefix_cache import CacheEntry, PrefixCache, Tenant
from asyncinfer.cache.window_pool import WindowPool

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
    #: The window page of each block, if the layers have windows: -1 for the first `passed` ones,
    #: which the request sees no more.
    pages: list[int]
    passed: int


class BlockManager:
    """Everything that takes or gives a reference to a block, or to a window page where there are
    `windows`. Callers check `available` first."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        cache: PrefixCache | None,
        windows: WindowPool | None = None,
    ) -> None:
        assert cache is None or cache.block_size == block_size
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.cache = cache
        self.windows = windows
        if cache is not None:
            cache.opened(num_blocks)

    @property
    def available(self) -> int:
        """Blocks that can be allocated, with their window pages."""
        blocks = self.allocatable
        return blocks if self.windows is None else min(blocks, self.windows.available)

    @property
    def allocatable(self) -> int:
        """Blocks that are free, or cached and unused."""
        cached = 0 if self.cache is None else self.cache.evictable
        return len(self.pool.free) + cached

    def missing(self, request: Tabled, tokens: int) -> int:
        """Blocks the table lacks for so many tokens."""
        return max(0, -(-tokens // self.block_size) - len(request.blocks))

    def match(self, request: Tabled, limit: int) -> list[CacheEntry]:
        """Cached entries of the request's first `limit` tokens (whole blocks only)."""
        if self.cache is None or limit < self.block_size:
            return []
        entries = self.cache.match(
            request.keys, request.tokens, request.tenant, limit // self.block_size
        )
        return entries if self.windows is None else entries[: self.windows.usable(entries)]

    def unused(self, entries: Sequence[CacheEntry]) -> int:
        """How many of the entries' blocks count as allocatable."""
        refs = self.pool.refs
        return sum(1 for entry in entries if not refs[entry.block])

    def unused_pages(self, entries: Sequence[CacheEntry]) -> int:
        """How many of the window pages that come with the entries count as available."""
        assert self.windows is not None
        refs = self.windows.pool.refs
        return sum(1 for page in self.windows.pages(entries) if not refs[page])

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
        if self.windows is not None:
            pages = self.windows.pages(entries)
            self.windows.hold(pages)
            request.passed = len(entries) - len(pages)
            request.pages = [-1] * request.passed + pages

    def can_fork(self, parent: Tabled, length: int) -> bool:
        """Whether the parent still has all that a token after its first `length` ones sees."""
        return self.windows is None or parent.passed <= self.windows.first(length)

    def fork(self, request: Tabled, parent: Tabled, length: int) -> tuple[int, int] | None:
        """Start the request's table with the parent's first `length` tokens, whose KV is
        committed: full blocks are shared, a partly filled one gets a block of its own and is to
        be copied. Returns `(source, target)` of the copy; the source is pinned: `unpin` it once
        the step that copies is committed. So is the block's window page: `copied_pages`."""
        assert not request.blocks
        assert parent.room >= length
        assert self.can_fork(parent, length)
        full, partial = divmod(length, self.block_size)
        refs = self.pool.refs
        for block in parent.blocks[:full]:
            refs[block] += 1
        request.blocks = parent.blocks[:full]
        request.room = full * self.block_size
        request.published, request.node = 0, request.tenant
        if self.windows is not None:
            request.passed = self.windows.first(length)
            shared = parent.pages[request.passed : full]
            self.windows.hold(shared)
            request.pages = [-1] * request.passed + shared
        if not partial:
            return None
        source = parent.blocks[full]
        refs[source] += 1
        if self.windows is not None:
            self.windows.hold(parent.pages[full : full + 1])
        self.grow(request, 1)
        return source, request.blocks[-1]

    def copied_pages(self, request: Tabled, parent: Tabled, length: int) -> tuple[int, int]:
        """`(source, target)` of the window page that goes with the block copied by `fork`. The
        source is pinned: `unpin_page`."""
        index = length // self.block_size
        return parent.pages[index], request.pages[index]

    def unpin(self, block: int) -> None:
        self._release(block)

    def unpin_page(self, page: int) -> None:
        assert self.windows is not None
        self.windows.release(page)

    def grow(self, request: Tabled, count: int) -> None:
        """Append `count` blocks to the table; `available` must cover them."""
        pool = self.pool
        missing = count - len(pool.free)
        if missing > 0:
            assert self.cache is not None
            for block in self.cache.evict(missing):
                pool.put(block)
                if self.windows is not None:
                    self.windows.drop(block)
        request.blocks += pool.take(count)
        if self.windows is not None:
            request.pages += self.windows.take(count)
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
            if self.windows is not None and request.node is not None and j >= request.passed:
                block = request.node.block
                self.windows.keep(block, request.pages[j], again=block != request.blocks[j])

    def trim(self, request: Tabled, length: int) -> None:
        """The first `length` tokens are committed: give the window pages back that no later token
        sees."""
        windows = self.windows
        if windows is not None:
            first = windows.first(length)
            for index in range(request.passed, first):
                windows.release(request.pages[index], passing=True)
                request.pages[index] = -1
            request.passed = max(request.passed, first)

    def close(self, request: Tabled) -> None:
        """Give back the whole table, tail first: prefixes outlive their ends."""
        for block in reversed(request.blocks):
            self._release(block)
        if self.windows is not None:
            for page in reversed(request.pages[request.passed :]):
                self.windows.release(page)
            request.pages = []
            request.passed = 0
        request.blocks = []
        request.room = request.published = 0
        request.node = request.tenant

    def _release(self, block: int) -> None:
        refs = self.pool.refs
        assert refs[block] > 0, "released more often than taken"
        refs[block] -= 1
        if not refs[block] and (self.cache is None or not self.cache.release(block)):
            self.pool.put(block)
