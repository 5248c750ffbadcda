"""How many prefix hits a hybrid, whose layers keep states, gets compared with a model of the same
memory all of whose layers attend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from asyncinfer.attention import KVCache
from asyncinfer.cache import (
    BlockManager,
    BlockTable,
    CacheEntry,
    Conversation,
    KVGroupSpec,
    Namespace,
    PrefixCache,
)
from asyncinfer.cache.policies import LRU
from asyncinfer.config import EngineConfig
from asyncinfer.errors import InvalidRequest
from asyncinfer.models import ModelConfig
from asyncinfer.runner.memory import kv_layer_bytes, share_states, state_bytes

__all__ = ["HybridReplay", "replay_hybrid"]

#: Tokens of a block of the traces that Mooncake publishes.
BLOCK_TOKENS: Final = 512
#: Requests that an engine of the hybrid runs at once: memory for their states is reserved.
RUNNING: Final = 8
#: Blocks in a chunk of a prompt.
_CHUNK: Final = 4
#: Tokens that stand for one block of the trace in this replay.
_SIZE: Final = 2


@dataclass(frozen=True, slots=True)
class HybridReplay:
    """One division of the memory."""

    #: `state_interval`; None: all layers attend.
    interval: int | None
    #: The shared memory, in blocks of the model all of whose layers attend.
    memory: int
    blocks: int
    state_pages: int
    hits: int
    total: int

    @property
    def rate(self) -> float:
        return self.hits / self.total


@dataclass(slots=True)
class _ReplayedPrompt:
    """The part of a sequence that the block manager reads and writes."""

    tokens: list[int]
    keys: list[bytes]
    namespace: Namespace = ("", "")
    tables: list[BlockTable] = field(default_factory=list)
    capacity: int = 0
    computed: int = 0
    published: int = 0
    node: CacheEntry | Namespace | None = None
    conversation: Conversation | None = None


def replay_hybrid(
    prompts: Sequence[tuple[float, Sequence[int]]],
    config: ModelConfig,
    memories: Sequence[int],
    intervals: Sequence[int],
) -> list[HybridReplay]:
    """Serve prompts one by one, in every memory, evicting the least recently used.

    Args:
        prompts: each prompt's second, and the names of its blocks of 512 tokens.
        memories: blocks of a model all of whose layers attend.
        intervals: of `state_interval`.

    Raises `InvalidRequest` for a model without states, and for a memory that holds no request.
    """
    if not config.state_layers:
        raise InvalidRequest("hybrid", config.architecture, "no layer of it keeps a state")
    dtype = getattr(torch, config.dtype or "bfloat16")
    whole = KVCache.bytes_per_block(config, BLOCK_TOKENS, dtype)
    layers = kv_layer_bytes(config, BLOCK_TOKENS, dtype)
    found: list[HybridReplay] = []
    for memory in memories:
        plain = (KVGroupSpec(memory),)
        found.append(HybridReplay(None, memory, memory, 0, *_replay(prompts, plain)))
        for interval in intervals:
            # No context bounds the cache, since the trace fills any memory.
            engine = EngineConfig(
                block_size=BLOCK_TOKENS, state_interval=interval, max_context=1 << 40
            )
            page = state_bytes(config, dtype)
            groups = share_states(memory * whole, config, engine, layers, page, RUNNING)
            kv, states = groups
            hits = _replay(prompts, groups)
            found.append(HybridReplay(interval, memory, kv.num_pages, states.num_pages, *hits))
    return found


def _replay(
    prompts: Sequence[tuple[float, Sequence[int]]], groups: Sequence[KVGroupSpec]
) -> tuple[int, int]:
    """How many blocks were found in the cache, and how many there were."""
    cache = PrefixCache(_SIZE, LRU(), secret=b"asyncinfer.planner", pinned_share=0.0)
    manager = BlockManager.of(groups, _SIZE, cache)
    hits = total = 0
    for number, (now, ids) in enumerate(prompts):
        cache.now = now
        tokens = [block for block in ids for _ in range(_SIZE)]
        # The answer, which follows the prompt and is never asked for again.
        tokens += [-1 - number] * _SIZE
        request = _ReplayedPrompt(tokens, cache.keys(tokens, ""))
        hits += _serve(manager, request)
        total += len(ids)
    return hits, total


def _serve(manager: BlockManager, request: _ReplayedPrompt) -> int:
    found = manager.match(request, len(request.tokens))
    manager.open(request, found)
    done = len(found) * _SIZE
    while done < len(request.tokens):
        done = min(len(request.tokens), done + _CHUNK * _SIZE)
        count = manager.missing(request, done)
        if count > manager.available:
            blocks = len(request.tokens) // _SIZE
            raise InvalidRequest("blocks", manager.available, f"a request has {blocks} blocks")
        manager.grow(request, count)
        manager.publish(request, done)
        manager.trim(request, done)
    manager.close(request)
    return len(found)
