"""Dynamic temperature: higher where the model is less certain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from asyncinfer.errors import InvalidRequest
from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep, check_real

__all__ = ["DynamicTemperature"]

#: Tokens whose logits are this far below the largest have almost no weight.
LEAST: Final = -80.0


@dataclass(frozen=True)
class DynamicTemperature(SamplerPlugin):
    """A temperature between `low` and `high`, by the entropy of the distribution.

    Kalomaze's dynamic temperature (2023; koboldcpp, llama.cpp `temp_ext`, text-generation-webui):
    `low + (high - low) * (H / log N) ** exponent`, with H the entropy of the distribution at
    temperature 1 and N the number of tokens that are not barred. The request's own temperature
    divides the logits as well: leave it at 1.
    """

    low: float = 0.5
    high: float = 1.5
    exponent: float = 1.0

    changes_argmax: ClassVar[bool] = False
    graph_safe: ClassVar[bool] = True
    commutes_with_speculation: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_real("low", self.low, 0.01, 100.0)
        check_real("high", self.high, 0.01, 100.0)
        check_real("exponent", self.exponent, 0.0, 100.0)
        if self.low > self.high:
            raise InvalidRequest("low", self.low, f"must be <= high={self.high}")

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return _DynamicTemperature(slots, device)


class _DynamicTemperature(Sampler):
    def __init__(self, slots: int, device: torch.device) -> None:
        self.params = torch.ones((slots, 3), device=device, dtype=torch.float32)

    def join(self, slot: int, params: DynamicTemperature) -> None:
        values = (params.low, params.high, params.exponent)
        # One number at a time: copying a tensor to the device would wait for it.
        for column, value in enumerate(values):
            self.params[slot, column] = value

    def sample(self, step: SamplerStep) -> None:
        low, high, exponent = self.params[step.slots].unbind(dim=1)
        # With its largest entry subtracted, a row's exponentials cannot overflow.
        logits = step.logits.sub_(step.logits.amax(dim=-1, keepdim=True))
        # A mask of 1.0 and 0.0 is several times faster than one of booleans, and its sum is exact.
        possible = torch.gt(logits, -torch.inf, out=torch.empty_like(logits)).sum(dim=-1)
        # Less likely tokens do not change the entropy, and exp is slow where it underflows.
        scores = logits.clamp(min=LEAST)
        weights = scores.exp()
        # In float64 the rounded sums do not depend on how a device splits a row.
        total = weights.sum(dim=-1, dtype=torch.float64)
        mean = scores.mul_(weights).sum(dim=-1, dtype=torch.float64) / total
        entropy = (total.log() - mean).float()
        # A single possible token has entropy 0; the minimum of 2 avoids a division by log 1.
        share = (entropy / possible.clamp_(min=2).log()).clamp_(0.0, 1.0)
        temperature = low + (high - low) * share**exponent
        logits.div_(temperature[:, None])
