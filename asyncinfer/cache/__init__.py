"""The paged KV cache's bookkeeping: blocks, KV groups and their pages, prefixes, eviction."""

from asyncinfer.cache.block_manager import BlockManager
from asyncinfer.cache.chain import BlockHasher, chain_keys
from asyncinfer.cache.conversations import Conversation
from asyncinfer.cache.entry import CacheEntry, Namespace
from asyncinfer.cache.full_pages import FullPages
from asyncinfer.cache.guard import GuardedPolicy
from asyncinfer.cache.page_group import BlockTable, DependentGroup, KVGroupSpec, PageGroup
from asyncinfer.cache.page_pool import PagePool
from asyncinfer.cache.policies.lru import LRU
from asyncinfer.cache.prefix_cache import PrefixCache
from asyncinfer.cache.state_pages import STATE_WINDOW, StatePages
from asyncinfer.cache.window_pages import WindowPages, reach_of, steady_pages

__all__ = [
    "LRU",
    "STATE_WINDOW",
    "BlockHasher",
    "BlockManager",
    "BlockTable",
    "CacheEntry",
    "Conversation",
    "DependentGroup",
    "FullPages",
    "GuardedPolicy",
    "KVGroupSpec",
    "Namespace",
    "PageGroup",
    "PagePool",
    "PrefixCache",
    "StatePages",
    "WindowPages",
    "chain_keys",
    "reach_of",
    "steady_pages",
]
