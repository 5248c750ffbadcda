"""Copies scattered pages into one contiguous tensor."""

from __future__ import annotations

import torch

from asyncinfer.attention.kv import KVCache

__all__ = ["Gather"]


class Gather:
    """Gathers keys and values of the blocks in `tables` int64 `[rows, blocks]`, layer by layer."""

    def __init__(self, kv: KVCache, tables: torch.Tensor) -> None:
        parts, blocks, kv_heads, size = kv.storage.shape[1:5]
        head_dim = kv.head_dim
        keys = tables[:, None] * kv_heads + torch.arange(kv_heads, device=tables.device)[:, None]
        #: `[parts, rows, kv_heads, blocks]` of a layer seen as `[parts * num_blocks * kv_heads,
        #: block_size, width]`.
        self._index = torch.cat([keys + part * blocks * kv_heads for part in range(parts)])
        self._index = self._index.flatten()
        self._page = (size, head_dim)
        #: Shape of the copy.
        self.shape = (parts, tables.shape[0], kv_heads, tables.shape[1] * size, head_dim)
        self._kv = kv
        #: Elements of the buffer that a call fills.
        self.size = self._index.numel() * size * head_dim

    def __call__(self, layer: int, buffer: torch.Tensor) -> torch.Tensor:
        """`[2, rows, kv_heads, blocks * block_size, head_dim]` of `layer`, keys then values, in the
        first `size` elements of `buffer`, which is of the cache's `dtype`. Where values are the
        keys, both are the same memory."""
        target = buffer[: self.size].view(-1, *self._page)
        self._kv.format.gather(self._kv.pages[layer], self._index, target)
        gathered = target.view(self.shape)
        return gathered if self.shape[0] == 2 else gathered.expand(2, *self.shape[1:])
