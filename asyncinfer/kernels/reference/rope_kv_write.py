"""The work between the packed projection and attention: qk-norm, rope, the write to the pages."""

from __future__ import annotations

import torch

from asyncinfer.kernels.reference.kv_write import kv_write
from asyncinfer.kernels.reference.norms import rms_norm, rope

__all__ = ["rope_kv_write"]


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
) -> torch.Tensor:
    """Rotate the queries and keys of `qkv`, write keys and values to their pages, and return the
    queries.

    `qkv` `[tokens, heads + 2 * kv_heads, head_dim]`: queries, keys, values. `cos` and `sin` as
    `rope` takes them, `[tokens, 1, rotary_dim]`: the first `rotary_dim` elements of each head are
    rotated. `q_norm`, `k_norm` `[head_dim]`: weights of an RMSNorm over each query and key
    head before that (Qwen3), with `eps` and `plus_one` as `rms_norm` has them. Caches, slots and
    scales as in `kv_write`. The queries are a new tensor `[tokens, heads, head_dim]`.
    """
    kv_heads = k_cache.shape[1]
    q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps, plus_one=plus_one)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps, plus_one=plus_one)
    q, k = _turn(q, cos, sin), _turn(k, cos, sin)
    kv_write(k, v, k_cache, v_cache, slot_mapping, k_scales=k_scales, v_scales=v_scales)
    return q


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotary = cos.shape[-1]
    return torch.cat((rope(x[..., :rotary], cos, sin), x[..., rotary:]), dim=-1)
