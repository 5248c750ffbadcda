"""XTC: exclude top choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep, check_real

__all__ = ["XTC"]


@dataclass(frozen=True)
class XTC(SamplerPlugin):
    """Exclude top choices: now and then, all likely tokens but the least likely of them go.

    P. E. Weidmann, 2024 (text-generation-webui, pull request 6335): with chance `probability`, of
    the tokens at least `threshold` likely, only the least likely is kept (and what ties with it).
    Where fewer than two are that likely, nothing changes. Probabilities are those after
    temperature and truncation, so nothing is drawn that they cut.
    """

    threshold: float = 0.1
    probability: float = 0.5

    changes_argmax: ClassVar[bool] = False
    commutes_with_speculation: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_real("threshold", self.threshold, 0.0, 1.0)
        check_real("probability", self.probability, 0.0, 1.0)

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return _XTC(slots, device)


class _XTC(Sampler):
    def __init__(self, slots: int, device: torch.device) -> None:
        self.threshold = torch.zeros(slots, device=device)
        self.probability = torch.zeros(slots, device=device)

    def join(self, slot: int, params: XTC) -> None:
        self.threshold[slot], self.probability[slot] = params.threshold, params.probability

    def sample(self, step: SamplerStep) -> torch.Tensor:
        weights = step.weights()
        # In float64 the sum does not hang on how a device splits a row.
        total = weights.sum(dim=-1, dtype=torch.float64).float()
        least = total * self.threshold[step.slots]
        likely = weights >= least[:, None]
        # A threshold of 0 does not bring back what is cut already.
        likely &= weights > 0
        kept = weights.masked_fill(~likely, torch.inf).amin(dim=-1)
        kept.masked_fill_(step.uniform() >= self.probability[step.slots], torch.inf)
        weights.masked_fill_(weights > kept[:, None], 0.0)
        return step.draw(weights)
