"""Causal attention over a paged KV cache, by the split-KV decode kernel and the prefill kernel."""

from __future__ import annotations

import torch

from asyncinfer.kernels.triton.decode_attention import decode_attention
from asyncinfer.kernels.triton.kv_layout import KVLayout
from asyncinfer.kernels.triton.prefill_attention import prefill_attention
from asyncinfer.kernels.workspace import (
    LEAST_PART,
    AttentionWorkspace,
    decode_parts,
    invariant_parts,
)

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
    """As the reference kernel. Query tokens that belong to no row have an undefined result.

    The first `decode_rows` rows go to the decode kernel, and have at most `max_query_len` (1 to 8)
    query tokens each. For each KV head the decode kernel divides the keys of all its rows over up
    to `parts` programs, of at least `chunk` keys where a row has so many. The other rows go to the
    prefill kernel. A kernel without rows is not launched. Any row is right in either kernel, but
    the prefill kernel is slow for a long context with few query tokens.

    No launch depends on what the device's tensors hold. So with `parts` and a `workspace` given a
    CUDA graph may capture the launches, and replay them for other lengths. Rows of length 0 fill up
    such a graph's batch, and cost next to nothing.

    By default `chunk` is 128, and `parts` is what occupies a large GPU. A row's bits do not depend
    on the other rows as long as `(parts - decode_rows) * chunk` is at least the sum of all rows'
    lengths. The default of `parts` is so large where `chunk` is given.

    Raises `ValueError` where `parts` is not above `decode_rows`, where the `workspace` is too
    small, and for a cache that `KVLayout` refuses.
    """
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kv = KVLayout(k_cache, v_cache, k_scales, v_scales)
    if decode_rows:
        _, heads, head_dim = q.shape
        capacity = block_tables.shape[1] * k_cache.shape[2]
        if parts is None and chunk is not None:
            parts = invariant_parts(decode_rows, capacity, chunk)
        elif parts is None:
            parts = decode_parts(decode_rows, kv.heads, capacity)
        elif parts <= decode_rows:
            raise ValueError(
                f"paged_attention: parts is {parts}, not above decode_rows, which is {decode_rows}"
            )
        if workspace is None:
            workspace = AttentionWorkspace.allocate(
                decode_rows, heads, head_dim, parts, q.device, max_query_len=max_query_len
            )
        elif not workspace.holds(decode_rows, heads, head_dim, parts, max_query_len):
            raise ValueError(
                f"paged_attention: the workspace is too small for {decode_rows} rows of "
                f"{max_query_len} query tokens, {heads} heads of {head_dim}, {parts} parts"
            )
        decode_attention(
            q,
            kv,
            sinks,
            block_tables,
            seq_lens,
            query_starts,
            out,
            scale,
            window=window,
            softcap=softcap,
            rows=decode_rows,
            max_query_len=max_query_len,
            parts=parts,
            chunk=chunk or LEAST_PART,
            workspace=workspace,
        )
    if seq_lens.shape[0] > decode_rows:
        prefill_attention(
            q,
            kv,
            sinks,
            block_tables,
            seq_lens,
            query_starts,
            out,
            scale,
            window=window,
            softcap=softcap,
            first_row=decode_rows,
        )
    return out
