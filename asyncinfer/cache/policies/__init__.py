"""The shipped eviction policies of the prefix cache."""

from asyncinfer.cache.policies.arc import ARC
from asyncinfer.cache.policies.cost_aware import CostAware
from asyncinfer.cache.policies.leaves import LeavesFirst, TailFirst
from asyncinfer.cache.policies.lfu import LFU
from asyncinfer.cache.policies.lru import LRU
from asyncinfer.cache.policies.prefix_lhd import PrefixLHD
from asyncinfer.cache.policies.s3_fifo import S3FIFO
from asyncinfer.cache.policies.ttl import TTL

__all__ = [
    "ARC",
    "LFU",
    "LRU",
    "S3FIFO",
    "TTL",
    "CostAware",
    "LeavesFirst",
    "PrefixLHD",
    "TailFirst",
]
