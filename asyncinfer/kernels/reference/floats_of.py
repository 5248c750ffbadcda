"""Quantised weights to floats, in torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from asyncinfer.kernels.codes import decoded

__all__ = ["CODES", "floats_of", "parts_of"]

#: The codes that a GPU's kernels read, and how many numbers of each a byte holds.
CODES: Final = {"int4": 2, "e2m1": 2, "iq4": 2, "int8": 1, "e4m3": 1}
#: The most numbers of a weight that are in float32 at the same time, in 16 MiB.
_PART: Final = 1 << 22


def floats_of(
    weight: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, code: str
) -> torch.Tensor:
    """float32 `[outputs, inputs]`: each number of the weight times its group's scale, plus its
    group's offset.

    A `weight` of 4 bits is uint8 `[outputs, inputs / 2]`: input 2j is in the lower half of byte j,
    input 2j + 1 in the upper. A weight of 8 bits is int8 `[outputs, inputs]`, whatever its bits
    stand for by its `code`. `scales` and `offsets` are floats `[outputs, groups]`. A group is
    `inputs / groups` neighbouring inputs.
    """
    floats = decoded(weight, code).view(*scales.shape, -1).mul_(scales.float()[:, :, None])
    if offsets is not None:
        floats.add_(offsets.float()[:, :, None])
    return floats.flatten(1)


def parts_of(
    weight: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    code: str,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """`floats_of` a few rows at a time, with the rows: a large matrix is never whole in float32."""
    step = max(1, _PART // max(1, weight.shape[1] * CODES[code]))
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        shifts = None if offsets is None else offsets[rows]
        yield rows, floats_of(weight[rows], scales[rows], shifts, code)
