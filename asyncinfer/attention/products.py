"""Causal attention of one row with oneDNN's products, on CPUs."""

from __future__ import annotations

import torch

from asyncinfer.kernels import onednn
from asyncinfer.kernels.threads import share

__all__ = ["attend_by_products", "has_faster_product"]

#: Scores of one tile, over the query heads of one KV head. They exceed a core's cache, because a
#: product lays out the keys again for each tile, which costs more.
_TILE_SCORES = 1 << 20
#: The most query tokens of a tile: a larger one computes more above the diagonal than it saves.
_TILE_TOKENS = 128


def has_faster_product(dtype: torch.dtype) -> bool:
    """Whether oneDNN's products are faster than torch's attention with MKL."""
    # In bfloat16, torch's attention keeps scores in float32, while oneDNN's product rounds them.
    return dtype is torch.float32 and onednn.available(dtype) and not onednn.mkl_is_fast()


def attend_by_products(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Fill `out` `[tokens, kv_heads, group, head_dim]` with causal attention of `q` `[tokens,
    heads, head_dim]`, which begins at token `start`, to `k` and `v` `[kv_heads, keys, head_dim]`.

    Tile by tile. On processors that MKL has no code for, the products are 2 to 3 times as fast as
    torch's attention. A tile computes no score beyond its last token.
    """
    tokens, kv_heads, group, head_dim = out.shape
    grouped = q.view(tokens, kv_heads, group, head_dim).transpose(0, 1) * scale
    grouped = grouped.reshape(kv_heads, tokens * group, head_dim)
    step = min(_TILE_TOKENS, max(8, _TILE_SCORES // (group * k.shape[1])))
    future = q.new_full((step, step), float("-inf")).triu_(1)[:, None]

    def attend(tile: tuple[int, int]) -> None:
        first, head = tile
        last = min(first + step, tokens)
        end = start + last
        scores = onednn.linear(grouped[head, first * group : last * group], k[head, :end])
        diagonal = scores.view(last - first, group, end)[:, :, start + first :]
        diagonal.add_(future[: last - first, :, : last - first])
        weights = torch.softmax(scores, dim=-1)
        result = onednn.linear(weights, v[head, :end].t())
        out[first:last, head] = result.view(last - first, group, head_dim)

    tiles = [(first, head) for first in range(0, tokens, step) for head in range(kv_heads)]
    # The last tiles have the most keys, so they come first.
    share(reversed(tiles), attend, alone=len(tiles) <= kv_heads)
