"""Attention whose result for a token is the same to the last bit whatever is computed with it.

What a sum of floating-point numbers comes to depends on its order, and a library chooses the order
by the shapes it is given. So the shapes here depend on a token's position alone: its sequence is
cut into tiles of `TILE` positions, counted from its beginning, and a tile's queries are always
computed together, over all keys up to the tile's end. Queries that are not asked for are zero, keys
that are not there yet are masked; neither changes what another query gets.
"""

from __future__ import annotations

from typing import Final

import torch

from asyncinfer.attention.batch import AttentionBatch
from asyncinfer.attention.kv import KVCache
from asyncinfer.attention.variant import AttentionVariant

__all__ = ["TILE", "InvariantAttention"]

#: Positions of a tile.
TILE: Final = 16
_PLAIN = AttentionVariant()


class InvariantAttention:
    """Attention of one forward pass, in torch's own operators, one tile after the other."""

    def __init__(self, kv: KVCache, batch: AttentionBatch, scale: float) -> None:
        self._kv = kv
        self._scale = scale
        self._size = batch.block_size
        self._real = sum(batch.counts)
        slots = batch.slot_mapping[: self._real]
        self._block, self._offset = slots // self._size, slots % self._size
        self._tiles: list[_Tile] = []
        token = 0
        for row, (start, count) in enumerate(zip(batch.starts, batch.counts, strict=True)):
            position, end = start, start + count
            while position < end:
                last = min(end, (position // TILE + 1) * TILE)
                self._tiles.append(_Tile(batch, row, token, position, last))
                token, position = token + last - position, last

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        variant: AttentionVariant | None = None,
    ) -> torch.Tensor:
        keys, values = self._kv.k[layer], self._kv.v[layer]
        at = (self._block, slice(None), self._offset)
        keys[at], values[at] = k[: self._real], v[: self._real]
        out = q.new_zeros(q.shape)
        for tile in self._tiles:
            out[tile.tokens] = self._attend(tile, q, keys, values, variant or _PLAIN)
        return out.flatten(1)

    def _attend(
        self,
        tile: _Tile,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        variant: AttentionVariant,
    ) -> torch.Tensor:
        """`[queries, heads, head_dim]` of the tile's tokens."""
        _, heads, head_dim = q.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        queries = q.new_zeros(TILE, kv_heads, group, head_dim)
        queries[tile.queries] = q[tile.tokens].view(-1, kv_heads, group, head_dim)
        grouped = queries.transpose(0, 1).reshape(kv_heads, TILE * group, head_dim)
        k, v = self._gather(keys, tile), self._gather(values, tile)
        # What was never written may be anything; zero times that must be zero.
        v[:, tile.written :] = 0.0
        scores = torch.bmm(grouped, k.transpose(1, 2)).float().mul_(self._scale)
        if variant.softcap is not None:
            scores.div_(variant.softcap).tanh_().mul_(variant.softcap)
        scores = scores.view(kv_heads, TILE, group, -1)
        scores.masked_fill_(tile.hidden(variant.window)[:, None], float("-inf"))
        if variant.sinks is not None:
            sinks = variant.sinks.view(kv_heads, 1, group, 1).expand(-1, TILE, -1, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(dim=-1)[..., : k.shape[1]].to(v.dtype)
        result = torch.bmm(weights.reshape(kv_heads, TILE * group, -1), v)
        result = result.view(kv_heads, TILE, group, head_dim).transpose(0, 1)
        return result[tile.queries].reshape(-1, heads, head_dim)

    def _gather(self, cache: torch.Tensor, tile: _Tile) -> torch.Tensor:
        """`[kv_heads, keys, head_dim]`, in memory of its own."""
        pages = cache.index_select(0, tile.blocks).transpose(0, 1)
        return pages.reshape(cache.shape[1], -1, cache.shape[3])


class _Tile:
    """Some queries of one row, at positions `position .. last - 1` of the same tile."""

    def __init__(
        self, batch: AttentionBatch, row: int, token: int, position: int, last: int
    ) -> None:
        device = batch.block_tables.device
        begin = position // TILE * TILE
        used = -(-last // batch.block_size)
        blocks = -(-(begin + TILE) // batch.block_size)
        # Blocks that are not there yet are read as the first one, and masked.
        at = torch.arange(blocks, device=device)
        at.masked_fill_(at >= used, 0)
        self.tokens = slice(token, token + last - position)
        #: Of the tile's.
        self.queries = slice(position - begin, last - begin)
        self.blocks = batch.block_tables[row].index_select(0, at).long()
        self.written = last
        self._keys = torch.arange(blocks * batch.block_size, device=device)
        self._positions = torch.arange(begin, begin + TILE, device=device)[:, None]

    def hidden(self, window: int | None) -> torch.Tensor:
        """bool `[TILE, keys]`: what a query does not see."""
        hidden = self._keys > self._positions
        if window is not None:
            hidden |= self._keys <= self._positions - window
        return hidden
