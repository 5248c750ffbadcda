"""Linear layers of many experts, each for rows of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["grouped_linear"]


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows `ends[e - 1] .. ends[e] - 1` of `x` `[n, in]` times `weight[e]` `[out, in]`, plus
    `bias[e]` `[out]`; gives `[n, out]`.

    `weight` `[experts, out, in]`; `bias` `[experts, out]`; `ends` int32 `[experts]`, ascending, the
    last of them `n`. With `scales` float32 `[experts, out]` the weight is int8, and each of its
    rows is to be multiplied by its scale. One product for each expert that has rows.
    """
    out = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            its = weight[expert]
            if scales is not None:
                its = (its * scales[expert][:, None]).to(x.dtype)
            out[start:end] = F.linear(x[start:end], its, None if bias is None else bias[expert])
        start = end
    return out
