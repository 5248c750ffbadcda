"""Linear layers of many experts, each for its own rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncinfer.kernels.reference.floats_of import parts_of

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
    last of them `n`. With a `code` the weight is one of 4 or 8 bits, with `scales` and `offsets`
    `[experts, out, groups]` as in `reference.floats_of`. Every expert is multiplied by all rows,
    and only the expert's own results are kept, so that the host need not wait for the device to
    learn which rows those are.
    """
    numbers = torch.arange(x.shape[0], dtype=ends.dtype, device=x.device)
    owners = torch.searchsorted(ends, numbers, right=True)[:, None]
    out = x.new_zeros(x.shape[0], weight.shape[1])
    for expert, matrix in enumerate(weight):
        own = owners == expert
        added = None if bias is None else bias[expert]
        if code is None:
            out = torch.where(own, F.linear(x, matrix, added), out)
            continue
        assert scales is not None
        shifts = None if offsets is None else offsets[expert]
        for rows, part in parts_of(matrix, scales[expert], shifts, code):
            product = F.linear(x, part.to(x.dtype), None if added is None else added[rows])
            out[:, rows] = torch.where(own, product, out[:, rows])
    return out
