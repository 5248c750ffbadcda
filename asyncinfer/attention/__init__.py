from asyncinfer.attention.batch import AttentionBatch
from asyncinfer.attention.kv import KVCache, KVShape

__all__ = ["AttentionBatch", "KVCache", "KVShape"]
