"""`CacheHarness`: the engine's own block manager and prefix cache, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from asyncinfer.cache import (
    BlockManager,
    BlockTable,
    CacheEntry,
    Conversation,
    KVGroupSpec,
    Namespace,
    PrefixCache,
)
from asyncinfer.protocols import ConversationState, EvictionPolicy

__all__ = ["CacheHarness", "CacheRequest"]

#: Keys of the cache's hash need no secrecy here, and a policy must not depend on them.
SECRET: Final = b"asyncinfer.testing"


@dataclass(slots=True)
class CacheRequest:
    """The fields of a request that the block manager reads and writes."""

    tokens: list[int]
    namespace: Namespace
    keys: list[bytes]
    tables: list[BlockTable] = field(default_factory=list)
    capacity: int = 0
    computed: int = 0
    published: int = 0
    node: CacheEntry | Namespace | None = None
    #: Leading blocks that were found in the cache.
    hits: int = 0
    conversation: Conversation | None = None


class CacheHarness:
    """Serves prompts as an engine would, up to the computation: look up the prefix, take blocks
    (evicting what the policy names), publish, give back.

    Args:
        blocks: blocks in the pool.
        policy: called through the engine's own guard.
        block_size: tokens per block.
        on_fault: told once if the policy misbehaves and LRU takes over; None raises the fault.
        pinned_share: of the blocks, how many open conversations may pin.
    """

    def __init__(
        self,
        blocks: int,
        policy: EvictionPolicy,
        *,
        block_size: int = 16,
        on_fault: Callable[[Exception], None] | None = None,
        pinned_share: float = 0.5,
    ) -> None:
        self.block_size = block_size
        self.cache = PrefixCache(
            block_size,
            policy,
            secret=SECRET,
            on_fault=_raise if on_fault is None else on_fault,
            pinned_share=pinned_share,
        )
        self._conversations: dict[object, Conversation] = {}
        self.manager = BlockManager.of([KVGroupSpec(blocks)], block_size, self.cache)

    def request(
        self, tokens: Sequence[int], scope: str = "", conversation: object = None
    ) -> CacheRequest:
        """A request that holds nothing yet, perhaps of a conversation, by any name; its keys are
        computed here."""
        listed = list(tokens)
        request = CacheRequest(listed, (scope, ""), self.cache.keys(listed, scope))
        if conversation is not None:
            request.conversation = self._conversations.setdefault(conversation, Conversation())
        return request

    def converse(self, conversation: object, state: ConversationState) -> None:
        """What a conversation does now; after "over" its name is that of another one."""
        known = self._conversations.setdefault(conversation, Conversation())
        if state == "over":
            self.cache.conversations.end(known)
            del self._conversations[conversation]
        else:
            self.cache.conversations.set_state(known, state)

    def open(self, request: CacheRequest, now: float = 0.0) -> bool:
        """Take the cached prefix and blocks for the rest. False, and nothing changes, if there
        are not enough blocks. `now` is in seconds."""
        manager, tokens = self.manager, len(request.tokens)
        self.cache.now = now
        found = manager.match(request, tokens)
        if manager.wanted(tokens, found)[0] > manager.available:
            return False
        manager.open(request, found)
        request.hits = len(found)
        manager.grow(request, manager.missing(request, tokens))
        return True

    def commit(self, request: CacheRequest, now: float = 0.0) -> None:
        """All of the request's tokens are computed: publish its full blocks."""
        self.cache.now = now
        self.manager.publish(request, len(request.tokens))

    def close(self, request: CacheRequest, now: float = 0.0) -> None:
        """Give all of the request's blocks back."""
        self.cache.now = now
        self.manager.close(request)

    def serve(self, request: CacheRequest, now: float = 0.0) -> int:
        """`open`, `commit` and `close`; how many blocks were hits. Raises `ValueError` if the
        request does not fit into the pool."""
        if not self.open(request, now):
            raise ValueError(
                f"a request of {len(request.tokens)} tokens does not fit: "
                f"{self.manager.available} blocks of {self.block_size} tokens are available"
            )
        self.commit(request, now)
        self.close(request, now)
        return request.hits


def _raise(error: Exception) -> None:
    raise error
