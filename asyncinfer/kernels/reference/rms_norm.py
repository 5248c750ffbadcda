"""Root mean square layer normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in float32."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
