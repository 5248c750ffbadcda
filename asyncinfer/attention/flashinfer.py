"""Attention with FlashInfer over the pages of a cache, for rows whose lengths the host knows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from asyncinfer.attention.batch import AttentionBatch
from asyncinfer.attention.kv import KVCache
from asyncinfer.attention.paged import PagedAttention
from asyncinfer.attention.variant import AttentionVariant
from asyncinfer.kernels.flashinfer import FlashInfer, attend

__all__ = ["FlashInferAttention", "use_flashinfer"]


def use_flashinfer(caches: Iterable[object]) -> None:
    """Have FlashInfer attend over those of `caches` that hold keys and values. Raises `KernelError`
    where FlashInfer cannot be imported."""
    workspace = None
    for kv in caches:
        if isinstance(kv, KVCache):
            kv.flashinfer = FlashInfer(kv.storage.device, workspace)
            workspace = kv.flashinfer.workspace


class FlashInferAttention(PagedAttention):
    """`PagedAttention` whose layers without sinks are computed by FlashInfer. Plans once for all
    layers of a kind."""

    def __init__(
        self, kv: KVCache, batch: AttentionBatch, scale: float, flashinfer: FlashInfer
    ) -> None:
        super().__init__(kv, batch, scale)
        self._flashinfer = flashinfer
        self._rows = batch
        #: Plans, by window and soft cap.
        self._plans: dict[tuple[int | None, float | None], Any] = {}

    def _attend(
        self, layer: int, q: torch.Tensor, variant: AttentionVariant | None
    ) -> torch.Tensor:
        variant = variant or AttentionVariant()
        if variant.sinks is not None:
            return super()._attend(layer, q, variant)
        keys, values, rows = self._kv.k[layer], self._kv.v[layer], self._rows
        kind = variant.window, variant.softcap
        if kind not in self._plans:
            lengths = [start + count for start, count in zip(rows.starts, rows.counts, strict=True)]
            self._plans[kind] = self._flashinfer.plan(
                *(q, keys, rows.block_tables, lengths, rows.counts, self._scale),
                window=variant.window,
                softcap=variant.softcap,
            )
        return attend(self._plans[kind], q.contiguous(), keys, values).flatten(1)
