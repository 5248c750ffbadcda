"""Attention temperature tuning (Llama 4, 2025): queries grow with their position, so that attention
over a long context stays sharp."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncinfer.layers.checks import check_integers, check_number

__all__ = ["AttentionTemperature"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTemperature:
    """A query at position `p` is multiplied by `1 + scale * log(1 + (p + offset) // period)`.
    Raises `ValueError` for bad fields."""

    scale: float
    #: The factor is the same for so many adjacent tokens.
    period: int
    offset: int = 0

    def __post_init__(self) -> None:
        check_number(self, "scale")
        check_integers(self, "period", low=1, high=2**31 - 1)
        check_integers(self, "offset", low=0, high=2**31 - 1)

    def factors(self, positions: torch.Tensor) -> torch.Tensor:
        """float32 `[tokens, 1, 1]` for positions int64 `[tokens]`."""
        periods = torch.div(positions + self.offset, self.period, rounding_mode="floor")
        return periods.float().log1p_().mul_(self.scale).add_(1.0)[:, None, None]
