"""Weights of 4 bits in groups, made of floats when a model is loaded."""

from __future__ import annotations

import torch

from asyncinfer.quantization.weight import QuantisedWeight

__all__ = ["GROUPS", "group_for", "quantised_4_bits"]

#: How many inputs share a scale in each of the formats.
GROUPS = {"int4": 32, "int4-128": 128}

#: Numbers of a weight that are quantised at a time.
_PART = 1 << 20
_MOST = 15
#: In smaller groups scales and offsets would take more bytes than numbers.
_LEAST_GROUP = 8


def quantised_4_bits(weight: torch.Tensor, group: int) -> QuantisedWeight:
    """`weight` `[out, in]` in 4 bits with a float16 scale and offset for each `group` inputs, which
    must divide them. The least and the largest of a group become 0 and 15, so that a number is off
    by half a scale at most (Dettmers and Zettlemoyer, 2023, compare sizes of groups)."""
    outputs, inputs = weight.shape
    assert inputs % group == 0
    assert group % 2 == 0
    numbers = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(outputs, inputs // group, dtype=torch.float16, device=weight.device)
    offsets = torch.empty_like(scales)
    step = max(1, _PART // inputs)
    for start in range(0, outputs, step):
        part = slice(start, start + step)
        floats = weight[part].float().view(-1, inputs // group, group)
        least, most = floats.aminmax(dim=-1)
        offsets[part] = least
        # From the rounded offset, so that 15 still stands for the largest.
        low = offsets[part].float()
        scales[part] = (most - low).div_(_MOST)
        scale = scales[part].float()
        # A group of equal numbers has the scale 0, which must not divide them.
        divisor = torch.where(scale > 0, scale, 1.0)
        whole = floats.sub(low[..., None]).div_(divisor[..., None]).round_().clamp_(0, _MOST)
        pairs = whole.to(torch.uint8).view(-1, inputs // 2, 2)
        numbers[part] = pairs[..., 0] | (pairs[..., 1] << 4)
    return QuantisedWeight(numbers, scales, offsets, weight.dtype)


def group_for(inputs: int, wanted: int) -> int | None:
    """The largest group that divides the inputs: `wanted` or half of it, and so on down to 8. None
    if there is none."""
    while wanted >= _LEAST_GROUP:
        if inputs % wanted == 0:
            return wanted
        wanted //= 2
    return None
