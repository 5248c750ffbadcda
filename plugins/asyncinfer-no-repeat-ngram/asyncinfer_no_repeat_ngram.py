"""No n-gram twice, for asyncinfer: a sampler that looks at the text so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep, check_integer

__all__ = ["NoRepeatNgram"]

LONGEST = 32


@dataclass(frozen=True)
class NoRepeatNgram(SamplerPlugin):
    """Bars tokens that would complete a sequence of n tokens that stands in the text already.

    Prompt included, over the last `window` tokens (Paulus et al., "A Deep Reinforced Model for
    Abstractive Summarization", 2017; transformers' `no_repeat_ngram_size`).
    """

    n: int = 3
    window: int = 4096

    commutes_with_speculation: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_integer("n", self.n, 2, LONGEST)
        check_integer("window", self.window, 1, 1 << 20)

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return _NoRepeatNgram(slots, device)


class _NoRepeatNgram(Sampler):
    def __init__(self, slots: int, device: torch.device) -> None:
        self.n = torch.zeros(slots, dtype=torch.int64, device=device)
        self.window = torch.zeros(slots, dtype=torch.int64, device=device)
        #: By slot, on the host: how much of the text is asked for.
        self.sizes: dict[int, tuple[int, int]] = {}

    def join(self, slot: int, params: NoRepeatNgram) -> None:
        self.n[slot], self.window[slot] = params.n, params.window
        self.sizes[slot] = params.n, params.window

    def leave(self, slot: int) -> None:
        self.sizes.pop(slot, None)

    def sample(self, step: SamplerStep) -> None:
        longest = max(n for n, _ in self.sizes.values())
        tokens = step.recent(max(window for _, window in self.sizes.values()))
        width = tokens.shape[1]
        if width < 2:
            return
        n, window = self.n[step.slots, None], self.window[step.slots, None]
        ages = torch.arange(width, 0, -1, device=tokens.device)
        tokens = tokens.masked_fill(ages > window, -1)
        # Does what stands before each place equal what stands before the next token? By row, the
        # n - 1 tokens nearest to it count.
        before = torch.nn.functional.pad(tokens, (longest, 0), value=-1)
        same = torch.ones((len(tokens), width), dtype=torch.bool, device=tokens.device)
        for back in range(1, longest):
            there = before[:, longest - back : longest - back + width]
            last = before[:, longest + width - back, None]
            same &= ((there == last) & (there >= 0)) | (back >= n)
        same &= tokens >= 0
        # A barred token's logit becomes -inf, every other one stays what it is.
        places = tokens.clamp(min=0)
        lowered = step.logits.gather(1, places).masked_fill_(same, -torch.inf)
        barred = step.logits.scatter_reduce(1, places, lowered, "amin")
        # Where nothing is left, better repeat than fail.
        left = barred.amax(dim=-1, keepdim=True) > -torch.inf
        step.logits.copy_(torch.where(left, barred, step.logits))
