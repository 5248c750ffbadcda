"""Products with weights."""

from __future__ import annotations

from typing import Any

import torch

from asyncinfer.kernels import reference
from asyncinfer.kernels.dispatch import check, dispatched
from asyncinfer.kernels.ops.checks import check_range, check_weight

__all__ = ["grouped_linear", "linear_small"]


def _check_linear_small(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scales: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    code: str | None = None,
    norm: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    arrivals: torch.Tensor | None = None,
    **_: Any,
) -> None:
    name = "linear_small"
    check(x.ndim == weight.ndim == 2, name, x, weight)
    check_weight(name, x, weight, scales, offsets, code)
    check_range(name, "tokens", x.shape[0], 0, 64)
    outputs, inputs = weight.shape[0], x.shape[1]
    if activation not in (None, "silu", "gelu", "gelu_tanh"):
        known = "silu, gelu, gelu_tanh or None"
        raise ValueError(f"kernel {name}: activation={activation!r}: must be {known}")
    size = outputs if activation is None else outputs // 2
    check(activation is None or outputs % 2 == 0, name, x, weight)
    check(bias is None or bias.shape == (outputs,), name, weight, bias)
    check(norm is None or norm.shape == (inputs,), name, weight, norm)
    if residual is not None:
        right = residual.shape == (x.shape[0], size) and residual.dtype is x.dtype
        check(right and residual.stride(1) == 1, name, x, weight, residual)
    if arrivals is not None:
        enough = arrivals.dtype is torch.int32 and arrivals.numel() * 64 >= outputs
        check(enough, name, weight, arrivals)


def _check_grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scales: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    code: str | None = None,
) -> None:
    name = "grouped_linear"
    check(x.ndim == 2 and weight.ndim == 3, name, x, weight)
    check_weight(name, x, weight, scales, offsets, code)
    right = ends.dtype is torch.int32 and ends.shape == weight.shape[:1] and ends.is_contiguous()
    check(right and ends.numel() > 0, name, weight, ends)
    right = bias is None or (bias.shape == weight.shape[:2] and bias.is_contiguous())
    check(right, name, weight, bias)


linear_small = dispatched(reference.linear_small, _check_linear_small)
grouped_linear = dispatched(reference.grouped_linear, _check_grouped_linear)
