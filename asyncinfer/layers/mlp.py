"""The gated feed-forward layer."""

from __future__ import annotations

import torch

from asyncinfer.kernels import ops
from asyncinfer.quantization import Linear

__all__ = ["GatedMLP"]

#: Elements of `gate_up`'s output at once, on a CPU. Larger ones leave the processor's cache, and
#: the allocator returns them to the system to be faulted in again at every layer.
_CPU_TILE = 4 << 20


class GatedMLP:
    """`down(silu(gate(x)) * up(x))`, gate and up, `size` wide each, packed into one product."""

    __slots__ = ("down", "gate_up", "tile")

    def __init__(self, gate_up: Linear, down: Linear, size: int) -> None:
        self.gate_up = gate_up
        self.down = down
        self.tile = max(128, _CPU_TILE // (2 * size))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self.tile and not x.is_cuda:
            return torch.cat([self._tokens(part) for part in torch.split(x, self.tile)])
        return self._tokens(x)

    def _tokens(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(ops.silu_mul(self.gate_up(x)))
