"""Products with weights."""

from __future__ import annotations

import torch

from asyncinfer.kernels import twins
from asyncinfer.kernels.ops.checks import check, check_range, check_weight

__all__ = ["grouped_linear", "linear_small"]


def linear_small(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scales: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    arrivals: torch.Tensor | None = None,
    reference: bool = False,
) -> torch.Tensor:
    """`x W^T + bias` of at most 64 tokens, a norm before and a gate or residual after it; all of
    one dtype, or the weight int8 with `scales`. See the reference twin."""
    name = "linear_small"
    check(x.ndim == weight.ndim == 2 and x.shape[1] == weight.shape[1], name, x, weight)
    check_weight(name, x, weight, scales)
    check_range(name, "tokens", x.shape[0], 0, 64)
    outputs, inputs = weight.shape
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
    result: torch.Tensor = twins.twin(name, x, reference)(
        x,
        weight,
        bias,
        scales=scales,
        norm=norm,
        eps=eps,
        plus_one=plus_one,
        activation=activation,
        residual=residual,
        arrivals=arrivals,
    )
    return result


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scales: torch.Tensor | None = None,
    reference: bool = False,
) -> torch.Tensor:
    """Each row of `x` `[n, in]`, sorted by expert, times its expert's part of `weight`
    `[experts, out, in]`; all of one dtype, or the weight int8 with `scales`. See the reference
    twin."""
    name = "grouped_linear"
    check(x.ndim == 2 and weight.ndim == 3 and x.shape[1] == weight.shape[2], name, x, weight)
    check_weight(name, x, weight, scales)
    right = ends.dtype is torch.int32 and ends.shape == weight.shape[:1] and ends.is_contiguous()
    check(right and ends.numel() > 0, name, weight, ends)
    right = bias is None or (bias.shape == weight.shape[:2] and bias.is_contiguous())
    check(right, name, weight, bias)
    result: torch.Tensor = twins.twin(name, x, reference)(x, weight, ends, bias, scales=scales)
    return result
