"""`SamplerTrial`: a sampler plugin on requests whose answers do not depend on their batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from asyncinfer.protocols import SamplerPlugin
from asyncinfer.testing.sampler_bench import SamplerBench

__all__ = ["SLOTS", "STEPS", "VOCAB", "SamplerTrial", "model_says", "prompt"]

VOCAB: Final = 31
#: Number of slots, and of requests, which are numbered from 0.
SLOTS: Final = 6
#: Tokens of an answer: a prime, so that no cycle of a sampler ends with it.
STEPS: Final = 11


def model_says(request: int, step: int) -> npt.NDArray[np.float32]:
    """The logits of a request, whatever was drawn: float32 `[VOCAB]`."""
    numbers = np.random.Generator(np.random.Philox(key=1000 * request + step))
    return (numbers.normal(size=VOCAB) * 2).astype(np.float32)


def prompt(request: int) -> list[int]:
    """Few different tokens, so that the text repeats itself."""
    return [(request + i * i) % 3 for i in range(4 + request)]


class SamplerTrial:
    """Runs requests through the engine's own sampling."""

    def __init__(self, plugin: SamplerPlugin, device: str) -> None:
        self.plugin: Final = plugin
        self.device: Final = device

    def bench(self, slots: int, vocab_size: int = VOCAB) -> SamplerBench:
        """A new engine's sampling."""
        return SamplerBench(vocab_size, slots, device=self.device)

    def join(self, bench: SamplerBench, slot: int, request: int, **options: Any) -> None:
        # Some may draw a few tokens only, so that the text repeats itself.
        allowed = None if request % 3 == 2 else range(4 * (request + 1))
        options = {"allowed_token_ids": allowed, **options}
        bench.join(slot, self.plugin, tokens=prompt(request), seed=request, **options)

    @cached_property
    def alone(self) -> list[list[int]]:
        """The answer of every request, each by itself in a new engine."""
        return [self._by_itself(request) for request in range(SLOTS)]

    def together(
        self, slots: Sequence[int], requests: Sequence[int] | None = None
    ) -> list[list[int]]:
        """The answers of several requests (0, 1, ... by default) in one batch, each in its slot, a
        plain one among them."""
        taken = range(len(slots)) if requests is None else requests
        bench = self.bench(SLOTS + 2)
        for request, slot in zip(taken, slots, strict=True):
            self.join(bench, slot, request)
        plain = SLOTS + 1
        bench.join(plain, None)
        answers: list[list[int]] = [[] for _ in slots]
        for step in range(STEPS):
            logits = [model_says(request, step) for request in taken]
            drawn = bench.draw([*logits, model_says(99, step)], [*slots, plain])
            for answer, token in zip(answers, drawn, strict=False):
                answer.append(token)
        return answers

    def _by_itself(self, request: int) -> list[int]:
        bench = self.bench(1)
        self.join(bench, 0, request)
        return [bench.draw([model_says(request, step)], [0])[0] for step in range(STEPS)]
