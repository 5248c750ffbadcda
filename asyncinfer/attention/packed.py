"""A KV format of 4 bits, with a scale and an offset for each few numbers of a head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

__all__ = ["PackedKV"]

#: Most numbers that share a scale.
_GROUP: Final = 32
_FLOAT16_MOST: Final = 65504.0


class PackedKV:
    """A `KVFormat` of numbers from 0 to 15, two a byte, with a float16 scale and offset for each
    group of neighbours in a head: the least number of a group is 0 and the largest 15.

    A few dimensions of keys are much larger than the others, in every token (KIVI, Liu et al.,
    2024). Here they cost precision in their own group only. An error is at most half a
    scale, beside the rounding of scale and offset. Numbers beyond float16's largest are held as
    that.
    """

    exact = False

    def tensors(self, head_dim: int, dtype: torch.dtype) -> Sequence[tuple[int, torch.dtype]]:
        return ((head_dim // 2, torch.uint8), (2 * _groups(head_dim), torch.float16))

    def encode(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        shape = *values.shape[:-1], _groups(values.shape[-1]), -1
        grouped = values.float().reshape(shape)
        grouped = grouped.clamp(-_FLOAT16_MOST, _FLOAT16_MOST)
        least, most = grouped.aminmax(dim=-1, keepdim=True)
        offsets = least.half()
        # In float32, since the difference may be twice float16's largest; a fifteenth of it fits.
        scales = ((most - offsets.float()) / 15).half()
        steps = (grouped - offsets.float()) / scales.float()
        # A group of equal numbers has the scale 0.
        numbers = steps.round().nan_to_num(0.0, posinf=15.0, neginf=0.0).clamp(0, 15)
        codes = numbers.to(torch.uint8).flatten(-2)
        pairs = codes[..., 0::2] | codes[..., 1::2] << 4
        # NaN in a group makes its offset NaN, and so all of its numbers when they are read.
        return pairs, torch.cat((scales, offsets), dim=-1).flatten(-2)

    def gather(self, pages: Sequence[torch.Tensor], index: torch.Tensor, out: torch.Tensor) -> None:
        codes, ends = (tensor.index_select(0, index) for tensor in pages)
        floats = out
        if out.dtype is not torch.float32:
            floats = out.new_empty(out.shape, dtype=torch.float32)
        pairs = floats.view(*codes.shape, 2)
        pairs[..., 0].copy_(codes & 15)
        pairs[..., 1].copy_(codes >> 4)
        scales, offsets = ends[..., 0::2, None].float(), ends[..., 1::2, None].float()
        grouped = floats.view(*scales.shape[:-1], -1)
        torch.addcmul(offsets, grouped, scales, out=grouped)
        if floats is not out:
            out.copy_(floats)


def _groups(head_dim: int) -> int:
    """How many groups a head has: all of a size that divides it."""
    return head_dim // math.gcd(head_dim, _GROUP)
