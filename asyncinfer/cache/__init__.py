"""The paged KV cache's bookkeeping: blocks, references, prefixes, eviction."""

from asyncinfer.cache.block_manager import BlockManager, Tabled
from asyncinfer.cache.block_pool import BlockPool
from asyncinfer.cache.chain import BlockHasher, chain_keys
from asyncinfer.cache.guard import GuardedPolicy
from asyncinfer.cache.policies.lru import LRU
from asyncinfer.cache.prefix_cache import CacheEntry, PrefixCache, Tenant
from asyncinfer.cache.window_pool import WindowPool, reach_of, steady_pages

__all__ = [
    "LRU",
    "BlockHasher",
    "BlockManager",
    "BlockPool",
    "CacheEntry",
    "GuardedPolicy",
    "PrefixCache",
    "Tabled",
    "Tenant",
    "WindowPool",
    "chain_keys",
    "reach_of",
    "steady_pages",
]
