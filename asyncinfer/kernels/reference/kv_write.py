"""Writes the keys and values of a step's tokens to their pages."""

from __future__ import annotations

import torch

__all__ = ["kv_write", "quantise"]

#: A head's largest value counts as this at least, so that no scale is zero or subnormal.
_SMALLEST = 1e-30


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """Put `k` and `v` `[tokens, kv_heads, head_dim]` at `slot_mapping` (`block * block_size +
    offset`, int64 `[tokens]`) of `[num_blocks, kv_heads, block_size, head_dim]`, in place.

    A slot of -1 writes nothing. Caches of float8 (e4m3) or int8 hold the values divided by a scale
    per token and head, which is written to `k_scales`, `v_scales` float32 `[num_blocks, kv_heads,
    block_size]`; it makes the largest absolute value the dtype's largest.
    """
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block_size = k_cache.shape[2]
    at = (slots // block_size, slice(None), slots % block_size)
    for new, cache, scales in ((k, k_cache, k_scales), (v, v_cache, v_scales)):
        values = new[kept]
        if scales is not None:
            values, scales[at] = quantise(values, cache.dtype)
        # torch cannot index float8, so it is written as bytes.
        plain = cache if cache.dtype.itemsize > 1 else cache.view(torch.int8)
        plain[at] = values.view(plain.dtype)


def quantise(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`values` `[..., head_dim]` over their scales, rounded to even, and the scales, float32
    `[...]`."""
    values = values.float()
    # The largest value that a quantised cache stores.
    largest = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}[dtype]
    most = values.abs().amax(-1).clamp(min=_SMALLEST)
    # The divisor is a tensor, since torch on a GPU multiplies by the inverse of a number, which
    # rounds otherwise.
    scales = most / torch.full_like(most, largest)
    scaled = values / scales[..., None]
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scales
