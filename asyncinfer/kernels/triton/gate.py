"""The gates of gated feed-forward layers (GLU variants: Shazeer, 2020).

`silu_mul` and `gelu_mul` are kernels of their own, and products end in `gate`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncinfer.kernels.triton.launched import launched

__all__ = ["gate", "gelu_mul", "silu_mul"]

_BLOCK = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As the reference kernel, rounded once at the end."""
    return _gated(gate_up, "silu")


def gelu_mul(gate_up: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """As the reference kernel, rounded once at the end."""
    return _gated(gate_up, "gelu_tanh" if approximate == "tanh" else "gelu")


def _gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """`activation(gate) * up` `[tokens, size]` of a packed `[tokens, 2 * size]`, gate first."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _gate_mul[(tokens, triton.cdiv(size, _BLOCK))](
            gate_up, out,
            STRIDE=gate_up.stride(0), SIZE=size, BLOCK=_BLOCK, ACTIVATION=activation, num_warps=4,
        )  # fmt: skip
    return out


@launched()
def _gate_mul(
    gate_up, out, STRIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate_up += row * STRIDE + columns
    gates = tl.load(gate_up, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(gate_up + SIZE, mask=inside, other=0.0).to(tl.float32)
    result = gate(gates, ACTIVATION) * ups
    tl.store(out + row * SIZE + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate(x, ACTIVATION: tl.constexpr):
    """float32 `x` after "silu", "gelu" (by the error function) or "gelu_tanh"."""
    # Triton 3.2 compiles no more than two operands of one `or`.
    tl.static_assert((ACTIVATION == "silu" or ACTIVATION == "gelu") or ACTIVATION == "gelu_tanh")
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # (1 + tanh(z)) / 2 = sigmoid(2 z), here with z = sqrt(2 / pi) (x + 0.044715 x^3).
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
