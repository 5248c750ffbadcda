"""Rotary position embedding (Su et al., 2021), the half-split form of GPT-NeoX and Llama."""

from __future__ import annotations

import torch

__all__ = ["rope"]


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head's pairs `(x[i], x[i + head_dim / 2])` by the token's angles.

    `x` `[tokens, heads, head_dim]`, `cos` and `sin` float32 `[tokens, 1, head_dim / 2]`.
    Computed in float32, returned in the dtype of `x`.
    """
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1.0)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out.to(x.dtype)
