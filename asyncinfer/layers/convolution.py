"""The gated short convolution of LFM2."""

from __future__ import annotations

import torch

from asyncinfer.kernels import ops
from asyncinfer.layers.forward_pass import ForwardPass
from asyncinfer.layers.lora import LoraLinear

__all__ = ["ShortConvolution"]


class ShortConvolution:
    """`out(c * convolution(b * x))`, `[tokens, hidden]` to `[tokens, hidden]`; `inputs` gives b, c
    and x side by side. In place of attention (LFM2, Liquid AI, 2025)."""

    __slots__ = ("bias", "inputs", "layer", "out", "weight")

    def __init__(
        self,
        layer: int,
        inputs: LoraLinear,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: LoraLinear,
    ) -> None:
        """`weight` `[width, hidden]`, `bias` `[hidden]` or None: of the convolution."""
        self.layer = layer
        self.inputs = inputs
        self.weight = weight
        self.bias = bias
        self.out = out

    def __call__(self, x: torch.Tensor, forward: ForwardPass) -> torch.Tensor:
        states, adapters = forward.states, forward.adapters
        assert states is not None, "a layer with a state"
        b, c, x = self.inputs(x, adapters).chunk(3, dim=-1)
        (before,) = states.before(self.layer)
        spans = states.spans
        y, after = ops.causal_conv(b * x, self.weight, self.bias, before, spans)
        states.keep(self.layer, after)
        return self.out(y.mul_(c), adapters)
