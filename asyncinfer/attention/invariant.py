"""Attention whose result for a token is the same to the last bit in every batch.

The result of a floating-point sum depends on its order, and a library chooses the order by the
shapes of its arguments. So the shapes here depend on a token's position alone. A sequence is cut
into tiles of `TILE` positions, counted from its beginning. A tile's queries are always computed
together, over all keys that one of them sees up to the tile's end. Queries outside the step are
zero, and keys that are not stored are zero and masked; neither changes another query's result.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from asyncinfer.attention.batch import AttentionBatch
from asyncinfer.attention.gather import Gather
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
                self._tiles.append(_Tile(kv, batch, row, token, position, last))
                token, position = token + last - position, last
        self._buffer = torch.empty(0, dtype=kv.dtype, device=slots.device)

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        variant: AttentionVariant | None = None,
    ) -> torch.Tensor:
        at = (self._block, slice(None), self._offset)
        for pages, new in self._kv.encoded(layer, k[: self._real], v[: self._real]):
            pages[at] = new
        out = q.new_zeros(q.shape)
        variant = variant or _PLAIN
        for tile in self._tiles:
            keys = tile.keys(variant.window)
            if self._buffer.numel() < keys.gather.size:
                self._buffer = self._buffer.new_empty(keys.gather.size)
            k, v = keys.gather(layer, self._buffer)[:, 0].unbind()
            # Keys that are not stored may hold NaN, and 0 * NaN is NaN. A library may pad a query
            # with zeros, and multiply those with the next token's keys.
            for other in keys.others:
                k[:, other] = v[:, other] = 0.0
            out[tile.tokens] = self._attend(tile, q, k, v, keys.hidden, variant)
        return out.flatten(1)

    def _attend(
        self,
        tile: _Tile,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        hidden: torch.Tensor,
        variant: AttentionVariant,
    ) -> torch.Tensor:
        """`[queries, heads, head_dim]` of the tile's tokens; `k` and `v` `[kv_heads, keys,
        head_dim]` are its sequence's, `hidden` `[TILE, keys]` those that a query does not see."""
        _, heads, head_dim = q.shape
        kv_heads = k.shape[0]
        group = heads // kv_heads
        queries = q.new_zeros(TILE, kv_heads, group, head_dim)
        queries[tile.queries] = q[tile.tokens].view(-1, kv_heads, group, head_dim)
        grouped = queries.transpose(0, 1).reshape(kv_heads, TILE * group, head_dim)
        scores = torch.bmm(grouped, k.transpose(1, 2)).float().mul_(self._scale)
        if variant.softcap is not None:
            scores.div_(variant.softcap).tanh_().mul_(variant.softcap)
        scores = scores.view(kv_heads, TILE, group, -1)
        scores.masked_fill_(hidden[:, None], float("-inf"))
        if variant.sinks is not None:
            sinks = variant.sinks.view(kv_heads, 1, group, 1).expand(-1, TILE, -1, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(dim=-1)[..., : k.shape[1]].to(v.dtype)
        result = torch.bmm(weights.reshape(kv_heads, TILE * group, -1), v)
        result = result.view(kv_heads, TILE, group, head_dim).transpose(0, 1)
        return result[tile.queries].reshape(-1, heads, head_dim)


class _Tile:
    """The queries of one row at positions `position .. last - 1`, all within one tile."""

    def __init__(
        self,
        kv: KVCache,
        batch: AttentionBatch,
        row: int,
        token: int,
        position: int,
        last: int,
    ) -> None:
        self._begin = position // TILE * TILE
        self.tokens = slice(token, token + last - position)
        #: The same queries, counted from the tile's first position.
        self.queries = slice(position - self._begin, last - self._begin)
        self._kv, self._table = kv, batch.block_tables[row]
        self._position, self._last = position, last
        #: By window; made at a layer's first use.
        self._keys: dict[int | None, _Keys] = {}

    def keys(self, window: int | None) -> _Keys:
        """The keys that the tile's queries see, each at most `window` of them (None: all)."""
        if window not in self._keys:
            self._keys[window] = self._seen(window)
        return self._keys[window]

    def _seen(self, window: int | None) -> _Keys:
        size, device = self._kv.block_size, self._table.device
        # The first key that any query of the tile sees, and the first that this step's queries see.
        low = 0 if window is None else max(0, self._begin - window + 1)
        seen = 0 if window is None else max(0, self._position - window + 1)
        first, held, used = low // size, seen // size, -(-self._last // size)
        at = torch.arange(first, -(-(self._begin + TILE) // size), device=device)
        keys = torch.arange(first * size, first * size + len(at) * size, device=device)
        # A block that is not stored is replaced by one that is, whose keys are then masked.
        at.masked_fill_((at < held) | (at >= used), held)
        positions = torch.arange(self._begin, self._begin + TILE, device=device)[:, None]
        hidden = keys > positions
        if window is not None:
            hidden |= keys <= positions - window
        return _Keys(
            Gather(self._kv, self._table.index_select(0, at).long()[None]),
            hidden,
            (slice(0, seen - first * size), slice(self._last - first * size, None)),
        )


class _Keys(NamedTuple):
    """The keys of a tile."""

    gather: Gather
    #: bool `[TILE, keys]`: the keys that a query does not see.
    hidden: torch.Tensor
    #: The keys before and behind those that are stored.
    others: tuple[slice, slice]
