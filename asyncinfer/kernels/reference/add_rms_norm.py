"""The residual stream's sum and its normalisation in one."""

from __future__ import annotations

import torch

from asyncinfer.kernels.reference.rms_norm import rms_norm

__all__ = ["add_rms_norm"]


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`residual += x` in place, rounded to its dtype; gives `rms_norm(residual)` and `residual`.

    `x` and `residual` `[tokens, size]` of one dtype; `weight` `[size]`.
    """
    residual.add_(x)
    return rms_norm(residual, weight, eps, plus_one=plus_one), residual
