"""Rotary position embedding (Su et al., 2021), the half-split form of GPT-NeoX and Llama."""

from __future__ import annotations

import torch

__all__ = ["rope"]


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head's pairs `(x[i], x[i + head_dim / 2])` by the token's angles.

    `x` `[tokens, heads, head_dim]`; `cos` and `sin` float32 `[tokens, 1, head_dim]`, each angle
    once per half, the sines of the first half negated. Computed in float32, returned in the dtype
    of `x`.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cos).addcmul_(swapped, sin).to(x.dtype)
