"""Low-rank adapters (LoRA: Hu et al., 2021): for each row, two thin matrices of its own adapter."""

from __future__ import annotations

import torch

__all__ = ["lora_add"]


def lora_add(
    y: torch.Tensor,
    x: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    ranks: torch.Tensor,
    slots: torch.Tensor,
    *,
    sizes: tuple[int, ...],
) -> torch.Tensor:
    """Adds `up[s]^T (down[s] x)` to each row of `y` `[n, outputs]`, in place, for the row of `x`
    `[n, inputs]` and its slot `s` in `slots` int32 `[n]`; -1: nothing is added. Gives `y`.

    `down` `[slots, rank * parts, inputs]`, `up` `[slots, rank, outputs]`. The layer packs `parts`
    projections with `sizes` outputs: row `j * parts + p` of `down` is row `j` for projection `p`.
    Of slot `s` the first `ranks[s]` (int32) of `rank` count; the others are not read. Sums are in
    float32 and rounded once.
    """
    parts, known = len(sizes), torch.arange(up.shape[1], device=x.device)
    whole, inputs = y.float(), x.float()
    # Every adapter is multiplied by all rows, so that the host need not wait for the device to
    # learn which rows have it.
    for slot, (first, second) in enumerate(zip(down, up, strict=True)):
        there = known < ranks[slot]
        first = torch.where(there.repeat_interleave(parts)[:, None], first.float(), 0.0)
        second = torch.where(there[:, None], second.float(), 0.0)
        inner = inputs @ first.t()
        deltas = [
            inner[:, part::parts] @ columns
            for part, columns in enumerate(torch.split(second, list(sizes), dim=1))
        ]
        whole = torch.where((slots == slot)[:, None], whole + torch.cat(deltas, dim=1), whole)
    return y.copy_(whole)
