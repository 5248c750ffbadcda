"""Linear layers of many experts, each for rows of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncinfer.kernels.reference.floats_of import floats_of

__all__ = ["grouped_linear"]


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scales: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    code: str | None = None,
) -> torch.Tensor:
    """Rows `ends[e - 1] .. ends[e] - 1` of `x` `[n, in]` times `weight[e]` `[out, in]`, plus
    `bias[e]` `[out]`; gives `[n, out]`.

    `weight` `[experts, out, in]`; `bias` `[experts, out]`; `ends` int32 `[experts]`, ascending, the
    last of them `n`. With `scales` float32 `[experts, out]` the weight is int8, and each of its
    rows is multiplied by its scale. With a `code` it is one of 4 bits, `scales` and `offsets` as in
    `reference.floats_of`. Computes every expert's product with all rows and keeps the
    expert's own, so that nothing waits for the device to learn which those are.
    """
    numbers = torch.arange(x.shape[0], dtype=ends.dtype, device=x.device)
    owners = torch.searchsorted(ends, numbers, right=True)[:, None]
    out = x.new_zeros(x.shape[0], weight.shape[1])
    for expert, matrix in enumerate(weight):
        if code is not None:
            assert scales is not None
            shift = None if offsets is None else offsets[expert]
            matrix = floats_of(matrix, scales[expert], shift, code).to(x.dtype)
        elif scales is not None:
            matrix = (matrix * scales[expert][:, None]).to(x.dtype)
        product = F.linear(x, matrix, None if bias is None else bias[expert])
        out = torch.where(owners == expert, product, out)
    return out
