"""The gate of a SwiGLU feed-forward layer (Shazeer, 2020)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["silu_mul"]


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of a packed `[tokens, 2 * size]`, gate first; gives `[tokens, size]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
