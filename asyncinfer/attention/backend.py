"""Which attention a forward pass takes."""

from __future__ import annotations

from typing import Protocol

import torch

from asyncinfer.attention.batch import AttentionBatch, DeviceBatch
from asyncinfer.attention.flashinfer import FlashInferAttention
from asyncinfer.attention.gathered import GatheredAttention
from asyncinfer.attention.invariant import InvariantAttention
from asyncinfer.attention.kv import KVCache
from asyncinfer.attention.masked import MaskedAttention
from asyncinfer.attention.paged import PagedAttention
from asyncinfer.attention.variant import AttentionVariant
from asyncinfer.kernels.dispatch import has_triton_kernel

__all__ = ["MOST_HEAD_DIM", "Attend", "begin_attention", "reads_pages"]

#: Larger heads, those of a latent cache, do not fit the paged kernels' tiles.
MOST_HEAD_DIM = 256


class Attend(Protocol):
    """Attention of one forward pass, made once and called by every layer in turn."""

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        variant: AttentionVariant | None = None,
    ) -> torch.Tensor:
        """Write `k` and `v` `[tokens, kv_heads, head_dim]` into their pages of `layer`, then attend
        with `q` `[tokens, heads, head_dim]` by the layer's rules, causally where `variant` is None.
        Returns `[tokens, heads * head_dim]`."""


def begin_attention(kv: KVCache, batch: DeviceBatch, scale: float) -> Attend:
    """Attention over `kv` for the rows of `batch`: by Triton kernels where they run, by
    FlashInfer's where the cache has them, and by torch's operators elsewhere. `scale` multiplies
    the scores. A `DeviceBatch` has decode rows alone."""
    if reads_pages(kv):
        if kv.flashinfer is not None and isinstance(batch, AttentionBatch):
            return FlashInferAttention(kv, batch, scale, kv.flashinfer)
        return PagedAttention(kv, batch, scale)
    if not isinstance(batch, AttentionBatch):
        return MaskedAttention(kv, batch, scale)
    if batch.invariant:
        return InvariantAttention(kv, batch, scale)
    return GatheredAttention(kv, batch, scale)


def reads_pages(kv: KVCache) -> bool:
    """Whether the paged kernels attend over `kv`. A graph that records them costs no more than they
    do; one that records `MaskedAttention` reads the whole width of the tables."""
    fits = kv.storage.shape[-1] == kv.head_dim <= MOST_HEAD_DIM
    return fits and has_triton_kernel("paged_attention", kv.storage)
