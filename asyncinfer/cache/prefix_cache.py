"""`PrefixCache`: which blocks hold which prefixes, and which of them may go."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from asyncinfer.cache import metadata
from asyncinfer.cache.chain import TOKEN_BYTES, BlockHasher, pack
from asyncinfer.cache.conversations import Conversation, Conversations
from asyncinfer.cache.entry import CacheEntry, Namespace
from asyncinfer.cache.guard import GuardedPolicy
from asyncinfer.cache.policies.lru import LRU
from asyncinfer.protocols.eviction import CachedBlock, EvictionPolicy

__all__ = ["PrefixCache"]


class PrefixCache:
    """Maps chain keys to blocks. A hit is exact: besides the key, the tokens of the block, of
    every block before it, and the namespace are equal.

    References and the free list are the block manager's; a published block without references
    is evictable.

    Args:
        block_size: tokens per block.
        policy: ranks what to give up; LRU by default.
        secret: key of the hash, at most 64 bytes; random by default.
        hasher: in place of `secret`, for tests.
        on_fault: told once, if the policy misbehaves and is replaced by LRU.
        clock: monotonic seconds, to time the policy; None never finds it too slow.
        label: what messages call the policy.
        pinned_share: of all blocks, how many conversations may pin.
    """

    def __init__(
        self,
        block_size: int,
        policy: EvictionPolicy | None = None,
        *,
        secret: bytes | None = None,
        hasher: BlockHasher | None = None,
        on_fault: Callable[[Exception], None] | None = None,
        clock: Callable[[], float] | None = None,
        label: str | None = None,
        pinned_share: float = 0.5,
    ) -> None:
        self.block_size = block_size
        self._pinned_share = pinned_share
        self.hasher = hasher or BlockHasher(block_size, secret or secrets.token_bytes(32))
        self.guard = GuardedPolicy(LRU() if policy is None else policy, on_fault, clock, label)
        #: Monotonic seconds for the policy, set by `Scheduler`.
        self.now = 0.0
        self.by_key: dict[bytes, CacheEntry] = {}
        self.by_block: dict[int, CacheEntry] = {}
        self.conversations = Conversations(self.guard, self.by_block)
        self._time = 0

    def keys(
        self,
        tokens: Sequence[int],
        scope: str = "",
        adapter: str = "",
        pause: Callable[[], object] | None = None,
    ) -> list[bytes]:
        """Chain keys of the full blocks of `tokens`; from any thread. `pause`: see
        `BlockHasher.keys`."""
        return self.hasher.keys(tokens, scope, adapter, pause)

    def opened(self, capacity_blocks: int) -> None:
        """Tell the policy how many blocks the pool has. Called before anything is published."""
        self.conversations.most = int(self._pinned_share * capacity_blocks)
        self.guard.opened(capacity_blocks)

    @property
    def evictable(self) -> int:
        """Blocks that could be given up now."""
        return len(self.guard.evictable) + len(self.conversations.idle)

    def match(
        self, keys: Sequence[bytes], tokens: Sequence[int], namespace: Namespace, limit: int
    ) -> list[CacheEntry]:
        """The longest cached prefix, at most `limit` blocks. Changes nothing."""
        size, width = self.block_size, self.block_size * TOKEN_BYTES
        node: CacheEntry | Namespace = namespace
        found: list[CacheEntry] = []
        data, first, packed = b"", 0, 0
        for j in range(min(limit, len(keys))):
            entry = self.by_key.get(keys[j])
            if entry is None:
                break
            if j == packed:
                # As many blocks as were found: most prompts miss early, and a long one is not
                # packed in vain.
                first, packed = j, j + max(1, j)
                data = pack(tokens[first * size : packed * size])
            start = (j - first) * width
            if not self._holds(entry, data[start : start + width], node):
                break
            found.append(entry)
            node = entry
        return found

    def reuse(self, entry: CacheEntry) -> None:
        """A request took a reference on the entry's block."""
        entry.uses += 1
        metadata.set_uses(entry.meta, entry.uses)
        self._touch(entry.meta)
        self.conversations.reused(entry)
        self.guard.reused(entry.block, entry.meta)

    def publish(
        self, block: int, key: bytes, data: bytes, parent: CacheEntry | Namespace
    ) -> CacheEntry | None:
        """Make a full, written block of packed tokens findable. Returns the entry of its prefix:
        a new one, or that of another block with equal tokens; None if a different prefix has the
        key. The sequence then publishes no later block either."""
        entry = self.by_key.get(key)
        if entry is not None:
            return entry if self._holds(entry, data, parent) else None
        assert block not in self.by_block, "a block published under two keys"
        entry = CacheEntry(key, data, parent, block)
        self.by_key[key] = self.by_block[block] = entry
        if isinstance(parent, CacheEntry):
            parent.adopted(1)
        self._touch(entry.meta)
        metadata.set_created(entry.meta, self._time)
        self.guard.published(entry.meta)
        return entry

    def release(self, block: int) -> bool:
        """The last reference to a block went. Whether the cache keeps it."""
        entry = self.by_block.get(block)
        if entry is None:
            return False
        self._touch(entry.meta)
        if not self.conversations.released(entry):
            self.guard.released(block, entry.meta)
        return True

    def hold(self, conversation: Conversation, last: CacheEntry | Namespace | None) -> None:
        """A request of the conversation is about to give its blocks back; `last` is the entry of
        the last published one."""
        entries: list[CacheEntry] = []
        while isinstance(last, CacheEntry):
            entries.append(last)
            last = last.parent
        entries.reverse()
        self.conversations.hold(conversation, entries, self.now)

    def evict(self, count: int) -> list[int]:
        """Give up `count` evictable blocks, which there must be."""
        gone: list[int] = []
        while len(gone) < count:
            if not self.guard.evictable:
                self.conversations.give_up()
                continue
            for block in self.guard.victims(count - len(gone)):
                entry = self.by_block.pop(block)
                del self.by_key[entry.key]
                if isinstance(entry.parent, CacheEntry):
                    entry.parent.adopted(-1)
                self.guard.removed(block, entry.meta)
                gone.append(block)
        return gone

    def _holds(self, entry: CacheEntry, data: bytes, parent: CacheEntry | Namespace) -> bool:
        """Whether the entry's prefix is `parent`'s and these tokens, whatever the keys say."""
        if entry.data != data:
            return False
        if entry.parent is not parent:
            if not _same(entry.parent, parent):
                return False
            if isinstance(parent, CacheEntry) and isinstance(entry.parent, CacheEntry):
                # The entry's parent was evicted and published anew: the new one takes its place.
                entry.parent.adopted(-1)
                parent.adopted(1)
                entry.parent = parent
                metadata.set_parent(entry.meta, parent.block)
        return True

    def _touch(self, meta: CachedBlock) -> None:
        self._time += 1
        metadata.set_last_use(meta, self._time)
        metadata.set_now(meta, self.now)


def _same(a: CacheEntry | Namespace, b: CacheEntry | Namespace) -> bool:
    while a is not b:
        if isinstance(a, tuple) or isinstance(b, tuple):
            return a == b
        if a.data != b.data:
            return False
        a, b = a.parent, b.parent
    return True
