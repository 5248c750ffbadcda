"""Low-rank adapters."""

from __future__ import annotations

import torch

from asyncinfer.kernels import reference
from asyncinfer.kernels.dispatch import check, dispatched

__all__ = ["lora_add"]


def _check_lora_add(
    y: torch.Tensor,
    x: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    ranks: torch.Tensor,
    slots: torch.Tensor,
    *,
    sizes: tuple[int, ...],
) -> None:
    name = "lora_add"
    right = y.ndim == x.ndim == 2 and down.ndim == up.ndim == 3 and y.shape[0] == x.shape[0]
    check(right and y.dtype is x.dtype is down.dtype is up.dtype, name, y, x, down, up)
    held, rank, outputs = up.shape
    right = down.shape == (held, rank * len(sizes), x.shape[1]) and y.shape[1] == outputs
    right = right and down.is_contiguous() and up.is_contiguous() and 1 <= len(sizes) <= 3
    check(right and sum(sizes) == outputs and y.stride(1) == 1, name, y, x, down, up)
    right = ranks.dtype is slots.dtype is torch.int32 and ranks.shape == (held,)
    check(right and slots.shape == x.shape[:1] and slots.is_contiguous(), name, x, ranks, slots)


lora_add = dispatched(reference.lora_add, _check_lora_add)
