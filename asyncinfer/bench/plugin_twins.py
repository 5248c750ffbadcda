"""Sampler plugins that do what the built-in chain does, to be compared with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep

__all__ = ["MinP", "OwnDraw", "Temperature"]


@dataclass(frozen=True)
class Temperature(SamplerPlugin):
    """Divides the logits."""

    temperature: float

    changes_argmax: ClassVar[bool] = False

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return _Temperature(slots, device)


class _Temperature(Sampler):
    def __init__(self, slots: int, device: torch.device) -> None:
        self.temperature = torch.ones(slots, device=device)

    def join(self, slot: int, params: Temperature) -> None:
        self.temperature[slot] = params.temperature

    def sample(self, step: SamplerStep) -> None:
        # Less its largest entry, a row cannot overflow.
        logits = step.logits.sub_(step.logits.amax(dim=-1, keepdim=True))
        logits.div_(self.temperature[step.slots, None])


@dataclass(frozen=True)
class MinP(SamplerPlugin):
    """Keeps tokens at least `p` times as likely as the likeliest."""

    p: float

    changes_argmax: ClassVar[bool] = False

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return _MinP(slots, device)


class _MinP(Sampler):
    def __init__(self, slots: int, device: torch.device) -> None:
        self.cut = torch.zeros(slots, device=device)

    def join(self, slot: int, params: MinP) -> None:
        self.cut[slot] = math.log(params.p)

    def sample(self, step: SamplerStep) -> None:
        # The largest becomes 0 and is kept; over 0, what is below the cut becomes -inf.
        logits = step.logits.sub_(step.logits.amax(dim=-1, keepdim=True))
        logits.div_(torch.ge(logits, self.cut[step.slots, None], out=torch.empty_like(logits)))


@dataclass(frozen=True)
class OwnDraw(SamplerPlugin):
    """Draws from what the chain would draw from."""

    draws: ClassVar[bool] = True

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return _OwnDraw()


class _OwnDraw(Sampler):
    def join(self, slot: int, params: OwnDraw) -> None:
        """Does nothing: slots have no state."""

    def sample(self, step: SamplerStep) -> torch.Tensor:
        return step.draw(step.weights())
