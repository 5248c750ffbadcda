"""The numbers that a weight of 4 bits stands for."""

from __future__ import annotations

from typing import Final

import torch

from asyncinfer.kernels.codes import TABLES

__all__ = ["CODES", "floats_of"]

#: The codes of 4 bits that a GPU's kernels read.
CODES: Final = {name: TABLES[name] for name in ("int4", "e2m1")}


def floats_of(
    weight: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, code: str
) -> torch.Tensor:
    """float32 `[outputs, inputs]`: each number of the weight times its group's scale, plus its
    group's offset.

    `weight` uint8 `[outputs, inputs / 2]`: input 2j is in the lower half of byte j, input 2j + 1 in
    the upper. `scales` and `offsets` floats `[outputs, groups]`: a group is `inputs / groups`
    inputs that follow one another.
    """
    outputs, half = weight.shape
    codes = torch.stack((weight & 15, weight >> 4), dim=-1).view(outputs, scales.shape[1], -1)
    table = torch.tensor(CODES[code], device=weight.device)
    floats = table[codes.int()].mul_(scales.float()[:, :, None])
    if offsets is not None:
        floats.add_(offsets.float()[:, :, None])
    return floats.view(outputs, 2 * half)
