"""The gated feed-forward layer."""

from __future__ import annotations

import torch

from asyncinfer.kernels import ops
from asyncinfer.quantization import Linear

__all__ = ["GatedMLP"]


class GatedMLP:
    """`down(silu(gate(x)) * up(x))`, gate and up packed into one product."""

    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(ops.silu_mul(self.gate_up(x)))
