"""Causal attention over a paged KV cache, one row after another."""

from __future__ import annotations

import torch

from asyncinfer.kernels.workspace import AttentionWorkspace

__all__ = ["paged_attention"]


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    decode_rows: int = 0,
    max_query_len: int = 1,
    parts: int | None = None,
    chunk: int | None = None,
    workspace: AttentionWorkspace | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T) v over each row's own tokens, in float32 (float64 for such a `q`).

    `q` `[tokens, heads, head_dim]`; caches `[num_blocks, kv_heads, block_size, head_dim]`;
    `block_tables` int32 `[rows, max_blocks]`; `seq_lens` int32 `[rows]`, this step's tokens
    included; `query_starts` int32 `[rows + 1]`. A row's last query token sees all of its
    `seq_lens`, the one before it one fewer. Keys beyond a row's length, or before every window of
    its queries, are never read. A row of length 0 gives zeros. Gives `[tokens, heads, head_dim]` in
    the dtype of `q`.

    - `window`: a query at position `p` sees the keys `p - window + 1 .. p`.
    - `softcap`: scores become `softcap * tanh(scores / softcap)`, after `scale`.
    - `sinks` float32 `[heads]`: the logit of an additional key with value zero in each head's
      softmax.
    - `k_scales`, `v_scales` float32 `[num_blocks, kv_heads, block_size]`: an fp8 (e4m3) or int8
      cache holds keys and values divided by them.

    The other arguments say how a GPU divides the work and change nothing here; see the Triton
    kernel.
    """
    group = q.shape[1] // k_cache.shape[1]
    block_size = k_cache.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q)
    bounds = query_starts.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        first, last = bounds[row], bounds[row + 1]
        if first == last or length == 0:
            continue
        position = torch.arange(length - (last - first), length, device=q.device)[:, None]
        begin = max(0, length - (last - first) - window + 1) if window is not None else 0
        at = torch.arange(begin, length, device=q.device)
        slots = (block_tables[row].long()[at // block_size], at % block_size)
        k = _tokens(k_cache, k_scales, slots, dtype).repeat_interleave(group, dim=0)
        v = _tokens(v_cache, v_scales, slots, dtype).repeat_interleave(group, dim=0)
        scores = torch.einsum("qhd,hkd->hqk", q[first:last].to(dtype), k) * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        hidden = at > position
        if window is not None:
            hidden |= at <= position - window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.to(dtype)[:, None, None].expand(-1, last - first, 1)
            scores = torch.cat((scores, sink), dim=-1)
        weights = scores.softmax(dim=-1)[:, :, : len(at)]
        out[first:last] = torch.einsum("hqk,hkd->qhd", weights, v).to(q.dtype)
    return out


def _tokens(
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    slots: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
) -> torch.Tensor:
    """`[kv_heads, n, head_dim]`: the cache at n slots, `(blocks, offsets)`."""
    blocks, offsets = slots
    tokens = cache.transpose(1, 2)[blocks, offsets].to(dtype)
    if scales is not None:
        tokens = tokens * scales.transpose(1, 2)[blocks, offsets].to(dtype)[:, :, None]
    return tokens.transpose(0, 1)
