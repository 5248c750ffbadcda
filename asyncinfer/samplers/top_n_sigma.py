"""Top-nσ: truncation by the spread of the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep, check_real

__all__ = ["TopNSigma"]

LOWEST: Final = torch.finfo(torch.float32).min


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
        self.n = torch.zeros(slots, device=device, dtype=torch.float32)

    def join(self, slot: int, params: TopNSigma) -> None:
        self.n[slot] = params.n

    def sample(self, step: SamplerStep) -> None:
        logits = step.logits.sub_(step.logits.amax(dim=-1, keepdim=True))
        # A mask of 1.0 and 0.0 is several times faster than one of booleans.
        open_ = torch.gt(logits, -torch.inf, out=torch.empty_like(logits))
        values = logits.clamp(min=LOWEST).mul_(open_)
        # In float64 the rounded sums do not depend on how a device splits a row.
        count = open_.sum(dim=-1, keepdim=True, dtype=torch.float64)
        mean = values.sum(dim=-1, keepdim=True, dtype=torch.float64) / count
        spread = (values - mean.float()).mul_(open_).square_()
        variance = spread.sum(dim=-1, keepdim=True, dtype=torch.float64) / count
        # sigma stays finite, so that n = 0 keeps only the largest at any spread.
        sigma = variance.sqrt_().clamp_(max=1e30).float()
        kept = torch.ge(logits, -self.n[step.slots, None] * sigma, out=open_)
        # No logit is above 0. Divided by 0, one that is cut becomes -inf; the largest is never cut.
        logits.div_(kept)
