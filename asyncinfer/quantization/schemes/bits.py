"""Numbers of a few bits: taking them out of bytes, and what they stand for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncinfer.kernels.codes import TABLES
from asyncinfer.kernels.orders import as_bytes

__all__ = ["e2m1", "e8m0", "paired", "pairs", "scaled", "unpack"]


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The unsigned numbers of 2, 4 or 8 bits in `packed` `[..., n]`, an integer tensor: uint8
    `[..., numbers]`, from the lowest bits up."""
    data = as_bytes(packed)
    if bits == 8:
        return data
    mask = (1 << bits) - 1
    parts = [(data >> shift).bitwise_and_(mask) for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(-2)


def paired(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 numbers of 4 bits `[..., 2 n]`, two in each byte `[..., n]`, the first in low bits."""
    return numbers[..., 0::2] | (numbers[..., 1::2] << 4)


def pairs(values: Sequence[float], packed: torch.Tensor, *, high_first: bool) -> torch.Tensor:
    """float32 `[..., 2 n]`: the values that the numbers of 4 bits in uint8 `[..., n]` stand for, of
    sixteen. Each byte is looked up once, for both."""
    each = torch.tensor(values, dtype=torch.float32, device=packed.device)
    byte = torch.arange(256, device=packed.device)
    first, second = (byte >> 4, byte & 15) if high_first else (byte & 15, byte >> 4)
    table = torch.stack((each[first], each[second]), dim=1).view(torch.int64).flatten()
    return table[packed.int()].view(torch.float32)


def e2m1(packed: torch.Tensor) -> torch.Tensor:
    """The 4-bit floats in uint8 `[..., n]`: float32 `[..., 2 n]`, low bits first."""
    return pairs(TABLES["e2m1"], packed, high_first=False)


def e8m0(scales: torch.Tensor) -> torch.Tensor:
    """Scales as float32; those stored as bytes are powers of two, biased by 127."""
    if scales.dtype is torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.float()


def scaled(
    numbers: torch.Tensor,
    zeros: torch.Tensor | None,
    scales: torch.Tensor,
    group: torch.Tensor | None,
) -> torch.Tensor:
    """`(number - zero) * scale` in place, of float32 `[out, in]`; zeros and scales are `[out,
    groups]`. `group` says which one each input has; None: equal parts of neighbours."""
    if group is not None:
        zeros = None if zeros is None else zeros[:, group]
        return (numbers if zeros is None else numbers.sub_(zeros)).mul_(scales[:, group])
    parts = numbers.view(*scales.shape, -1)
    if zeros is not None:
        parts.sub_(zeros[..., None])
    return parts.mul_(scales[..., None]).view(numbers.shape)
