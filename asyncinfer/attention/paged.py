"""Attention through the paged kernels, which read the pages where they lie."""

from __future__ import annotations

import torch

from asyncinfer.attention.batch import AttentionBatch, DeviceBatch
from asyncinfer.attention.kv import KVCache
from asyncinfer.attention.variant import AttentionVariant
from asyncinfer.kernels import ops

__all__ = ["PagedAttention"]

_PLAIN = AttentionVariant()
_CHUNK = 256


class PagedAttention:
    """One kernel writes a layer's keys and values, one attends, whatever the rows."""

    def __init__(self, kv: KVCache, batch: DeviceBatch, scale: float) -> None:
        self._kv = kv
        self._batch = batch
        self._scale = scale
        invariant = isinstance(batch, AttentionBatch) and batch.invariant
        # Parts of a fixed length, so that a row is summed up alike in every batch.
        self._chunk = _CHUNK if invariant else None

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        variant: AttentionVariant | None = None,
    ) -> torch.Tensor:
        variant = variant or _PLAIN
        keys, values, batch = self._kv.k[layer], self._kv.v[layer], self._batch
        ops.kv_write(k, v, keys, values, batch.slot_mapping)
        out = ops.paged_attention(
            q,
            keys,
            values,
            batch.block_tables,
            batch.seq_lens,
            batch.query_starts,
            self._scale,
            window=variant.window,
            softcap=variant.softcap,
            sinks=variant.sinks,
            decode_rows=batch.decode_rows,
            chunk=self._chunk,
        )
        return out.flatten(1)
