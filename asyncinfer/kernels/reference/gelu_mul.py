"""The gate of a GEGLU feed-forward layer (Shazeer, 2020)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["gelu_mul"]


def gelu_mul(gate_up: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """`gelu(gate) * up` of a packed `[tokens, 2 * size]`, gate first; gives `[tokens, size]`.

    `approximate` as torch's: "none" by the error function, "tanh" by the approximation of
    Hendrycks and Gimpel (2016).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate).mul_(up)
