"""Bugs in blocks, prefixes, and answers that share a prompt."""

from __future__ import annotations

from typing import Any

from simulation.planted import Plant, afterwards, beforehand, instead, nothing, result, together

from asyncinfer.cache import (
    BlockHasher,
    BlockManager,
    FullPages,
    GuardedPolicy,
    PagePool,
    PrefixCache,
)
from asyncinfer.cache import prefix_cache as prefix_cache_module
from asyncinfer.scheduler.admitter import Admitter
from asyncinfer.scheduler.sequence_states import SequenceStates
from asyncinfer.scheduler.slot_allocator import SlotAllocator

__all__ = ["CACHE_BUGS"]


def publish_scheduled(states: SequenceStates, sequence: Any) -> None:
    done = min(sequence.computed, len(sequence.tokens))
    states.slots.blocks.publish(sequence, done)


def publish_ended(states: SequenceStates, sequence: Any) -> None:
    if sequence.tables:
        states.slots.blocks.publish(sequence, sequence.committed)


def rounded_up(commit: Any) -> Any:
    def substitute(blocks: BlockManager, sequence: Any, length: int) -> None:
        size = blocks.block_size
        commit(blocks, sequence, -(-length // size) * size if length > 9 else 0)

    return substitute


def hold_first(blocks: BlockManager, sequence: Any) -> None:
    for group, table in zip(blocks.groups, sequence.tables, strict=True):
        group.hold(table.live[:1])


def free_again(pool: PagePool, page: int) -> None:
    if page == 3:
        pool.free.append(page)


def free_kept(pages: FullPages, page: int, *, passing: bool = False) -> None:
    if page == 1 and not pages.pool.refs[page] and page not in pages.pool.free:
        pages.pool.put(page)


def still_found(evict: Any) -> Any:
    def substitute(cache: PrefixCache, count: int) -> list[int]:
        entries = dict(cache.by_block)
        gone: list[int] = evict(cache, count)
        cache.by_key.update({entries[block].key: entries[block] for block in gone})
        return gone

    return substitute


def still_evictable(reused: Any) -> Any:
    def substitute(policy: GuardedPolicy, number: int, block: Any) -> None:
        was = number in policy.evictable
        reused(policy, number, block)
        if was:
            policy.evictable[number] = block

    return substitute


def colliding(digest: Any) -> Any:
    return lambda *args: bytes([digest(*args)[0] & 3])


def uncompared(holds: Any) -> Any:
    return lambda cache, entry, data, parent: holds(cache, entry, entry.data, parent)


COLLIDING = instead(BlockHasher, "digest", colliding)
CHAINS_EQUAL = instead(prefix_cache_module, "_same", lambda same: lambda a, b: True)


def tail_shared(copies: list[tuple[int, int]], blocks: BlockManager, *args: Any) -> list[Any]:
    """The page that was to be copied takes the place of the copy."""
    sequence = args[0]
    for group, table, (source, own) in zip(blocks.groups, sequence.tables, copies, strict=False):
        table.pages[-1] = source
        group.release(own)
    return []


def unpinned(copies: list[Any], blocks: BlockManager, *args: Any, first: int = 0) -> list[Any]:
    for group, (source, _) in list(zip(blocks.groups, copies, strict=False))[first:]:
        group.release(source)
    return copies


def too_soon(fork_wait: Any) -> Any:
    def substitute(admitter: Admitter, sequence: Any) -> Any:
        leader = sequence.fork_of
        wait = fork_wait(admitter, sequence)
        return None if wait is not None and leader.computed >= 1 else wait

    return substitute


def with_preempted(fits: bool, admitter: Any, sequence: Any, *args: Any) -> bool:
    leader = sequence.fork_of
    if fits and leader is not None and leader.slot < 0:
        admitter.blocks.fork(sequence, leader, sequence.prompt_len - 1)
    return fits


CACHE_BUGS: dict[str, Plant] = {
    "published before the step is committed": afterwards(
        SequenceStates, "decode", publish_scheduled
    ),
    "published though the row failed": beforehand(SequenceStates, "finish", publish_ended),
    "published half full": instead(BlockManager, "publish", rounded_up),
    "a reference is not given back": beforehand(BlockManager, "close", hold_first),
    "a hit takes no reference": nothing(FullPages, "hold"),
    "a block is freed twice": afterwards(PagePool, "put", free_again),
    "a cached block is freed as well": afterwards(FullPages, "release", free_kept),
    "evicted, but still found": instead(PrefixCache, "evict", still_found),
    "a reused block stays evictable": instead(GuardedPolicy, "reused", still_evictable),
    "tokens are not compared": together(COLLIDING, instead(PrefixCache, "_holds", uncompared)),
    "the tokens before are not compared": together(COLLIDING, CHAINS_EQUAL),
    "scopes share": together(
        instead(BlockHasher, "root", lambda root: lambda self, scope, adapter: root(self, "", "")),
        CHAINS_EQUAL,
    ),
    # Answers that share a prompt.
    "a shared tail is not copied": result(BlockManager, "fork", lambda copies, *args: []),
    "a shared tail is copied backwards": result(
        BlockManager, "fork", lambda copies, *args: [copy[::-1] for copy in copies]
    ),
    "a tail is shared, not copied": result(BlockManager, "fork", tail_shared),
    "the source of a copy is not pinned": result(BlockManager, "fork", unpinned),
    "a pin is never released": nothing(SlotAllocator, "release_sources"),
    "shared before it is computed": instead(Admitter, "_fork_wait", too_soon),
    "shared with one that was preempted meanwhile": result(Admitter, "_fit", with_preempted),
}
