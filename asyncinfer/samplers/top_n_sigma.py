"""Top-nσ: truncation by the spread of the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep, check_real

__all__ = ["TopNSigma"]


@dataclass(frozen=True)
class TopNSigma(SamplerPlugin):
    """Keeps the tokens whose logits are within n standard deviations of the largest.

    Tang et al., "Top-nσ: Not All Logits Are You Need" (2024). The deviation is that of the logits
    of all tokens that are not barred; the kept set is the same at every temperature.
    """

    n: float = 1.0

    changes_argmax: ClassVar[bool] = False
    graph_safe: ClassVar[bool] = True
    commutes_with_speculation: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_real("n", self.n, 0.0, 100.0)

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return _TopNSigma(slots, device)


class _TopNSigma(Sampler):
    def __init__(self, slots: int, device: torch.device) -> None:
        self.n = torch.zeros(slots, device=device)

    def join(self, slot: int, params: TopNSigma) -> None:
        self.n[slot] = params.n

    def sample(self, step: SamplerStep) -> None:
        peak = step.logits.amax(dim=-1, keepdim=True)
        below = peak - step.logits
        open_ = below.isfinite()
        below.masked_fill_(~open_, 0.0)
        # In float64 the sums do not hang on how a device splits a row.
        count = open_.sum(dim=-1, keepdim=True)
        mean = below.sum(dim=-1, keepdim=True, dtype=torch.float64) / count
        spread = (below - mean.float()).masked_fill_(~open_, 0.0).square_()
        variance = spread.sum(dim=-1, keepdim=True, dtype=torch.float64) / count
        # Finite, so that n = 0 cuts whatever the spread.
        sigma = variance.sqrt_().clamp_(max=1e30).float()
        step.logits.masked_fill_(below > self.n[step.slots, None] * sigma, -torch.inf)
