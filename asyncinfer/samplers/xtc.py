"""XTC: exclude top choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep, check_real

__all__ = ["XTC"]

TINY: Final = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class XTC(SamplerPlugin):
    """Exclude top choices: at random steps, only the least likely of the likely tokens is kept.

    P. E. Weidmann, 2024 (text-generation-webui, pull request 6335): with chance `probability`, of
    the tokens at least `threshold` likely, only the least likely is kept (and what ties with it).
    Where fewer than two are that likely, nothing changes. Probabilities are those after
    temperature and truncation, so nothing is drawn that they cut.
    """

    threshold: float = 0.1
    probability: float = 0.5

    changes_argmax: ClassVar[bool] = False
    draws: ClassVar[bool] = True
    commutes_with_speculation: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_real("threshold", self.threshold, 0.0, 1.0)
        check_real("probability", self.probability, 0.0, 1.0)

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return _XTC(slots, device)


class _XTC(Sampler):
    def __init__(self, slots: int, device: torch.device) -> None:
        self.threshold = torch.zeros(slots, device=device, dtype=torch.float32)
        self.probability = torch.zeros(slots, device=device, dtype=torch.float32)

    def join(self, slot: int, params: XTC) -> None:
        self.threshold[slot], self.probability[slot] = params.threshold, params.probability

    def sample(self, step: SamplerStep) -> torch.Tensor:
        weights = step.weights()
        # In float64 the rounded sum does not depend on how a device splits a row.
        total = weights.sum(dim=-1, dtype=torch.float64).float()
        # With a threshold of 0, tokens that are cut already must stay cut.
        least = (total * self.threshold[step.slots]).clamp_(min=TINY)
        # A mask of 1.0 and 0.0 is several times faster than one of booleans. A weight divided by 0
        # is infinite, and NaN if it is 0 itself.
        mask = torch.ge(weights, least[:, None], out=torch.empty_like(weights))
        kept = torch.div(weights, mask).nan_to_num_(nan=torch.inf).amin(dim=-1)
        kept.masked_fill_(step.uniform() >= self.probability[step.slots], torch.inf)
        weights *= torch.le(weights, kept[:, None], out=mask)
        return step.draw(weights)
