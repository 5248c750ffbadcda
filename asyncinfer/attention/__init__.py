from asyncinfer.attention.backend import Attend, begin_attention, reads_pages
from asyncinfer.attention.batch import AttentionBatch, DeviceBatch
from asyncinfer.attention.gathered import GatheredAttention
from asyncinfer.attention.kv import KVCache, KVShape
from asyncinfer.attention.paged import HeadNorms, PagedAttention
from asyncinfer.attention.variant import AttentionVariant

__all__ = [
    "Attend",
    "AttentionBatch",
    "AttentionVariant",
    "DeviceBatch",
    "GatheredAttention",
    "HeadNorms",
    "KVCache",
    "KVShape",
    "PagedAttention",
    "begin_attention",
    "reads_pages",
]
