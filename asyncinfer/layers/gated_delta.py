"""The gated delta net of Qwen3-Next and OLMo-hybrid."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncinfer.kernels import ops
from asyncinfer.layers.forward_pass import ForwardPass
from asyncinfer.layers.lora import LoraLinear
from asyncinfer.layers.norm import Norm

__all__ = ["GatedDeltaNet", "unit_vectors"]

#: Added to the squared length of a query or key before it is scaled to one.
_EPSILON = 1e-6


class GatedDeltaNet:
    """`[tokens, hidden]` to `[tokens, hidden]`: linear attention by the gated delta rule, in place
    of attention (Yang et al., Gated Delta Networks, 2024). Queries, keys and values go through a
    causal convolution first; outputs are normalised per head, and gated."""

    __slots__ = (
        "beta_scale",
        "bias",
        "gates",
        "heads",
        "inputs",
        "key_heads",
        "key_size",
        "layer",
        "norm",
        "out",
        "rate",
        "weight",
    )

    def __init__(
        self,
        layer: int,
        key_heads: int,
        heads: int,
        key_size: int,
        inputs: LoraLinear,
        gates: LoraLinear,
        weight: torch.Tensor,
        log_rate: torch.Tensor,
        bias: torch.Tensor,
        norm: Norm,
        out: LoraLinear,
        beta_scale: float = 1.0,
    ) -> None:
        """
        Args:
            key_size: dimensions of all heads of keys together.
            inputs: gives queries, keys, values and the outputs' gates side by side.
            gates: gives beta and the step of the decay side by side, one of each per head.
            weight: `[width, channels]`, of the convolution.
            log_rate: float32 `[heads]`: the logarithm of how fast a state decays.
            bias: float32 `[heads]`, added to the step of the decay.
            norm: of `[.., value dimensions of a head]`.
            beta_scale: multiplies beta. Above 1 a token can turn a part of the state around.
        """
        self.layer = layer
        self.key_heads = key_heads
        self.heads = heads
        self.key_size = key_size
        self.inputs = inputs
        self.gates = gates
        self.weight = weight
        self.rate = -log_rate.exp()
        self.bias = bias
        self.norm = norm
        self.out = out
        self.beta_scale = beta_scale

    def __call__(self, x: torch.Tensor, forward: ForwardPass) -> torch.Tensor:
        states, adapters = forward.states, forward.adapters
        assert states is not None, "a layer with a state"
        spans = states.spans
        past, before = states.before(self.layer)
        channels = self.weight.shape[1]
        mixed, gate = self.inputs(x, adapters).tensor_split([channels], dim=-1)
        mixed, inputs = ops.causal_conv(mixed, self.weight, None, past, spans)
        size = self.key_size
        q, k, v = F.silu(mixed).tensor_split([size, 2 * size], dim=-1)
        q, k = (unit_vectors(part.view(len(x), self.key_heads, -1)) for part in (q, k))
        beta, step = self.gates(x, adapters).float().chunk(2, dim=-1)
        y, after = ops.gated_delta_rule(
            q * q.shape[-1] ** -0.5,
            k,
            v.view(len(x), self.heads, -1),
            self.rate * F.softplus(step + self.bias),
            beta.sigmoid().mul_(self.beta_scale),
            before,
            spans,
        )
        states.keep(self.layer, inputs, after)
        y = self.norm(y.flatten(0, 1)).view(gate.shape).float().mul_(F.silu(gate.float()))
        return self.out(y.to(x.dtype), adapters)


def unit_vectors(x: torch.Tensor) -> torch.Tensor:
    """Vectors scaled to length one, in float32."""
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()
