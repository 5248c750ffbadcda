"""What a program changes of torch while a sampler of the package is called stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
import torch

from asyncinfer.samplers import Mirostat
from asyncinfer.sampling.guarded_sampler import GuardedSampler


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


class Step:
    """One row, during whose call another thread loads a model in another dtype."""

    logits = torch.zeros((1, 4))
    slots = torch.zeros(1, dtype=torch.int64)

    def weights(self) -> torch.Tensor:
        loading = Thread(target=torch.set_default_dtype, args=(torch.float64,))
        loading.start()
        loading.join()
        return torch.ones((1, 4), dtype=torch.float32)

    def draw(self, weights: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int64)


def test_a_default_of_another_thread_is_neither_blamed_on_a_sampler_nor_taken_back() -> None:
    options: dict[str, Any] = {"slots": 1, "vocab_size": 4, "device": torch.device("cpu")}
    guarded = GuardedSampler(Mirostat, "mirostat", timeout=60.0, clock=lambda: 0.0, **options)
    guarded.join(0, Mirostat(), None)
    step: Any = Step()
    tokens, verdict = guarded.sample(step, None)
    assert tokens is not None
    assert (tokens.tolist(), torch.get_default_dtype()) == ([0], torch.float64)
    assert verdict is not None
    assert verdict.tolist() == [0.0]
