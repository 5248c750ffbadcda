"""The KV cache: writing to it, and attention over it."""

from __future__ import annotations

from typing import Any

import torch

from asyncinfer.kernels import reference
from asyncinfer.kernels.dispatch import check, dispatched
from asyncinfer.kernels.ops.checks import check_caches, check_range, holds

__all__ = ["kv_write", "paged_attention", "rope_kv_write"]


def _check_kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    check(k.ndim == 3 and k.shape == v.shape and k.dtype is v.dtype, "kv_write", k, v)
    check_caches("kv_write", k, k_cache, v_cache, slot_mapping, k_scales, v_scales)
    check(k.shape[1:] == (k_cache.shape[1], k_cache.shape[3]), "kv_write", k, k_cache)


def _check_rope_kv_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    **_: Any,
) -> None:
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


def _check_paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    *,
    sinks: torch.Tensor | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    **options: Any,
) -> None:
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
        check(right and holds(k_cache, q.dtype), name, q, k_cache, scales)
    for field, low, high in _BOUNDS:
        check_range(name, field, options.get(field), low, rows if field == "decode_rows" else high)
    for field, value in (("scale", scale), ("softcap", options.get("softcap"))):
        if value is not None and not value > 0:
            raise ValueError(f"kernel {name}: {field} is {value}, not above 0")


#: Options of `paged_attention`, the least and the largest value of each; None: without bound.
_BOUNDS = (
    ("window", 1, None),
    ("decode_rows", 0, None),
    ("max_query_len", 1, 8),
    ("parts", 1, None),
    ("chunk", 1, None),
)

kv_write = dispatched(reference.kv_write, _check_kv_write)
rope_kv_write = dispatched(reference.rope_kv_write, _check_rope_kv_write)
paged_attention = dispatched(reference.paged_attention, _check_paged_attention)
