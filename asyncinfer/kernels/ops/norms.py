"""Normalisation, rotation and gates: what stands between the products."""

from __future__ import annotations

import torch

from asyncinfer.kernels import twins
from asyncinfer.kernels.ops.checks import check

__all__ = ["add_rms_norm", "gelu_mul", "rms_norm", "rope", "silu_mul"]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    plus_one: bool = False,
    reference: bool = False,
) -> torch.Tensor:
    """`x` `[..., size]`, `weight` `[size]` of the same dtype; `plus_one` multiplies by
    `1 + weight`."""
    check(x.ndim >= 1 and weight.shape == x.shape[-1:], "rms_norm", x, weight)
    run = twins.twin("rms_norm", x, reference)
    result: torch.Tensor = run(x, weight, eps, plus_one=plus_one)
    return result


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    plus_one: bool = False,
    reference: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`residual += x` in place; gives `rms_norm(residual)` and `residual`. All of one dtype, `x`
    and `residual` `[tokens, size]`, `weight` `[size]`."""
    fits = x.ndim == 2 and x.shape == residual.shape and weight.shape == x.shape[1:]
    fits = fits and x.dtype is residual.dtype and residual.stride(1) == 1
    check(fits, "add_rms_norm", x, residual, weight)
    run = twins.twin("add_rms_norm", x, reference)
    result: tuple[torch.Tensor, torch.Tensor] = run(x, residual, weight, eps, plus_one=plus_one)
    return result


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, reference: bool = False
) -> torch.Tensor:
    """`x` `[tokens, heads, head_dim]`; `cos`, `sin` float32 `[tokens, 1, head_dim]`, the first half
    of the sines negated."""
    expected = (x.shape[0], 1, x.shape[-1])
    right = x.ndim == 3 and cos.shape == expected and sin.shape == expected
    check(right and cos.dtype is sin.dtype is torch.float32, "rope", x, cos, sin)
    result: torch.Tensor = twins.twin("rope", x, reference)(x, cos, sin)
    return result


def silu_mul(gate_up: torch.Tensor, *, reference: bool = False) -> torch.Tensor:
    """`gate_up` `[tokens, 2 * size]`, gate before up."""
    check(gate_up.ndim == 2 and gate_up.shape[1] % 2 == 0, "silu_mul", gate_up)
    result: torch.Tensor = twins.twin("silu_mul", gate_up, reference)(gate_up)
    return result


def gelu_mul(
    gate_up: torch.Tensor, *, approximate: str = "none", reference: bool = False
) -> torch.Tensor:
    """`gate_up` `[tokens, 2 * size]`, gate before up; `approximate` "none" or "tanh"."""
    check(gate_up.ndim == 2 and gate_up.shape[1] % 2 == 0, "gelu_mul", gate_up)
    if approximate not in ("none", "tanh"):
        raise ValueError(f"kernel gelu_mul: approximate={approximate!r}: must be none or tanh")
    run = twins.twin("gelu_mul", gate_up, reference)
    result: torch.Tensor = run(gate_up, approximate=approximate)
    return result
