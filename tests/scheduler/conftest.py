"""A checked scheduler over the fake model, small enough to reason about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from asyncinfer.cache import KVGroupSpec, PrefixCache
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import FCFS, RunnerSpec
from asyncinfer.testing.simulation import Simulation


@pytest.fixture
def make() -> Callable[..., Simulation]:
    def make(
        *,
        blocks: int = 64,
        block_size: int = 4,
        slots: int = 8,
        context: int = 64,
        budget: int = 32,
        policy: Any = None,
        cached: bool = True,
        windows: Sequence[KVGroupSpec] = (),
        step_target: float | None = None,
        whole_prompts: bool = False,
        **options: Any,
    ) -> Simulation:
        spec = RunnerSpec(
            groups=(KVGroupSpec(blocks), *windows),
            block_size=block_size,
            max_slots=slots,
            max_context=context,
            vocab_size=100,
            max_step_tokens=budget,
            step_target=step_target,
            whole_prompts=whole_prompts,
        )
        cache = PrefixCache(block_size) if cached else None
        return Simulation(spec, policy=policy or FCFS(), cache=cache, **options)

    return make


@pytest.fixture
def greedy() -> Callable[..., SamplingParams]:
    def greedy(max_tokens: int | None = 8, **options: Any) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)

    return greedy
