"""Mamba-2's layer."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from asyncinfer.kernels import ops
from asyncinfer.layers.forward_pass import ForwardPass
from asyncinfer.layers.lora import LoraLinear

__all__ = ["GatedNorm", "Mamba2"]


class GatedNorm:
    """`y * silu(gate)`, with an RMS norm of each group of channels after that or before the gate,
    or without a norm; in float32."""

    __slots__ = ("eps", "groups", "order", "weight")

    def __init__(
        self,
        order: Literal["gate-first", "norm-first"] | None,
        weight: torch.Tensor | None,
        groups: int,
        eps: float,
    ) -> None:
        """`weight` `[channels]`; None if `order` is None."""
        self.order = order
        self.weight = None if weight is None else weight.float()
        self.groups = groups
        self.eps = eps

    def __call__(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """`y` float32 and `gate`, both `[tokens, channels]`."""
        if self.order != "norm-first":
            y = y * F.silu(gate.float())
        if self.weight is not None:
            grouped = y.view(len(y), self.groups, -1)
            y = F.rms_norm(grouped, grouped.shape[-1:], None, self.eps).flatten(1) * self.weight
        return y * F.silu(gate.float()) if self.order == "norm-first" else y


class Mamba2:
    """`[tokens, hidden]` to `[tokens, hidden]`: a state space model (Dao and Gu, Transformers are
    SSMs, 2024). The heads, what they write to their states and what they read from them go through
    a causal convolution first."""

    __slots__ = (
        "bias",
        "conv_bias",
        "groups",
        "heads",
        "inputs",
        "layer",
        "norm",
        "out",
        "out_scale",
        "rate",
        "scales",
        "sizes",
        "skip",
        "steps",
        "weight",
    )

    def __init__(
        self,
        layer: int,
        heads: int,
        groups: int,
        sizes: tuple[int, int],
        inputs: LoraLinear,
        scales: torch.Tensor | None,
        weight: torch.Tensor,
        conv_bias: torch.Tensor | None,
        log_rate: torch.Tensor,
        bias: torch.Tensor,
        steps: tuple[float, float],
        skip: torch.Tensor,
        norm: GatedNorm,
        out: LoraLinear,
        out_scale: float,
    ) -> None:
        """
        Args:
            sizes: dimensions of all heads together, and of what all groups write.
            inputs: gives the gate, the heads, what is written, what is read and the steps side by
                side.
            scales: in the model's dtype: multiplies what `inputs` gives.
            weight: `[width, channels]`, of the convolution, as its `conv_bias` `[channels]`.
            log_rate: float32 `[heads]`: the logarithm of how fast a state decays.
            bias: float32 `[heads]`, added to the steps, which are kept within `steps`.
            skip: float32 `[heads]`: multiplies what goes past the state.
        """
        self.layer = layer
        self.heads = heads
        self.groups = groups
        self.sizes = sizes
        self.inputs = inputs
        self.scales = scales
        self.weight = weight
        self.conv_bias = conv_bias
        self.rate = -log_rate.exp()
        self.bias = bias
        self.steps = steps
        self.skip = skip[:, None]
        self.norm = norm
        self.out = out
        self.out_scale = out_scale

    def __call__(self, x: torch.Tensor, forward: ForwardPass) -> torch.Tensor:
        states, adapters = forward.states, forward.adapters
        assert states is not None, "a layer with a state"
        spans = states.spans
        past, before = states.before(self.layer)
        projected = self.inputs(x, adapters)
        if self.scales is not None:
            projected = projected * self.scales
        inner, written = self.sizes
        channels = self.weight.shape[1]
        gate, mixed, step = projected.tensor_split([inner, inner + channels], dim=-1)
        mixed, inputs = ops.causal_conv(mixed, self.weight, self.conv_bias, past, spans)
        value, b, c = F.silu(mixed).tensor_split([inner, inner + written], dim=-1)
        heads = value.reshape(len(x), self.heads, -1).float()
        step = F.softplus(step.float() + self.bias).clamp_(*self.steps)
        y, after = ops.state_space_dual(
            heads * step[..., None],
            b.reshape(len(x), self.groups, -1),
            c.reshape(len(x), self.groups, -1),
            step * self.rate,
            before,
            spans,
        )
        states.keep(self.layer, inputs, after)
        y = self.norm(y.addcmul_(heads, self.skip).flatten(1), gate)
        if self.out_scale != 1.0:
            y = y * self.out_scale
        return self.out(y.to(x.dtype), adapters)
