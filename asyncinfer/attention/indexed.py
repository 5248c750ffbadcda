"""Sparse attention to tokens that an indexer chooses (DeepSeek-V3.2, 2025), exactly: all tokens
with the best scores are found, and no score is rounded.

The cache holds one vector of each token: attention's key and value, followed by the indexer's key.
Rows are computed one after another, with torch's operators.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

from asyncinfer.attention.batch import AttentionBatch
from asyncinfer.attention.gather import Gather
from asyncinfer.attention.kv import KVCache
from asyncinfer.attention.variant import AttentionVariant

__all__ = ["IndexQueries", "IndexedAttention"]

#: Most scores of one tile, over the indexer's heads.
_TILE_SCORES = 1 << 22
#: Bytes at whose multiples the rows of tensors begin that torch's fused attention takes.
_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """The queries of one layer's indexer. A token's score is the sum over heads of `weights` times
    the positive part of the product of query and key."""

    #: float32 `[tokens, heads, size]`.
    queries: torch.Tensor
    #: float32 `[tokens, heads]`.
    weights: torch.Tensor


class IndexedAttention:
    """Attention of one forward pass, for latent attention with an indexer."""

    def __init__(self, kv: KVCache, batch: AttentionBatch, scale: float, most: int) -> None:
        """`most` is how many tokens a token attends to."""
        self._kv = kv
        self._scale = scale
        self._most = most
        slots = batch.slot_mapping
        self._at = (slots // batch.block_size, slice(None), slots % batch.block_size)
        firsts = accumulate(batch.counts, initial=0)
        self._rows = [
            _QueryRow(kv, batch, row, first)
            for row, first in zip(range(len(batch.counts)), firsts, strict=False)
        ]
        size = max((row.gather.size for row in self._rows), default=0)
        self._buffer = torch.empty(size, dtype=kv.dtype, device=slots.device)

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        variant: AttentionVariant | None = None,
        asked: IndexQueries | None = None,
    ) -> torch.Tensor:
        """As of `Attend`, but that `k` `[tokens, 1, held]` has the indexer's keys behind those of
        attention, which are as wide as `q`. Tokens attend to those with the best scores."""
        assert asked is not None, "the indexer was not asked"
        for pages, new in self._kv.encoded(layer, k, v):
            pages[self._at] = new
        out = torch.empty_like(q)
        for row in self._rows:
            held = row.gather(layer, self._buffer)[0, 0, 0, : row.start + row.count]
            self._attend(row, q, held, asked, out)
        return out.flatten(1)

    def _attend(
        self,
        row: _QueryRow,
        q: torch.Tensor,
        held: torch.Tensor,
        asked: IndexQueries,
        out: torch.Tensor,
    ) -> None:
        """Fill the row's tokens of `out`; `held` `[keys, held]` are its tokens' vectors."""
        heads, width = q.shape[1:]
        step = max(1, _TILE_SCORES // (len(held) * max(heads, asked.weights.shape[1])))
        for begin in range(0, row.count, step):
            tokens = slice(row.first + begin, row.first + min(begin + step, row.count))
            count = tokens.stop - tokens.start
            seen = held[: row.start + begin + count]
            hidden = torch.ones(count, len(seen), dtype=torch.bool, device=q.device)
            hidden.triu_(len(seen) - count + 1)
            if len(seen) > self._most:
                part = IndexQueries(asked.queries[tokens], asked.weights[tokens])
                hidden |= _unwanted(part, seen[:, width:], hidden, self._most)
            keys = seen[:, :width].expand(heads, -1, -1)
            mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden, float("-inf"))
            queries = q[tokens].transpose(0, 1)
            with _suited(queries, keys):
                result = F.scaled_dot_product_attention(
                    queries[None], keys[None], keys[None], mask, scale=self._scale
                )
            out[tokens] = result[0].transpose(0, 1)


class _QueryRow:
    """`count` query tokens of one sequence, the first of the step's being `first`."""

    def __init__(self, kv: KVCache, batch: AttentionBatch, row: int, first: int) -> None:
        self.first, self.start, self.count = first, batch.starts[row], batch.counts[row]
        blocks = -(-(self.start + self.count) // batch.block_size)
        self.gather = Gather(kv, batch.block_tables[row : row + 1, :blocks].long())


def _suited(queries: torch.Tensor, keys: torch.Tensor) -> AbstractContextManager[object]:
    """Torch's attention inside takes these. On a GPU its fused kernels refuse rows that begin
    elsewhere than at multiples of 16 bytes, in place of leaving them to its plain operators."""
    if queries.device.type == "cpu" or all(
        each.stride(-2) * each.itemsize % _ALIGNED == 0 for each in (queries, keys)
    ):
        return nullcontext()
    # Imported here: commands that need no torch import this module.
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)


def _unwanted(
    asked: IndexQueries, keys: torch.Tensor, hidden: torch.Tensor, most: int
) -> torch.Tensor:
    """bool `[tokens, keys]`: the keys that are not among the `most` best of a token. `hidden` are
    the keys that the token may not see."""
    products = (asked.queries @ keys.float().t()).relu_()
    scores = (asked.weights[:, None] @ products)[:, 0].masked_fill_(hidden, float("-inf"))
    chosen = scores.topk(most, dim=-1).indices
    return torch.ones_like(hidden).scatter_(1, chosen, False)
