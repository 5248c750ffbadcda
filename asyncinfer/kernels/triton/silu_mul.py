"""The gate of a SwiGLU feed-forward layer (Shazeer, 2020)."""

from __future__ import annotations

import torch

from asyncinfer.kernels.triton.gate import gate_mul

__all__ = ["silu_mul"]


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As the reference kernel."""
    return gate_mul(gate_up, "silu")
