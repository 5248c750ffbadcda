"""The gate of a GEGLU feed-forward layer (Shazeer, 2020)."""

from __future__ import annotations

import torch

from asyncinfer.kernels.triton.gate import gate_mul

__all__ = ["gelu_mul"]


def gelu_mul(gate_up: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """As the reference kernel."""
    return gate_mul(gate_up, "gelu_tanh" if approximate == "tanh" else "gelu")
