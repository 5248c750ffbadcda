"""Copies scattered pages into one contiguous tensor."""

from __future__ import annotations

import math

import torch

from asyncinfer.attention.kv import KVCache

__all__ = ["Gather"]


class Gather:
    """Gathers keys and values of the blocks in `tables` int64 `[rows, blocks]`, layer by layer."""

    def __init__(self, kv: KVCache, tables: torch.Tensor, capacity: int = 0) -> None:
        """`capacity`: tokens of a row that the copy has room for; no fewer than its blocks have.
        What is beyond them is not written."""
        parts, blocks, kv_heads, size = kv.storage.shape[1:5]
        head_dim = kv.head_dim
        keys = tables[:, None] * kv_heads + torch.arange(kv_heads, device=tables.device)[:, None]
        #: `[parts, rows, kv_heads, blocks]` of a layer seen as `[parts * num_blocks * kv_heads,
        #: block_size, width]`.
        self._index = torch.cat([keys + part * blocks * kv_heads for part in range(parts)])
        self._index = self._index.flatten()
        self._page = (size, head_dim)
        self._tokens = tables.shape[1] * size
        #: Shape of the copy.
        self.shape = (parts, len(tables), kv_heads, max(capacity, self._tokens), head_dim)
        self._kv = kv
        #: Elements of the buffer that a call fills.
        self.size = math.prod(self.shape)

    def __call__(self, layer: int, buffer: torch.Tensor) -> torch.Tensor:
        """`[2, rows, kv_heads, tokens, head_dim]` of `layer`, keys then values, in the first `size`
        elements of `buffer`, which is of the cache's `dtype`. Where values are the keys, both are
        the same memory."""
        gathered = buffer[: self.size].view(self.shape)
        pages, gather = self._kv.pages[layer], self._kv.format.gather
        if self.shape[3] == self._tokens:
            gather(pages, self._index, gathered.view(-1, *self._page))
        else:
            # Each head has room behind its tokens.
            heads = gathered.flatten(0, 2)[:, : self._tokens]
            for head, index in zip(heads, self._index.view(len(heads), -1), strict=True):
                gather(pages, index, head.view(-1, *self._page))
        return gathered if self.shape[0] == 2 else gathered.expand(2, *self.shape[1:])
