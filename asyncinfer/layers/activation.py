"""What stands between the two products of a feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F

from asyncinfer.kernels import ops

__all__ = ["ACTIVATIONS", "Activation", "activation", "clamped_swiglu", "fused_gate"]

Activation = Callable[[torch.Tensor], torch.Tensor]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU (Hendrycks and Gimpel, 2016) by its tanh approximation."""
    return F.gelu(x, approximate="tanh")


def _gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return ops.gelu_mul(gate_up, approximate="tanh")


#: `config.json`'s names, each with the plain and the gated form.
_FORMS: Final[dict[str, tuple[Activation, Activation]]] = {
    "gelu": (F.gelu, ops.gelu_mul),
    "gelu_fast": (_gelu_tanh, _gelu_tanh_mul),
    "gelu_new": (_gelu_tanh, _gelu_tanh_mul),
    "gelu_pytorch_tanh": (_gelu_tanh, _gelu_tanh_mul),
    "silu": (F.silu, ops.silu_mul),
    "swish": (F.silu, ops.silu_mul),
}
ACTIVATIONS: Final = tuple(_FORMS)
_EPILOGUES: Final[dict[Activation, str]] = {
    ops.silu_mul: "silu",
    ops.gelu_mul: "gelu",
    _gelu_tanh_mul: "gelu_tanh",
}


def activation(name: str, *, gated: bool) -> Activation:
    """The activation that `config.json` calls `name`. A gated one takes a packed
    `[tokens, 2 * size]`, gate first, and gives `activation(gate) * up`, `[tokens, size]`."""
    return _FORMS[name][gated]


def fused_gate(name: str) -> str:
    """The gated form of the activation that `config.json` calls `name`, as a kernel's epilogue
    (`ops.linear_small`) is told of it."""
    _, gated = _FORMS[name]
    return _EPILOGUES[gated]


def clamped_swiglu(alpha: float, limit: float) -> Activation:
    """`(up + 1) * gate * sigmoid(alpha * gate)` with both held within `limit`, the gate from above
    only (gpt-oss), of a packed `[tokens, 2 * size]`, gate first."""

    def activate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        up = up.clamp(min=-limit, max=limit)
        return (gate * torch.sigmoid(gate * alpha)).mul_(up.add_(1))

    return activate
