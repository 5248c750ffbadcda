"""Attention by the paged kernels, which read pages without gathering them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncinfer.attention.batch import AttentionBatch, DeviceBatch
from asyncinfer.attention.kv import KVCache
from asyncinfer.attention.variant import AttentionVariant
from asyncinfer.kernels import ops
from asyncinfer.kernels.workspace import AttentionWorkspace, decode_parts, invariant_parts

__all__ = ["HeadNorms", "PagedAttention"]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each query and each key head; their weights are `[head_dim]`."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    eps: float = 1e-6
    #: The factor is 1 + weight.
    plus_one: bool = False


_PLAIN = AttentionVariant()
_NO_NORMS = HeadNorms(None, None)


class PagedAttention:
    """One kernel writes a layer's keys and values, and one attends for all kinds of rows."""

    def __init__(self, kv: KVCache, batch: DeviceBatch, scale: float) -> None:
        self._kv = kv
        self._batch = batch
        self._scale = scale
        #: The most keys of a part in every batch, so that a row's sum has the same order in each.
        self._chunk: int | None = None
        if isinstance(batch, AttentionBatch) and batch.invariant:
            self._chunk = batch.chunk
        self._parts: int | None = None
        self._workspace: AttentionWorkspace | None = None

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        variant: AttentionVariant | None = None,
    ) -> torch.Tensor:
        kv = self._kv
        ops.kv_write(
            k,
            v,
            kv.k[layer],
            kv.v[layer],
            self._batch.slot_mapping,
            k_scales=kv.k_scales[layer],
            v_scales=kv.v_scales[layer],
        )
        return self._attend(layer, q, variant)

    def project(
        self,
        layer: int,
        qkv: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        norms: HeadNorms | None = None,
        variant: AttentionVariant | None = None,
    ) -> torch.Tensor:
        """Attention from the packed projection `[tokens, heads + 2 * kv_heads, head_dim]`. One
        launch normalises the query and key heads, rotates them by `angles` and writes the KV."""
        norms, kv = norms or _NO_NORMS, self._kv
        q = ops.rope_kv_write(
            qkv,
            *angles,
            kv.k[layer],
            kv.v[layer],
            self._batch.slot_mapping,
            q_norm=norms.q,
            k_norm=norms.k,
            eps=norms.eps,
            plus_one=norms.plus_one,
            k_scales=kv.k_scales[layer],
            v_scales=kv.v_scales[layer],
        )
        return self._attend(layer, q, variant)

    def _attend(
        self, layer: int, q: torch.Tensor, variant: AttentionVariant | None
    ) -> torch.Tensor:
        variant = variant or _PLAIN
        kv, batch = self._kv, self._batch
        if batch.decode_rows and self._workspace is None:
            self._prepare_split(q, kv.k[layer])
        out = ops.paged_attention(
            q,
            kv.k[layer],
            kv.v[layer],
            batch.block_tables,
            batch.seq_lens,
            batch.query_starts,
            self._scale,
            window=variant.window,
            softcap=variant.softcap,
            sinks=variant.sinks,
            k_scales=kv.k_scales[layer],
            v_scales=kv.v_scales[layer],
            decode_rows=batch.decode_rows,
            chunk=self._chunk,
            parts=self._parts,
            workspace=self._workspace,
        )
        return out.flatten(1)

    def _prepare_split(self, q: torch.Tensor, keys: torch.Tensor) -> None:
        """Choose the split of the decode rows' keys, and allocate memory for it, for all layers."""
        batch, (_, heads, head_dim) = self._batch, q.shape
        longest = batch.block_tables.shape[1] * batch.block_size
        if self._chunk is None:
            self._parts = decode_parts(batch.decode_rows, keys.shape[1], longest)
        else:
            self._parts = invariant_parts(batch.decode_rows, longest, self._chunk)
        self._workspace = AttentionWorkspace.allocate(
            batch.decode_rows, heads, head_dim, self._parts, q.device, arrivals=batch.arrivals
        )
