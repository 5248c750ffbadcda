"""What sampling a step costs, with and without plugins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import process_time
from typing import TYPE_CHECKING, Any

from asyncinfer.protocols import SamplerPlugin

if TYPE_CHECKING:
    from asyncinfer.testing.sampler_bench import SamplerBench

__all__ = ["SamplerCase", "sampler_costs"]

#: Tokens that each row has before the one that is drawn.
KNOWN = 64
WARMUP = 2


@dataclass(frozen=True, slots=True)
class SamplerCase:
    """One way to sample every row of a step."""

    #: A plugin, or several that are called in order; None is the built-in chain alone.
    sampler: SamplerPlugin | Sequence[SamplerPlugin] | None = None
    #: Options of `SamplingParams`.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: The sampler of one more request, which has no row in the step.
    beside: SamplerPlugin | None = None


def sampler_costs(
    cases: Mapping[str, SamplerCase],
    *,
    rows: int = 64,
    vocab_size: int = 32_000,
    steps: int = 20,
) -> dict[str, float]:
    """CPU seconds of the process per step, by case: the least of steps that are taken in turns,
    since what disturbs one only makes it longer.

    Args:
        rows: all of them sampled alike.
        vocab_size: of the logits, which are drawn from a normal distribution.
        steps: of each case, after some to warm up.
    """
    import numpy as np
    import torch

    from asyncinfer.testing.sampler_bench import SamplerBench

    generator = torch.Generator().manual_seed(20_261_120)
    logits = 3 * torch.randn(rows, vocab_size, generator=generator, dtype=torch.float32)
    benches = {
        name: _filled(SamplerBench(vocab_size, rows + 1), case, rows)
        for name, case in cases.items()
    }
    slots, positions = np.arange(rows), np.full(rows, KNOWN)
    spent: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(WARMUP + steps):
        for name, bench in benches.items():
            changed = logits.clone()
            began = process_time()
            bench.step(changed, slots, positions)
            spent[name].append(process_time() - began)
    return {name: min(seconds[WARMUP:]) for name, seconds in spent.items()}


def _filled(bench: SamplerBench, case: SamplerCase, rows: int) -> SamplerBench:
    tokens = range(KNOWN)
    for slot in range(rows):
        options = {"temperature": 1.0, **case.options}
        bench.join(slot, case.sampler, tokens=tokens, seed=slot, **options)
    if case.beside is not None:
        bench.join(rows, case.beside, tokens=tokens, temperature=1.0)
    return bench
