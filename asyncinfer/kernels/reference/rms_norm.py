"""Root mean square layer normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F

__all__ = ["rms_norm"]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in float32.

    With `plus_one` the factor is `1 + weight`, summed in float32, as Gemma stores its weights.
    """
    if plus_one:
        return F.rms_norm(x.float(), (x.shape[-1],), 1 + weight.float(), eps).to(x.dtype)
    if x.dtype is torch.float32 and x.device.type == "cpu":
        # Half the operators of torch's own: |x| is one, and sqrt(|x|^2 + n eps) is another.
        size = x.shape[-1]
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(_root(size * eps))
        return (x * weight).div_(norm.mul_(size**-0.5))
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


@functools.lru_cache
def _root(value: float) -> torch.Tensor:
    return torch.tensor(math.sqrt(value), dtype=torch.float32, device="cpu")
