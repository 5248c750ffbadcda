"""DRY (don't repeat yourself): a penalty on repetitions of earlier text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from asyncinfer.errors import InvalidRequest
from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep, check_integer, check_real

__all__ = ["DRY"]

#: The penalty does not grow beyond repetitions of this length.
LONGEST: Final = 48
MAX_BREAKERS: Final = 64


@dataclass(frozen=True)
class DRY(SamplerPlugin):
    """Don't repeat yourself: penalises tokens that would prolong a repetition of earlier text.

    P. E. Weidmann, 2024 (text-generation-webui, pull request 5677): if the last L tokens occur
    before, followed by token t, then t's logit is lowered by `multiplier * base ** (L -
    allowed_length)` for the longest such L, if L >= `allowed_length`. No repetition reaches across
    a breaker, and no breaker is penalised. L is counted up to 48.
    """

    multiplier: float = 0.8
    base: float = 1.75
    #: Shorter repetitions are not penalised.
    allowed_length: int = 2
    #: Number of last tokens that are searched, the prompt's included.
    window: int = 1024
    #: Token ids, such as those of newlines and quotes, that end every repetition.
    breakers: Sequence[int] = ()

    def __post_init__(self) -> None:
        check_real("multiplier", self.multiplier, 0.0, 100.0)
        check_real("base", self.base, 1.0, 10.0)
        check_integer("allowed_length", self.allowed_length, 1, LONGEST)
        check_integer("window", self.window, 1, 1 << 20)
        if not isinstance(self.breakers, list | tuple):
            raise InvalidRequest("breakers", self.breakers, "must be a list of token ids")
        if len(self.breakers) > MAX_BREAKERS:
            raise InvalidRequest("breakers", len(self.breakers), f"at most {MAX_BREAKERS}")
        for token in self.breakers:
            check_integer("breakers", token, 0, 2**31 - 1)
        # JSON gives a list, which could be changed later.
        object.__setattr__(self, "breakers", tuple(self.breakers))

    commutes_with_speculation: ClassVar[bool] = True

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return _DRY(slots, vocab_size, device)


class _DRY(Sampler):
    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.penalty = torch.zeros((slots, 3), device=device, dtype=torch.float32)
        self.window = torch.ones(slots, dtype=torch.int64, device=device)
        #: Whether a token is a breaker, `[slots, vocab_size]`; made for the first request with any.
        self.breaks: torch.Tensor | None = None
        #: On the host: each slot's window, and the slots with breakers.
        self.widths: dict[int, int] = {}
        self.breaking: set[int] = set()

    def join(self, slot: int, params: DRY) -> None:
        values = (params.multiplier, params.base, float(params.allowed_length))
        # One number at a time: copying a tensor to the device would wait for it.
        for column, value in enumerate(values):
            self.penalty[slot, column] = value
        self.window[slot] = params.window
        self.widths[slot] = params.window
        breakers = [token for token in params.breakers if token < self.vocab_size]
        if self.breaks is None and breakers:
            shape = (len(self.window), self.vocab_size)
            self.breaks = torch.zeros(shape, dtype=torch.bool, device=self.window.device)
        if self.breaks is not None:
            self.breaks[slot] = False
            there = torch.tensor(breakers, dtype=torch.int64)
            self.breaks[slot, there.to(self.breaks.device, non_blocking=True)] = True
            self.breaking.discard(slot)
            if breakers:
                self.breaking.add(slot)

    def leave(self, slot: int) -> None:
        self.widths.pop(slot, None)
        self.breaking.discard(slot)

    def sample(self, step: SamplerStep) -> None:
        tokens = step.recent(max(self.widths.values()))
        width = tokens.shape[1]
        if width < 2:
            return
        device, slots = tokens.device, step.slots
        outside = torch.arange(width, 0, -1, device=device) > self.window[slots, None]
        tokens = tokens.masked_fill(outside, -1)
        # Breakers and places before the text become -1, which no repetition contains.
        keys = tokens
        if self.breaking and self.breaks is not None:
            broken = self.breaks[slots[:, None], tokens.clamp(min=0)]
            keys = tokens.masked_fill(broken, -1)
        lengths = _match_lengths(keys)
        multiplier, base, allowed = (part[:, None] for part in self.penalty[slots].unbind(dim=1))
        penalty = multiplier * (base ** (lengths - allowed)).clamp_(max=1e9)
        penalty.masked_fill_((lengths < allowed) | (keys[:, 1:] < 0), 0.0)
        following = tokens[:, 1:].clamp(min=0)
        lowered = step.logits.gather(1, following) - penalty
        step.logits.scatter_reduce_(1, following, lowered, "amin")


def _match_lengths(keys: torch.Tensor) -> torch.Tensor:
    """For each place but the last: how many tokens up to it equal the last tokens of the row.

    Args:
        keys: int64 `[n, w]`; -1 equals nothing.

    Returns:
        int64 `[n, w - 1]`, at most `LONGEST`.
    """
    width = keys.shape[1]
    # -2 occurs in no key, so a -1 matches nothing.
    last = keys.masked_fill(keys < 0, -2)
    alive = torch.ones_like(keys[:, 1:], dtype=torch.bool)
    lengths = torch.zeros_like(keys[:, 1:])
    for length in range(1, min(LONGEST, width - 1) + 1):
        # Place j, where a match of this length begins, ends at j + length - 1.
        alive[:, : length - 1] = False
        alive[:, length - 1 :] &= keys[:, : width - length] == last[:, width - length, None]
        lengths += alive
    return lengths
