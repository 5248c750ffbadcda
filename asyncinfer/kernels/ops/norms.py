"""The operators between the matrix products: normalisation, rotation and gates."""

from __future__ import annotations

from typing import Any

import torch

from asyncinfer.kernels import reference
from asyncinfer.kernels.dispatch import check, dispatched
from asyncinfer.kernels.native import between

__all__ = ["add_rms_norm", "gelu_mul", "rms_norm", "rope", "silu_mul"]


def _check_rms_norm(x: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> None:
    check(x.ndim >= 1 and weight.shape == x.shape[-1:], "rms_norm", x, weight)


def _check_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any
) -> None:
    right = x.ndim == 2 and x.shape == residual.shape and x.dtype is residual.dtype
    check(right and weight.shape == x.shape[-1:], "add_rms_norm", x, residual, weight)


def _check_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    expected = (x.shape[0], 1, x.shape[-1])
    right = x.ndim == 3 and cos.shape == expected and sin.shape == expected
    check(right and cos.dtype is sin.dtype is torch.float32, "rope", x, cos, sin)


def _check_silu_mul(gate_up: torch.Tensor) -> None:
    check(gate_up.ndim == 2 and gate_up.shape[1] % 2 == 0, "silu_mul", gate_up)


def _check_gelu_mul(gate_up: torch.Tensor, *, approximate: str = "none") -> None:
    check(gate_up.ndim == 2 and gate_up.shape[1] % 2 == 0, "gelu_mul", gate_up)
    if approximate not in ("none", "tanh"):
        raise ValueError(f"kernel gelu_mul: approximate={approximate!r}: must be none or tanh")


rms_norm = dispatched(reference.rms_norm, _check_rms_norm, between.rms_norm)
add_rms_norm = dispatched(reference.add_rms_norm, _check_add_rms_norm)
rope = dispatched(reference.rope, _check_rope, between.rope)
silu_mul = dispatched(reference.silu_mul, _check_silu_mul, between.silu_mul)
gelu_mul = dispatched(reference.gelu_mul, _check_gelu_mul)
