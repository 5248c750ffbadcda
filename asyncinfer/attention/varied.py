"""Attention with a window, a soft cap or sinks, in torch's own operators.

Rows are gathered in groups of similar length. Scores are computed tile by tile, since torch's
attention takes neither a soft cap nor sinks. Only pages with a key that some query sees are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from asyncinfer.attention.batch import AttentionBatch
from asyncinfer.attention.decode import few_rows
from asyncinfer.attention.gather import Gather
from asyncinfer.attention.kv import KVCache
from asyncinfer.attention.variant import AttentionVariant
from asyncinfer.kernels.onednn import torch_is_slow
from asyncinfer.kernels.threads import FEW_TILES, share

__all__ = ["VariedAttention"]

#: Scores of one tile.
_TILE_SCORES = 1 << 21
#: Most query tokens of a tile: a larger tile computes more outside the window than it gains.
_TILE_TOKENS = 128
#: A row of few query tokens sees at least this share of the keys that its group's longest row sees.
_SPREAD = 0.5


class VariedAttention:
    """Attention of one forward pass for the layers of one window."""

    def __init__(
        self, kv: KVCache, batch: AttentionBatch, scale: float, window: int | None
    ) -> None:
        self._scale = scale
        tokens = list(accumulate(batch.counts, initial=0))
        few = few_rows(batch)
        groups = _decode_groups(batch, few, window)
        groups += [[row] for row in range(len(batch.counts)) if row not in frozenset(few)]
        self._groups = [
            _Group(kv, batch, rows, [tokens[row] for row in rows], window) for rows in groups
        ]
        #: Elements of the largest gather's buffer.
        self.size = max((group.gather.size for group in self._groups), default=0)

    def __call__(
        self, layer: int, q: torch.Tensor, variant: AttentionVariant, buffer: torch.Tensor
    ) -> torch.Tensor:
        """Attend with `q` `[tokens, heads, head_dim]`, whose keys and values are in the cache;
        gives `[tokens, heads * head_dim]`. `buffer` takes the gathered pages."""
        out = torch.empty_like(q)
        for group in self._groups:
            keys, values = group.gather(layer, buffer)
            self._attend(group, q, keys, values, variant, out)
        return out.flatten(1)

    def _attend(
        self,
        group: _Group,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        variant: AttentionVariant,
        out: torch.Tensor,
    ) -> None:
        """Fill the group's tokens of `out`, shaped as `q`, tile by tile."""
        rows, kv_heads = keys.shape[:2]
        queries = q.index_select(0, group.tokens)
        queries = queries.view(rows, -1, kv_heads, q.shape[1] // kv_heads, q.shape[2])
        if torch_is_slow(q):
            queries, keys, values = queries.float(), keys.float(), values.float()
        tokens = group.tokens.view(rows, -1)

        def attend(tile: tuple[int, int]) -> None:
            first, last = tile
            seen, hidden = group.mask(first, last)
            part = queries[:, first:last].transpose(1, 2)
            result = self._tile(part, keys[:, :, seen], values[:, :, seen], hidden, variant)
            at = tokens[:, first:last].flatten()
            result = result.transpose(1, 2).reshape(-1, *q.shape[1:])
            out.index_copy_(0, at, result.to(out.dtype))

        tiles = group.tiles(q.shape[1])
        alone = q.device.type != "cpu" or len(tiles) <= FEW_TILES
        # The last tiles have the most keys, so they come first.
        share(reversed(tiles), attend, alone=alone)

    def _tile(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        hidden: torch.Tensor,
        variant: AttentionVariant,
    ) -> torch.Tensor:
        """`q` `[rows, kv_heads, queries, group, head_dim]`, `k` and `v` `[rows, kv_heads, keys,
        head_dim]`, `hidden` bool `[rows, 1, queries, 1, keys]`; gives the shape of `q`."""
        rows, kv_heads, queries, group, head_dim = q.shape
        flat = q.reshape(rows, kv_heads, queries * group, head_dim)
        scores = (flat @ k.transpose(2, 3)).float().mul_(self._scale)
        if variant.softcap is not None:
            scores.div_(variant.softcap).tanh_().mul_(variant.softcap)
        scores = scores.view(rows, kv_heads, queries, group, -1)
        scores.masked_fill_(hidden, float("-inf"))
        if variant.sinks is None:
            weights = scores.softmax(dim=-1)
        else:
            sinks = variant.sinks.view(kv_heads, 1, group, 1).expand(*scores.shape[:4], 1)
            weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
        weights = weights.to(v.dtype).reshape(rows, kv_heads, queries * group, -1)
        return (weights @ v).view(q.shape)


class _Group:
    """Rows of few query tokens, or one longer row. Visible keys are padded to the row that sees
    most, and query tokens to the row that has most, by repeating each row's last one."""

    def __init__(
        self,
        kv: KVCache,
        batch: AttentionBatch,
        rows: list[int],
        tokens: list[int],
        window: int | None,
    ) -> None:
        device = batch.block_tables.device
        size = batch.block_size
        firsts = [_first_key(batch, row, window) // size for row in rows]
        ends = [batch.starts[row] + batch.counts[row] for row in rows]
        starts = [batch.starts[row] for row in rows]
        blocks = max(-(-end // size) - first for first, end in zip(firsts, ends, strict=True))
        counts = [batch.counts[row] for row in rows]
        row, token, first, end, start, count = torch.tensor(
            [rows, tokens, firsts, ends, starts, counts], device=device
        )[:, :, None]
        queries = torch.arange(max(counts), device=device).minimum(count - 1)
        #: int64 `[rows * queries]`: the group's query tokens, row after row.
        self.tokens = (token + queries).flatten()
        at = first + torch.arange(blocks, device=device)
        # Padding must be finite, so a row is padded with the first block that it sees.
        at = torch.where(at * size < end, at, first)
        self.gather = Gather(kv, batch.block_tables[row, at].long())
        #: Positions, int64: of the gathered keys `[rows, keys]`, of the queries `[rows, queries]`.
        self._keys = first * size + torch.arange(blocks * size, device=device)
        self._queries = start + queries
        self._window = window
        #: For a single row: the index of the gathered key that its first query token has written.
        self._own = starts[0] - firsts[0] * size if len(rows) == 1 else None

    def tiles(self, heads: int) -> list[tuple[int, int]]:
        """Ranges of each row's queries, cut to bound the scores of a tile."""
        count = self._queries.shape[1]
        step = min(max(16, _TILE_SCORES // (heads * self._keys.shape[1])), _TILE_TOKENS)
        return [(first, min(first + step, count)) for first in range(0, count, step)]

    def mask(self, first: int, last: int) -> tuple[slice, torch.Tensor]:
        """The gathered keys that any query in `first .. last - 1` sees, and a mask of the keys that
        each query does not see: bool `[rows, 1, queries, 1, keys]`."""
        seen = slice(None)
        if self._own is not None:
            begin = 0 if self._window is None else self._own + first - self._window + 1
            seen = slice(max(0, begin), self._own + last)
        keys, queries = self._keys[:, None, seen], self._queries[:, first:last, None]
        hidden = keys > queries
        if self._window is not None:
            hidden |= keys <= queries - self._window
        return seen, hidden[:, None, :, None]


def _first_key(batch: AttentionBatch, row: int, window: int | None) -> int:
    """Position of the first key that a query of the row sees."""
    return 0 if window is None else max(0, batch.starts[row] - window + 1)


def _decode_groups(
    batch: AttentionBatch, rows: Sequence[int], window: int | None
) -> list[list[int]]:
    """These rows in groups that see similarly many keys, longest first."""
    seen = {
        row: batch.starts[row] + batch.counts[row] - _first_key(batch, row, window) for row in rows
    }
    groups: list[list[int]] = []
    for row in sorted(seen, key=seen.__getitem__, reverse=True):
        roomy = groups and seen[row] + batch.block_size >= _SPREAD * seen[groups[-1][0]]
        if roomy:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
