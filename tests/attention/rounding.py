"""What a KV format keeps of a vector, by the book: float64 arithmetic and no kernel's help."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch

from asyncinfer.attention import KVCache

__all__ = ["poison", "rounded"]


def rounded(values: torch.Tensor, kv: str) -> torch.Tensor:
    """float64 `[..., head_dim]`: what is read of `values` when they were held as `kv` says."""
    exact = values.double()
    if kv == "plain":
        return exact
    if kv == "int4":
        # Scales and offsets are float16.
        groups = values.float().unflatten(-1, (values.shape[-1] // gcd(values.shape[-1], 32), -1))
        least, most = groups.aminmax(dim=-1, keepdim=True)
        offset = least.half().float()
        scale = ((most - offset) / 15).half()
        at = ((groups - offset) / scale.float()).double().nan_to_num(0.0).round().clamp(0, 15)
        return (at * scale.double() + offset.double()).flatten(-2)
    # The scale is a float32; where it is rounded to decides which numbers are ties.
    largest = values.float().abs().amax(-1, keepdim=True).clamp(min=1e-30)
    scale = (largest / (127 if kv == "int8" else 448)).double()
    over = exact / scale
    if kv == "int8":
        return over.round() * scale
    # Three bits of fraction below the leading one; exponents end at -6.
    exponent = torch.frexp(over).exponent.clamp(min=-5) - 1
    step = torch.ldexp(torch.ones_like(over), exponent - 3)
    return (over / step).round() * step * scale


def poison(kv: KVCache, blocks: Sequence[int] | None = None) -> None:
    """These blocks (None: all) read as NaN, wherever nobody writes."""
    for tensor in kv.tensors:
        what = slice(None) if blocks is None else list(blocks)
        tensor[:, :, what] = float("nan") if tensor.is_floating_point() else 127
