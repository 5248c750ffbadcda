"""The operators between the matrix products: normalisation, rotation and gates."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F

__all__ = ["add_rms_norm", "gelu_mul", "rms_norm", "rope", "silu_mul"]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
) -> torch.Tensor:
    """Root mean square layer normalisation (Zhang and Sennrich, 2019): `x / sqrt(mean(x^2) + eps) *
    weight` over the last dimension, computed in float32.

    With `plus_one` the factor is `1 + weight`, summed in float32, as Gemma stores its weights.
    """
    if plus_one:
        return F.rms_norm(x.float(), (x.shape[-1],), 1 + weight.float(), eps).to(x.dtype)
    if x.dtype is torch.float32 and x.device.type == "cpu":
        # Half as many operators as torch's own norm takes: one for |x|, and one for
        # sqrt(|x|^2 + n eps).
        size = x.shape[-1]
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(_root(size * eps))
        return (x * weight).div_(norm.mul_(size**-0.5))
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x + residual`, both `[tokens, size]`, rounded to their dtype, and `rms_norm` of it."""
    total = x + residual
    return total, rms_norm(total, weight, eps, plus_one=plus_one)


@functools.lru_cache
def _root(value: float) -> torch.Tensor:
    return torch.tensor(math.sqrt(value), dtype=torch.float32, device="cpu")


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al., 2021), the half-split form of GPT-NeoX and Llama: each
    head's pairs `(x[i], x[i + head_dim / 2])` are rotated by the token's angles.

    `x` `[tokens, heads, head_dim]`; `cos` and `sin` float32 `[tokens, 1, head_dim]`, each angle
    once per half, the sines of the first half negated. Computed in float32, returned in the dtype
    of `x`.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cos).addcmul_(swapped, sin).to(x.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The gate of a SwiGLU layer (Shazeer, 2020): `silu(gate) * up` of a packed
    `[tokens, 2 * size]`, gate first; gives `[tokens, size]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_mul(gate_up: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """The gate of a GEGLU layer (Shazeer, 2020): `gelu(gate) * up` of a packed
    `[tokens, 2 * size]`, gate first; gives `[tokens, size]`.

    `approximate` as torch's: "none" by the error function, "tanh" by the approximation of
    Hendrycks and Gimpel (2016).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate).mul_(up)
