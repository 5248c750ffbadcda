"""The format of a weight, as arguments of the kernels that multiply by it."""

from __future__ import annotations

import torch

__all__ = ["group_of", "itemsize_of", "readable"]


def group_of(
    inputs: int, scales: torch.Tensor | None, offsets: torch.Tensor | None, code: str | None
) -> int:
    """How many inputs share a scale that multiplies tiles of the weight. 0: the weight is not
    quantised, or each row has one scale and no offset, and the scale multiplies the row's sum."""
    if code is None or scales is None or (scales.shape[-1] == 1 and offsets is None):
        return 0
    return inputs // scales.shape[-1]


def itemsize_of(weight: torch.Tensor) -> float:
    """Bytes of one number of the weight, a half for 4 bits."""
    return 0.5 if weight.dtype is torch.uint8 else weight.element_size()


def readable(factors: torch.Tensor | None) -> torch.Tensor | None:
    """Scales or offsets in a dtype that Triton knows. Powers of two are uint8: their exponents,
    biased by 127."""
    if factors is None or factors.dtype is not torch.float8_e8m0fnu:
        return factors
    return factors.view(torch.uint8)
