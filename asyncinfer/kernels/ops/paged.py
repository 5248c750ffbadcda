"""The KV cache: writing to it, and attention over it."""

from __future__ import annotations

import torch

from asyncinfer.kernels import twins
from asyncinfer.kernels.ops.checks import QUANTISED, check, check_caches, check_range
from asyncinfer.kernels.workspace import AttentionWorkspace

__all__ = ["kv_write", "paged_attention", "rope_kv_write"]


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    reference: bool = False,
) -> None:
    """`k`, `v` `[tokens, kv_heads, head_dim]` into caches `[num_blocks, kv_heads, block_size,
    head_dim]` at `slot_mapping` int64 `[tokens]`, -1 for nowhere; see the reference twin."""
    check(k.ndim == 3 and k.shape == v.shape and k.dtype is v.dtype, "kv_write", k, v)
    check_caches("kv_write", k, k_cache, v_cache, slot_mapping, k_scales, v_scales)
    check(k.shape[1:] == (k_cache.shape[1], k_cache.shape[3]), "kv_write", k, k_cache)
    run = twins.twin("kv_write", k, reference)
    run(k, v, k_cache, v_cache, slot_mapping, k_scales=k_scales, v_scales=v_scales)


def rope_kv_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    reference: bool = False,
) -> torch.Tensor:
    """Packed `qkv` `[tokens, heads + 2 * kv_heads, head_dim]`: normalised, rotated, keys and values
    written; gives the queries. See the reference twin."""
    name = "rope_kv_write"
    check(qkv.ndim == 3 and cos.ndim == 3, name, qkv, cos)
    check_caches(name, qkv, k_cache, v_cache, slot_mapping, k_scales, v_scales)
    tokens, packed, head_dim = qkv.shape
    check(packed > 2 * k_cache.shape[1] and head_dim == k_cache.shape[3], name, qkv, k_cache)
    rotary = cos.shape[2]
    right = cos.shape == sin.shape == (tokens, 1, rotary) and 0 < rotary <= head_dim
    right = right and rotary % 2 == 0 and cos.dtype is sin.dtype is torch.float32
    check(right, name, qkv, cos, sin)
    for norm in (q_norm, k_norm):
        check(norm is None or norm.shape == (head_dim,), name, qkv, norm)
    result: torch.Tensor = twins.twin(name, qkv, reference)(
        qkv,
        cos,
        sin,
        k_cache,
        v_cache,
        slot_mapping,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        plus_one=plus_one,
        k_scales=k_scales,
        v_scales=v_scales,
    )
    return result


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
    splits: int | None = None,
    chunk: int | None = None,
    workspace: AttentionWorkspace | None = None,
    reference: bool = False,
) -> torch.Tensor:
    """Causal attention of `q` `[tokens, heads, head_dim]` over paged KV; see the reference twin for
    what it computes, the Triton one for `decode_rows` and what follows it."""
    name = "paged_attention"
    check(q.ndim == 3 and k_cache.ndim == 4, name, q, k_cache)
    check(k_cache.shape == v_cache.shape and k_cache.dtype is v_cache.dtype, name, k_cache, v_cache)
    heads, rows = q.shape[1], seq_lens.shape[0]
    check(q.shape[2] == k_cache.shape[3] and heads % k_cache.shape[1] == 0, name, q, k_cache)
    right = block_tables.ndim == 2 and block_tables.shape[0] == rows
    right = right and query_starts.shape == (rows + 1,)
    check(right, name, block_tables, seq_lens, query_starts)
    check(sinks is None or (sinks.shape, sinks.dtype) == ((heads,), torch.float32), name, q, sinks)
    expected = None if k_cache.dtype is q.dtype else k_cache.shape[:3]
    for scales in (k_scales, v_scales):
        right = (None if scales is None else scales.shape) == expected
        right = right and (scales is None or scales.dtype is torch.float32)
        check(right and k_cache.dtype in (q.dtype, *QUANTISED), name, q, k_cache, scales)
    check_range(name, "window", window, 1, None)
    check_range(name, "decode_rows", decode_rows, 0, rows)
    check_range(name, "max_query_len", max_query_len, 1, 8)
    check_range(name, "splits", splits, 1, None)
    check_range(name, "chunk", chunk, 1, None)
    for field, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not value > 0:
            raise ValueError(f"kernel {name}: {field} is {value}, not above 0")
    result: torch.Tensor = twins.twin(name, q, reference)(
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        query_starts,
        scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        k_scales=k_scales,
        v_scales=v_scales,
        decode_rows=decode_rows,
        max_query_len=max_query_len,
        splits=splits,
        chunk=chunk,
        workspace=workspace,
    )
    return result
