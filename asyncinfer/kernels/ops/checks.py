"""Checks of arguments that several kernels share. Raises `ValueError`."""

from __future__ import annotations

import torch

__all__ = ["QUANTISED", "check", "check_caches", "check_range", "check_weight"]

#: Dtypes of a cache other than the queries' own: they need a scale per token and head.
QUANTISED = (torch.float8_e4m3fn, torch.int8)


def check(right: bool, name: str, *tensors: torch.Tensor | None) -> None:
    if not right:
        seen = ", ".join("None" if t is None else f"{tuple(t.shape)} {t.dtype}" for t in tensors)
        raise ValueError(f"kernel {name}: shapes or dtypes that do not fit: {seen}")


def check_range(name: str, field: str, value: int | None, low: int, high: int | None) -> None:
    if value is not None and not low <= value <= (value if high is None else high):
        bound = f"below {low}" if value < low else f"above {high}"
        raise ValueError(f"kernel {name}: {field} is {value}, {bound}")


def check_weight(
    name: str, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None
) -> None:
    """The weight has the dtype of `x`, or is int8 with a scale for each row."""
    expected = x.dtype if scales is None else torch.int8
    check(weight.dtype is expected and weight.is_contiguous(), name, x, weight, scales)
    if scales is not None:
        right = scales.dtype is torch.float32 and scales.shape == weight.shape[:-1]
        check(right and scales.is_contiguous(), name, weight, scales)


def check_caches(
    name: str,
    new: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
) -> None:
    """`new` `[tokens, ...]` can be written to the caches: each block is contiguous, and they have
    the dtype of `new`, or are quantised with scales."""
    check(k_cache.ndim == 4 and k_cache.shape == v_cache.shape, name, k_cache, v_cache)
    head_dim, block = k_cache.shape[3], k_cache.shape[2] * k_cache.shape[3]
    right = k_cache.stride() == v_cache.stride() and k_cache.stride()[1:] == (block, head_dim, 1)
    right = right and k_cache.dtype is v_cache.dtype
    check(right and k_cache.dtype in (new.dtype, *QUANTISED), name, new, k_cache, v_cache)
    for scales in (k_scales, v_scales):
        right = (scales is None) == (k_cache.dtype is new.dtype)
        if scales is not None:
            right = right and scales.shape == k_cache.shape[:3] and scales.is_contiguous()
            right = right and scales.dtype is torch.float32
        check(right, name, k_cache, scales)
    right = slot_mapping.dtype is torch.int64 and slot_mapping.shape == new.shape[:1]
    check(right, name, new, slot_mapping)
