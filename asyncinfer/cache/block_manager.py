"""`BlockManager`: block tables of requests over KV groups and a prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, Self

from asyncinfer.cache.chain import TOKEN_BYTES, pack
from asyncinfer.cache.conversations import Conversation
from asyncinfer.cache.entry import CacheEntry, Namespace
from asyncinfer.cache.full_pages import FullPages
from asyncinfer.cache.page_group import BlockTable, DependentGroup, KVGroupSpec, PageGroup
from asyncinfer.cache.prefix_cache import PrefixCache
from asyncinfer.cache.state_pages import StatePages
from asyncinfer.cache.window_pages import WindowPages

__all__ = ["BlockManager", "Tabled"]

#: The first blocks whose keys are computed before any is looked up.
_SEARCHED: Final = 16


class Tabled(Protocol):
    """The part of a sequence that the block manager reads and writes."""

    namespace: Namespace
    #: Chain keys of the full blocks of `tokens`, as far as computed.
    keys: list[bytes]
    #: A table for each KV group; none at all without blocks.
    tables: list[BlockTable]
    #: Tokens that the tables have room for.
    capacity: int
    #: Tokens that are written or will be by a step in flight.
    computed: int
    #: Leading blocks whose prefix is in the cache, and the entry of the last of them (the namespace
    #: before the first). None: its key belongs to other tokens, so nothing more is published.
    published: int
    node: CacheEntry | Namespace | None

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def conversation(self) -> Conversation | None:
        """The conversation of its request, if any."""


class BlockManager:
    """Everything that takes or gives a reference to a page. Callers check `available` first."""

    def __init__(
        self,
        first: FullPages,
        others: Sequence[DependentGroup],
        block_size: int,
        cache: PrefixCache | None,
    ) -> None:
        """`first` keeps the blocks that `cache` publishes."""
        assert cache is None or cache.block_size == block_size
        self.block_size = block_size
        self.cache = cache
        self.groups: list[PageGroup] = [first, *others]
        #: The others, with their places in `groups`.
        self._others = list(enumerate(others, start=1))
        if cache is not None:
            cache.opened(first.pool.size)

    @classmethod
    def of(cls, groups: Sequence[KVGroupSpec], block_size: int, cache: PrefixCache | None) -> Self:
        """The pages of the first group are the blocks. The others need only some of a sequence's
        pages at a time, for a window or a state. Layers that need all of them, of another shape,
        are in the first group as well, with a `KVCache` of their own."""
        first, *others = groups
        assert first.window is None, "the first group sees every token"
        made: list[DependentGroup] = []
        for group in others:
            assert group.window is not None, "layers that see all tokens share the first group"
            if group.state:
                made.append(StatePages(group.num_pages, block_size, group.interval))
            else:
                made.append(WindowPages(group.num_pages, group.window, block_size))
        return cls(FullPages(first.num_pages, cache), made, block_size, cache)

    @property
    def available(self) -> int:
        """Blocks that can be allocated, with a page in every group."""
        return min([group.available for group in self.groups])

    def missing(self, sequence: Tabled, tokens: int) -> int:
        """Blocks the tables lack for so many tokens."""
        return max(0, -(-(tokens - sequence.capacity) // self.block_size))

    def match(self, sequence: Tabled, limit: int) -> list[CacheEntry]:
        """Cached entries of the sequence's first `limit` tokens (whole blocks only), as far as
        every group has what a token after them needs."""
        if self.cache is None or limit < self.block_size:
            return []
        entries = self.cache.match(
            sequence.keys, sequence.tokens, sequence.namespace, limit // self.block_size
        )
        before = -1
        # What one group shortens may be too short for another.
        while self._others and before != len(entries):
            before = len(entries)
            for _, group in self._others:
                entries = entries[: group.usable(entries)]
        return entries

    def wanted(self, tokens: int, entries: Sequence[CacheEntry], shared: int = 0) -> list[int]:
        """How many available pages of each group the admission of a sequence of `tokens` tokens
        costs. It reuses the entries, or another sequence's first `shared` tokens."""
        blocks, full = -(-tokens // self.block_size), shared // self.block_size
        wanted = []
        for group in self.groups:
            given, refs = group.pages(entries), group.pool.refs
            unused = sum(1 for page in given if not refs[page])
            reused = len(given) + full - group.first(shared)
            wanted.append(min(blocks, group.steady) - reused + unused)
        return wanted

    def search(self, sequence: Tabled, limit: int) -> list[CacheEntry]:
        """`match` for a waiting caller. Of the keys that the sequence lacks, it computes at most
        twice as many as it finds cached."""
        if self.cache is None:
            return []
        keys, most = sequence.keys, limit // self.block_size
        entries = self.match(sequence, limit)
        while len(entries) == len(keys) < most:
            self.hash(sequence, min(most, max(_SEARCHED, 2 * len(keys))))
            entries = self.match(sequence, limit)
        return entries

    def hash(self, sequence: Tabled, count: int) -> None:
        """Compute the keys of the sequence's first `count` blocks, which must be full."""
        if self.cache is None:
            return
        size, keys, hasher = self.block_size, sequence.keys, self.cache.hasher
        for j in range(len(keys), count):
            parent = keys[-1] if keys else hasher.root(*sequence.namespace)
            keys.append(hasher.next(parent, pack(sequence.tokens[j * size : (j + 1) * size])))

    def open(self, sequence: Tabled, entries: Sequence[CacheEntry]) -> None:
        """Start the sequence's tables with the blocks of matched entries."""
        assert not sequence.tables
        for group in self.groups:
            pages = group.pages(entries)
            group.hold(pages)
            gone = len(entries) - len(pages)
            sequence.tables.append(BlockTable([-1] * gone + pages, gone))
        for entry in entries:
            assert self.cache is not None
            self.cache.reuse(entry)
        sequence.capacity = len(entries) * self.block_size
        sequence.published = len(entries)
        sequence.node = entries[-1] if entries else sequence.namespace

    def can_fork(self, parent: Tabled, length: int) -> bool:
        """Whether the parent still has all that a token after its first `length` ones needs."""
        return all(
            group.can_fork(parent.tables[index], length, parent.computed)
            for index, group in self._others
        )

    def fork(self, sequence: Tabled, parent: Tabled, length: int) -> list[tuple[int, int]]:
        """Start the sequence's tables with the parent's first `length` tokens, whose KV is
        committed: full blocks are shared, a partly filled one gets pages of its own.

        Returns `(source, target)` of the page to copy in each group; nothing if no block is partly
        filled. A source has a reference more, which `SlotAllocator.release_sources` gives back once
        the step that copies is committed.
        """
        assert not sequence.tables
        assert parent.capacity >= length
        assert self.can_fork(parent, length)
        full, partial = divmod(length, self.block_size)
        sources = []
        for group, table in zip(self.groups, parent.tables, strict=True):
            first = group.first(length)
            shared = table.pages[first:full]
            group.hold(shared)
            sequence.tables.append(BlockTable([-1] * first + shared, first))
            if partial:
                sources.append(table.pages[full])
                group.hold(sources[-1:])
        sequence.capacity = full * self.block_size
        sequence.published, sequence.node = 0, sequence.namespace
        if not partial:
            return []
        self.grow(sequence, 1)
        return [(page, own.pages[-1]) for page, own in zip(sources, sequence.tables, strict=True)]

    def grow(self, sequence: Tabled, count: int) -> None:
        """Append `count` blocks to the tables; `available` must cover them."""
        self._make_room(count)
        for group, table in zip(self.groups, sequence.tables, strict=True):
            table.pages += group.take(count)
        sequence.capacity += count * self.block_size

    def grow_each(self, sequences: Sequence[Tabled]) -> None:
        """`grow(sequence, 1)` for each of them; `available` must cover all."""
        self._make_room(len(sequences))
        for index, group in enumerate(self.groups):
            for sequence, page in zip(sequences, group.take(len(sequences)), strict=True):
                sequence.tables[index].pages.append(page)
        for sequence in sequences:
            sequence.capacity += self.block_size

    def _make_room(self, count: int) -> None:
        """See that so many pages of the first group are free."""
        pool = self.groups[0].pool
        missing = count - len(pool.free)
        if missing > 0:
            assert self.cache is not None
            for block in self.cache.evict(missing):
                pool.put(block)
                for _, other in self._others:
                    other.drop(block)

    def publish(self, sequence: Tabled, length: int) -> None:
        """The KV of the first `length` tokens is written: publish the blocks it fills."""
        cache, size = self.cache, self.block_size
        first, full = sequence.published, length // size
        if cache is None or first == full:
            return
        keys, width = sequence.keys, size * TOKEN_BYTES
        data = pack(sequence.tokens[first * size : full * size])
        blocks = sequence.tables[0].pages
        for j in range(first, full):
            if sequence.node is None:
                return
            packed = data[(j - first) * width : (j - first + 1) * width]
            if j == len(keys):
                parent = keys[-1] if keys else cache.hasher.root(*sequence.namespace)
                keys.append(cache.hasher.next(parent, packed))
            sequence.node = cache.publish(blocks[j], keys[j], packed, sequence.node)
            sequence.published = j + 1
            if sequence.node is not None:
                block = sequence.node.block
                for number, group in self._others:
                    table = sequence.tables[number]
                    if j >= table.first_live_page:
                        group.keep(block, table.pages[j], again=block != blocks[j])

    def trim(self, sequence: Tabled, length: int) -> None:
        """The first `length` tokens are committed: give back the pages that no later token
        needs."""
        for number, group in self._others:
            table, first = sequence.tables[number], group.first(length)
            for index in range(table.first_live_page, first):
                group.leave(table.pages[index], index)
                table.pages[index] = -1
            table.first_live_page = max(table.first_live_page, first)

    def close(self, sequence: Tabled) -> None:
        """Give back all tables, tail first: prefixes outlive their ends."""
        if sequence.conversation is not None and self.cache is not None:
            self.cache.hold(sequence.conversation, sequence.node)
        for group, table in zip(self.groups, sequence.tables, strict=True):
            for page in reversed(table.live):
                group.release(page)
        sequence.tables = []
        sequence.capacity = sequence.published = 0
        sequence.node = sequence.namespace
