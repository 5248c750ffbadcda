"""Checks of arguments that several kernels share. Raises `ValueError`."""

from __future__ import annotations

import torch

from asyncinfer.kernels.dispatch import check
from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.kernels.reference.floats_of import CODES

__all__ = ["check_caches", "check_range", "check_weight", "holds"]


def holds(cache: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether `cache` holds keys or values of `dtype`: as they are, or with a scale per token and
    head."""
    return cache.dtype in (dtype, torch.float8_e4m3fn, torch.int8)


def check_range(name: str, field: str, value: int | None, low: int, high: int | None) -> None:
    if value is not None and not low <= value <= (value if high is None else high):
        bound = f"below {low}" if value < low else f"above {high}"
        raise ValueError(f"kernel {name}: {field} is {value}, {bound}")


def check_weight(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    offsets: torch.Tensor | None = None,
    code: str | None = None,
) -> None:
    """Check that the weight has the inputs of `x` and its dtype, or that its numbers have a `code`
    and a scale for each group of a row's inputs."""
    check(weight.is_contiguous(), name, x, weight)
    for factors in (scales, offsets):
        check(factors is None or factors.is_contiguous(), name, weight, factors)
    if code is None:
        right = weight.dtype is x.dtype and weight.shape[-1] == x.shape[1]
        check(right and scales is None and offsets is None, name, x, weight, scales, offsets)
        return
    if code not in CODES:
        raise ValueError(f"kernel {name}: code={code!r}: must be one of {', '.join(CODES)}")
    right = weight.dtype is (torch.uint8 if CODES[code] == 2 else torch.int8)
    right = right and weight.shape[-1] * CODES[code] == x.shape[1]
    right = right and scales is not None and scales.shape[:-1] == weight.shape[:-1]
    check(right, name, x, weight, scales)
    assert scales is not None
    check(scales.dtype.is_floating_point and scales.shape[-1] > 0, name, weight, scales)
    group, rest = divmod(x.shape[1], scales.shape[-1])
    layout = WeightLayout(code, 0 if scales.shape[-1] == 1 else group)
    check(rest == 0 and layout.readable, name, x, weight, scales)
    if offsets is not None:
        right = offsets.shape == scales.shape and offsets.dtype.is_floating_point
        check(right, name, scales, offsets)


def check_caches(
    name: str,
    new: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
) -> None:
    """Check that `new` `[tokens, ...]` can be written to the caches: each block is contiguous, and
    they have the dtype of `new`, or are quantised with scales."""
    check(k_cache.ndim == 4 and k_cache.shape == v_cache.shape, name, k_cache, v_cache)
    head_dim, block = k_cache.shape[3], k_cache.shape[2] * k_cache.shape[3]
    right = k_cache.stride() == v_cache.stride() and k_cache.stride()[1:] == (block, head_dim, 1)
    right = right and k_cache.dtype is v_cache.dtype
    check(right and holds(k_cache, new.dtype), name, new, k_cache, v_cache)
    for scales in (k_scales, v_scales):
        right = (scales is None) == (k_cache.dtype is new.dtype)
        if scales is not None:
            right = right and scales.shape == k_cache.shape[:3] and scales.is_contiguous()
            right = right and scales.dtype is torch.float32
        check(right, name, k_cache, scales)
    right = slot_mapping.dtype is torch.int64 and slot_mapping.shape == new.shape[:1]
    check(right, name, new, slot_mapping)
