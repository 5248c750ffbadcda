from asyncinfer.attention.batch import AttentionBatch
from asyncinfer.attention.gathered import GatheredAttention
from asyncinfer.attention.kv import KVCache, KVShape

__all__ = ["AttentionBatch", "GatheredAttention", "KVCache", "KVShape"]
