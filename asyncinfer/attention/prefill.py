"""Attention of a row with many query tokens: a chunk of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F

from asyncinfer.attention.batch import AttentionBatch
from asyncinfer.attention.contiguous import ContiguousKV
from asyncinfer.attention.decode import RowsKV
from asyncinfer.attention.kv import KVCache
from asyncinfer.attention.products import attend_by_products, has_faster_product
from asyncinfer.kernels.native import PrefillKernel, prefill_kernel
from asyncinfer.kernels.onednn import mkl_keeps_up
from asyncinfer.kernels.threads import FEW_TILES, share

__all__ = ["PrefillRow", "native_prefill", "prefill_rows"]

#: The most numbers in a tile's mask.
_TILE_MASK = 1 << 21
#: A row with at most this many scores per head is one call, since tiles would cost more calls.
_SMALL = 1 << 13
#: A prompt of at most so many tokens takes torch's attention where MKL keeps up with oneDNN, on an
#: AMD EPYC of the fourth generation with two threads 0.5 (128 tokens) to 0.8 (512) of the time.
_SHORT = 512


class PrefillRow:
    """One row's causal attention over all of its sequence so far."""

    def __init__(
        self,
        kv: KVCache,
        batch: AttentionBatch,
        row: int,
        first: int,
        scale: float,
        copy: ContiguousKV | None = None,
    ) -> None:
        """`first`: the row's first query token in the batch."""
        self._scale = scale
        self._start = batch.starts[row]
        self._end = self._start + batch.counts[row]
        self._tokens = slice(first, first + batch.counts[row])
        #: None for a sequence's first tokens, which see nothing cached. An inexact format always
        #: needs it, since every token must see KV as the cache stores it.
        self._cached: RowsKV | None = None
        if self._start or not kv.format.exact:
            self._cached = RowsKV(kv, batch, [row], copy)

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        new: torch.Tensor,
        buffer: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend with this row's tokens of `q` `[tokens, heads, head_dim]`, whose keys and values
        are in the cache and in `new` `[parts, tokens, kv_heads, head_dim]`; fill its tokens of
        `out` `[tokens, heads * head_dim]`. `buffer` takes the gathered pages."""
        own = new[:, self._tokens]
        queries, kv_heads = q[self._tokens], new.shape[2]
        kernel = native_prefill(q.device, q.dtype, q.shape[2], q.shape[1] // kv_heads, self._scale)
        if self._cached is not None:
            pages = self._cached(layer, own, buffer)[:, 0, :, : self._end]
        elif kernel is None:
            pages = own.transpose(1, 2).contiguous()
        else:
            # The kernel makes a layout of its own.
            pages = own.transpose(1, 2)
        keys, values = pages[0], pages[-1]
        if kernel is not None:
            kernel(queries, keys, values, self._start, out[self._tokens].view_as(queries))
            return
        result = out[self._tokens].view(-1, kv_heads, q.shape[1] // kv_heads, q.shape[2])
        if q.device.type == "cpu" and has_faster_product(q.dtype) and not self._is_short:
            attend_by_products(queries, keys, values, self._start, self._scale, result)
        elif self._start:
            _attend(queries, keys, values, self._start, self._scale, result)
        else:
            _attend_from_start(queries, keys, values, self._scale, result)

    @property
    def _is_short(self) -> bool:
        """Whether torch's attention is faster than oneDNN's products for this row."""
        if (self._end - self._start) * self._end <= _SMALL:
            return True
        return not self._start and self._end <= _SHORT and mkl_keeps_up()

    @property
    def buffered(self) -> int:
        """Elements of the buffer that a call fills."""
        return 0 if self._cached is None else self._cached.buffered


def native_prefill(
    device: torch.device, dtype: torch.dtype, head_dim: int, group: int, scale: float
) -> PrefillKernel | None:
    """The native code for a chunk of a prompt, compiled by its first caller; None where torch is to
    attend."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return None
    return prefill_kernel(head_dim, group, scale, dtype)


def prefill_rows(
    kv: KVCache,
    batch: AttentionBatch,
    scale: float,
    rows: Sequence[int],
    copies: Sequence[ContiguousKV | None],
) -> list[PrefillRow]:
    """These rows of `batch`, and the copy of each."""
    bounds = list(accumulate(batch.counts, initial=0))
    return [
        PrefillRow(kv, batch, row, bounds[row], scale, copy)
        for row, copy in zip(rows, copies, strict=True)
    ]


def _attend_from_start(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    """torch's causal attention of a sequence's first tokens. It skips the scores above the
    diagonal, but only where queries and keys begin at the same token."""
    tokens, kv_heads, group, head_dim = out.shape
    grouped = q.view(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys = k[:, None].expand(-1, group, -1, -1)
    values = v[:, None].expand(-1, group, -1, -1)
    whole = F.scaled_dot_product_attention(grouped, keys, values, is_causal=True, scale=scale)
    out.copy_(whole.permute(2, 0, 1, 3))


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """torch's attention, in tiles of queries: a tile bounds the size of its mask."""
    tokens, kv_heads, group, head_dim = out.shape
    grouped = q.view(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys = k[:, None].expand(-1, group, -1, -1)
    values = v[:, None].expand(-1, group, -1, -1)
    step = max(16, _TILE_MASK // k.shape[1])

    def attend(first: int) -> None:
        last = min(first + step, tokens)
        end = start + last
        mask = q.new_full((last - first, end), float("-inf")).triu_(start + first + 1)
        tile = F.scaled_dot_product_attention(
            grouped[:, :, first:last], keys[:, :, :end], values[:, :, :end], mask, scale=scale
        )
        out[first:last] = tile.permute(2, 0, 1, 3)

    firsts = range(0, tokens, step)
    alone = q.device.type != "cpu" or len(firsts) <= FEW_TILES
    # The last tiles have the most keys, so they come first.
    share(reversed(firsts), attend, alone=alone)
