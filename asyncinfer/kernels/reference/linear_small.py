"""A linear layer for few tokens, with the norm before it and the gate or residual after it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncinfer.kernels.reference.floats_of import parts_of
from asyncinfer.kernels.reference.norms import gelu_mul, rms_norm, silu_mul

__all__ = ["linear_small"]


def linear_small(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scales: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    code: str | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    arrivals: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x W^T + bias` for `x` `[tokens, inputs]`, at most 64 tokens, `weight` `[outputs, inputs]`.

    - `code`: the weight is one of 4 or 8 bits, with `scales` and `offsets` as in
      `reference.floats_of`.
    - `norm` `[inputs]`: the weight of an RMSNorm of `x` before, with `eps` and `plus_one` as in
      `rms_norm`.
    - `activation` "silu", "gelu" or "gelu_tanh": the product is a packed gate and up, gate first;
      gives `activation(gate) * up`, `[tokens, outputs / 2]`.
    - `residual`, of the result's shape: added at the end.
    - `arrivals` int32 `[outputs / 64]`, rounded up, all zero before and after: counters of a GPU's
      programs that share a sum. A layer that keeps its own saves a launch each time.
    """
    if norm is not None:
        x = rms_norm(x, norm, eps, plus_one=plus_one)
    if code is None:
        y = F.linear(x, weight, bias)
    else:
        assert scales is not None
        y = x.new_empty(x.shape[0], weight.shape[0])
        for rows, part in parts_of(weight, scales, offsets, code):
            y[:, rows] = F.linear(x, part.to(x.dtype), None if bias is None else bias[rows])
    if activation == "silu":
        y = silu_mul(y)
    elif activation is not None:
        y = gelu_mul(y, approximate="tanh" if activation == "gelu_tanh" else "none")
    return y if residual is None else y + residual
