"""Mirostat v2: a truncation that steers the surprise of the text to a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep, check_real

__all__ = ["Mirostat"]


@dataclass(frozen=True)
class Mirostat(SamplerPlugin):
    """Mirostat v2: keeps the surprise of each token near a target, in bits.

    Basu et al., "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity"
    (ICLR 2021), version 2 of its authors' implementation: tokens with a surprise above `mu` are
    cut (the likeliest never is), one of the rest is drawn, and `mu` moves by `eta` times the
    distance of its surprise from `tau`. `mu` begins at `2 * tau`. Surprises are those of the
    distribution before the cut, after temperature and whatever truncation the request asks for.
    """

    #: Target surprise, bits per token.
    tau: float = 5.0
    #: Learning rate.
    eta: float = 0.1

    changes_argmax: ClassVar[bool] = False
    draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_real("tau", self.tau, 0.0, 100.0)
        check_real("eta", self.eta, 0.0, 1.0)

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return _Mirostat(slots, device)


class _Mirostat(Sampler):
    def __init__(self, slots: int, device: torch.device) -> None:
        self.tau = torch.zeros(slots, device=device, dtype=torch.float32)
        self.eta = torch.zeros(slots, device=device, dtype=torch.float32)
        self.mu = torch.zeros(slots, device=device, dtype=torch.float32)

    def join(self, slot: int, params: Mirostat) -> None:
        self.tau[slot], self.eta[slot], self.mu[slot] = params.tau, params.eta, 2 * params.tau

    def state(self) -> Sequence[torch.Tensor]:
        return (self.mu,)

    def sample(self, step: SamplerStep) -> torch.Tensor:
        weights, mu = step.weights(), self.mu[step.slots]
        # In float64 the rounded sum does not depend on how a device splits a row.
        total = weights.sum(dim=-1, dtype=torch.float64).float()
        # surprise <= mu  <=>  weight >= total * 2^-mu; the likeliest token's weight is 1.
        cut = (total * torch.exp2(-mu)).clamp_(max=1.0)
        # A mask of 1.0 and 0.0 is several times faster than one of booleans.
        weights *= torch.ge(weights, cut[:, None], out=torch.empty_like(weights))
        tokens = step.draw(weights)
        surprise = -torch.log2(weights.gather(1, tokens[:, None])[:, 0] / total)
        error = surprise - self.tau[step.slots]
        self.mu[step.slots] = mu - self.eta[step.slots] * error
        return tokens
