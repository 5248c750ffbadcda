"""Kimi Delta Attention (Moonshot AI, Kimi Linear, 2025)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncinfer.kernels import ops
from asyncinfer.layers.forward_pass import ForwardPass
from asyncinfer.layers.gated_delta import unit_vectors
from asyncinfer.layers.lora import LoraLinear
from asyncinfer.layers.norm import Norm

__all__ = ["KimiDeltaAttention"]


class KimiDeltaAttention:
    """`[tokens, hidden]` to `[tokens, hidden]`: linear attention by the gated delta rule, in place
    of attention, whose states decay at a speed of their own in each dimension of a key. Decay and
    output gates come from low-rank projections."""

    __slots__ = (
        *("bias", "forget", "gate", "heads", "inputs", "layer", "norm", "out", "rate", "weight"),
    )

    def __init__(
        self,
        layer: int,
        heads: int,
        inputs: LoraLinear,
        forget: LoraLinear,
        gate: LoraLinear,
        weight: torch.Tensor,
        log_rate: torch.Tensor,
        bias: torch.Tensor,
        norm: Norm,
        out: LoraLinear,
    ) -> None:
        """
        Args:
            inputs: gives side by side queries, keys and values, the small vectors that `forget` and
                `gate` take, of `head_dim` each, and beta, one of it per head.
            forget: gives the step of the decay, `[tokens, heads * head_dim]`.
            gate: gives the outputs' gates, in the same shape.
            weight: `[width, channels]`, of the convolution.
            log_rate: float32 `[heads]`: the logarithm of how fast a state decays.
            bias: float32 `[heads * head_dim]`, added to the step of the decay.
            norm: of `[.., head_dim]`.
        """
        self.layer = layer
        self.heads = heads
        self.inputs = inputs
        self.forget = forget
        self.gate = gate
        self.weight = weight
        self.rate = -log_rate.exp()[:, None]
        self.bias = bias
        self.norm = norm
        self.out = out

    def __call__(self, x: torch.Tensor, forward: ForwardPass) -> torch.Tensor:
        states, adapters = forward.states, forward.adapters
        assert states is not None, "a layer with a state"
        spans = states.spans
        past, before = states.before(self.layer)
        channels = self.weight.shape[1]
        size = channels // (3 * self.heads)
        parts = [channels, size, size, self.heads]
        mixed, forget, gate, beta = torch.split(self.inputs(x, adapters), parts, dim=-1)
        mixed, inputs = ops.causal_conv(mixed.contiguous(), self.weight, None, past, spans)
        q, k, v = F.silu(mixed).view(len(x), 3, self.heads, size).unbind(1)
        step = self.forget(forget.contiguous(), adapters).float() + self.bias
        y, after = ops.gated_delta_rule(
            unit_vectors(q) * size**-0.5,
            unit_vectors(k),
            v,
            self.rate * F.softplus(step).view(len(x), self.heads, size),
            beta.float().sigmoid(),
            before,
            spans,
        )
        states.keep(self.layer, inputs, after)
        y = self.norm(y.flatten(0, 1)).view(len(x), -1).float()
        y = y.mul_(self.gate(gate.contiguous(), adapters).float().sigmoid())
        return self.out(y.to(x.dtype), adapters)
