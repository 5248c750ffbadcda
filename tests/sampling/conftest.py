"""A sampler and one way to fill it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from asyncinfer.params import SamplingParams
from asyncinfer.sampling import SamplingState, TokenHistory
from asyncinfer.scheduler import Join

CPU = torch.device("cpu")


class Bench:
    """A `SamplingState` with its history, filled through `put`."""

    def __init__(self, vocab_size: int, slots: int = 1) -> None:
        self.history = TokenHistory(slots, CPU)
        self.state = SamplingState(slots, vocab_size, self.history)
        self.lengths = np.zeros(slots, np.int64)

    def put(
        self,
        slot: int,
        *,
        seed: int = 0,
        prompt: Sequence[int] = (0,),
        answer: Sequence[int] = (),
        stop_ids: Sequence[int] = (),
        bad_ids: Sequence[tuple[int, ...]] = (),
        **options: Any,
    ) -> SamplingParams:
        params = SamplingParams(**options)
        tokens = [*prompt, *answer]
        self.history.join(slot, tokens)
        self.lengths[slot] = len(tokens)
        join = Join(
            slot,
            tokens,
            len(prompt),
            [],
            params,
            seed,
            stop_ids=frozenset(stop_ids),
            bad_ids=tuple(bad_ids),
        )
        self.state.join(slot, join)
        return params

    def draw(self, logits: Any, slots: Sequence[int], positions: Any = None) -> list[int]:
        """Tokens for `logits` `[n, vocab]`, at the end of each slot's tokens by default."""
        rows = np.asarray(slots, np.int64)
        at = self.lengths[rows] if positions is None else np.asarray(positions, np.int64)
        values = torch.tensor(np.asarray(logits), dtype=torch.float32)
        tokens: list[int] = self.state.sample(values, rows, at).tokens.tolist()
        return tokens


@pytest.fixture(scope="session")
def bench() -> Callable[..., Bench]:
    return Bench
