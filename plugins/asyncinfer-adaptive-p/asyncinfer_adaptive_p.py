"""Adaptive-P for asyncinfer: a sampler with state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep, check_real

__all__ = ["AdaptiveP"]

#: The shape of the transform, as in llama.cpp: within about this distance of the target a
#: probability counts as near, and the logits fall from this peak, this steeply.
WIDTH, PEAK, SHARPNESS = 0.3, 5.0, 10.0


@dataclass(frozen=True)
class AdaptiveP(SamplerPlugin):
    """Draws tokens near a target probability, and makes up for those that were not.

    By MrJackSpade and ddh0 (llama.cpp, pull request 17927): a moving average of the probabilities
    of the tokens drawn, with weights `decay ** age`, moves the target to the other side of it;
    a token's new logit falls with the distance of its probability from there. The chain's
    temperature and truncation come first; what they cut stays cut (min-p is a good companion).
    """

    target: float = 0.5
    decay: float = 0.9

    changes_argmax: ClassVar[bool] = False
    draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_real("target", self.target, 0.0, 1.0)
        check_real("decay", self.decay, 0.0, 0.99)

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return _AdaptiveP(slots, device)


class _AdaptiveP(Sampler):
    def __init__(self, slots: int, device: torch.device) -> None:
        self.target = torch.zeros(slots, device=device)
        self.decay = torch.zeros(slots, device=device)
        #: Per slot: the weighted sum of probabilities drawn, and the sum of the weights.
        self.drawn = torch.zeros((slots, 2), device=device)

    def join(self, slot: int, params: AdaptiveP) -> None:
        self.target[slot], self.decay[slot] = params.target, params.decay
        self.drawn[slot] = 0.0

    def state(self) -> Sequence[torch.Tensor]:
        return (self.drawn,)

    def sample(self, step: SamplerStep) -> torch.Tensor:
        target, drawn = self.target[step.slots], self.drawn[step.slots]
        total, weight = drawn.unbind(dim=1)
        adapted = torch.where(weight > 0, 2 * target - total / weight, target).clamp_(0.0, 1.0)
        weights = step.weights()
        probs = weights / weights.sum(dim=-1, keepdim=True, dtype=torch.float64).float()
        away = (probs - adapted[:, None]).abs_() / WIDTH
        logits = PEAK - SHARPNESS * away**2 / (1 + away)
        tokens = step.draw(logits.exp_().masked_fill_(weights == 0, 0.0))
        chosen = torch.stack([probs.gather(1, tokens[:, None])[:, 0], torch.ones_like(total)], 1)
        self.drawn[step.slots] = chosen + self.decay[step.slots, None] * drawn
        return tokens
