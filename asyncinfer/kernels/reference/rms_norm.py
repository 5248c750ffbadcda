"""Root mean square layer normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

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
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
