"""Causal attention over a paged KV cache, one row after another."""

from __future__ import annotations

import torch

__all__ = ["paged_attention"]


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """softmax(scale * q k^T) v over each row's own tokens, in float32.

    `q` `[tokens, heads, head_dim]`; caches `[num_blocks, kv_heads, block_size, head_dim]`;
    `block_tables` int32 `[rows, max_blocks]`; `seq_lens` int32 `[rows]`, this step's tokens
    included; `query_starts` int32 `[rows + 1]`. A row's last query token sees all of its
    `seq_lens`, the one before it one fewer. What lies beyond a row's length is never read.
    Gives `[tokens, heads, head_dim]` in the dtype of `q`.
    """
    group = q.shape[1] // k_cache.shape[1]
    block_size = k_cache.shape[2]
    out = torch.empty_like(q)
    bounds = query_starts.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        first, last = bounds[row], bounds[row + 1]
        if first == last:
            continue
        blocks = block_tables[row, : -(-length // block_size)].long()
        k = _tokens(k_cache[blocks], length, group)
        v = _tokens(v_cache[blocks], length, group)
        scores = torch.einsum("qhd,hkd->hqk", q[first:last].float(), k) * scale
        position = torch.arange(length - (last - first), length, device=q.device)
        future = torch.arange(length, device=q.device) > position[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        out[first:last] = torch.einsum("hqk,hkd->qhd", weights, v).to(q.dtype)
    return out


def _tokens(blocks: torch.Tensor, length: int, group: int) -> torch.Tensor:
    """`[heads, length, head_dim]` of `[n, kv_heads, block_size, head_dim]`, each KV head repeated
    for the `group` query heads that share it."""
    flat = blocks.transpose(0, 1).flatten(1, 2)
    return flat[:, :length].float().repeat_interleave(group, dim=0)
