"""The kernels' one door: checks shapes and dtypes, then picks the twin for the tensor's device.

`reference=True` takes the torch twin wherever the tensors are; else CUDA tensors go to the Triton
twin if there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncinfer.kernels import reference as _reference
from asyncinfer.kernels import triton as _triton

__all__ = ["kv_write", "paged_attention", "rms_norm", "rope", "silu_mul"]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, reference: bool = False
) -> torch.Tensor:
    """`x` `[tokens, size]`, `weight` `[size]` of the same dtype."""
    _check(weight.ndim == 1 and x.shape[-1] == weight.shape[0], "rms_norm", x, weight)
    result: torch.Tensor = _twin("rms_norm", x, reference)(x, weight, eps)
    return result


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, reference: bool = False
) -> torch.Tensor:
    """`x` `[tokens, heads, head_dim]`; `cos`, `sin` float32 `[tokens, 1, head_dim]`, the first half
    of the sines negated."""
    expected = (x.shape[0], 1, x.shape[-1])
    right = x.ndim == 3 and cos.shape == expected and sin.shape == expected
    _check(right and cos.dtype is sin.dtype is torch.float32, "rope", x, cos, sin)
    result: torch.Tensor = _twin("rope", x, reference)(x, cos, sin)
    return result


def silu_mul(gate_up: torch.Tensor, *, reference: bool = False) -> torch.Tensor:
    """`gate_up` `[tokens, 2 * size]`, gate before up."""
    _check(gate_up.ndim == 2 and gate_up.shape[1] % 2 == 0, "silu_mul", gate_up)
    result: torch.Tensor = _twin("silu_mul", gate_up, reference)(gate_up)
    return result


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    reference: bool = False,
) -> None:
    """`k`, `v` `[tokens, kv_heads, head_dim]` into caches `[num_blocks, kv_heads, block_size,
    head_dim]` at `slot_mapping` int64 `[tokens]`."""
    _check(k_cache.ndim == 4 and k_cache.shape == v_cache.shape, "kv_write", k_cache, v_cache)
    expected = (slot_mapping.shape[0], k_cache.shape[1], k_cache.shape[3])
    _check(k.shape == expected and v.shape == expected, "kv_write", k, v, slot_mapping)
    _check(k.dtype is v.dtype is k_cache.dtype is v_cache.dtype, "kv_write", k, v, k_cache)
    _check(slot_mapping.dtype is torch.int64, "kv_write", slot_mapping)
    _twin("kv_write", k, reference)(k, v, k_cache, v_cache, slot_mapping)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    *,
    reference: bool = False,
) -> torch.Tensor:
    """Causal attention of `q` `[tokens, heads, head_dim]` over paged KV; see the reference twin."""
    _check(q.ndim == 3 and k_cache.ndim == 4, "paged_attention", q, k_cache)
    _check(k_cache.shape == v_cache.shape, "paged_attention", k_cache, v_cache)
    fits = q.shape[2] == k_cache.shape[3] and q.shape[1] % k_cache.shape[1] == 0
    _check(fits and q.dtype is k_cache.dtype is v_cache.dtype, "paged_attention", q, k_cache)
    rows = seq_lens.shape[0]
    right = block_tables.ndim == 2 and block_tables.shape[0] == rows
    right = right and query_starts.shape == (rows + 1,)
    _check(right, "paged_attention", block_tables, seq_lens, query_starts)
    result: torch.Tensor = _twin("paged_attention", q, reference)(
        q, k_cache, v_cache, block_tables, seq_lens, query_starts, scale
    )
    return result


def _twin(name: str, tensor: torch.Tensor, reference: bool) -> Callable[..., Any]:
    module = _triton if tensor.is_cuda and not reference and name in _triton.__all__ else _reference
    twin: Callable[..., Any] = getattr(module, name)
    return twin


def _check(right: bool, name: str, *tensors: torch.Tensor) -> None:
    if not right:
        seen = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in tensors)
        raise ValueError(f"kernel {name}: shapes or dtypes that do not fit: {seen}")
