"""The rules of `check_sampler` about what a sampler takes: time, and memory that it keeps."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch

from asyncinfer.config import EngineConfig
from asyncinfer.errors import AsyncInferError
from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep
from asyncinfer.testing.rule_error import RuleError
from asyncinfer.testing.sampler_trial import STEPS, SamplerTrial, model_says, prompt
from asyncinfer.testing.watched_sampler import TorchCalls, WatchedPlugin

__all__ = ["is_quick", "lets_go"]

#: Rows, vocabulary and calls of the time rule: a small model's, and the fastest call counts, since
#: a busy machine slows some of them. Where it slows them all, others are made, as many, up to so
#: many times.
ROWS: Final = 8
VOCABULARY: Final = 32_000
CALLS: Final = 5
TURNS: Final = 3


def is_quick(trial: SamplerTrial) -> None:
    """Check that no step takes so long that the engine would stop calling the sampler."""
    allowed = EngineConfig().sampler_timeout
    every: dict[str, list[float]] = {}
    for _ in range(TURNS):
        try:
            spent = _spent(trial)
        except AsyncInferError:
            # Other rules report this fault, with a smaller case.
            return
        for method, calls in spent.items():
            every.setdefault(method, []).extend(calls)
        slow = [method for method, calls in every.items() if calls and min(calls) > allowed]
        if not slow:
            return
    seconds = every[slow[0]]
    raise RuleError(
        "time",
        f"the fastest of {len(seconds)} calls of {slow[0]}() took {min(seconds):.3g} s, for "
        f"{ROWS} rows and {VOCABULARY:,} tokens; after three calls above sampler_timeout, "
        f"by default {allowed:g} s, the engine calls it no more",
    )


def _spent(trial: SamplerTrial) -> dict[str, list[float]]:
    """Seconds of each call, by method."""
    timed = _Timed(trial.plugin)
    bench = trial.bench(ROWS, VOCABULARY)
    logits = np.random.Generator(np.random.Philox(key=1)).normal(size=(ROWS, VOCABULARY)) * 2
    for slot in range(ROWS):
        bench.join(slot, timed, seed=slot, tokens=prompt(slot))
    for _ in range(CALLS):
        bench.draw(logits, range(ROWS))
    return timed.seconds


def lets_go(trial: SamplerTrial) -> None:
    """Check that a step's logits, and tensors computed from them, are not kept."""
    results = _Results()
    bench = trial.bench(2)
    for slot in range(2):
        bench.join(slot, WatchedPlugin(trial.plugin, results), seed=slot, tokens=prompt(slot))
    kept = []
    for part in range(2):
        for step in range(STEPS):
            bench.draw([model_says(slot, part * STEPS + step) for slot in range(2)], range(2))
        kept.append(results.alive())
    # A sampler without a state of its own keeps none of them; one may keep those of the last step.
    if kept[1] - kept[0] >= STEPS // 2:
        raise RuleError(
            "memory", f"{kept[1] - kept[0]} tensors more are kept after {STEPS} more steps"
        )


class _Results(TorchCalls):
    """Counts the results of torch functions that are still referred to."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, torch.Tensor):
                self._seen[id(part)] = weakref.ref(part)
        return result

    def begin(self, step: SamplerStep) -> None:
        self._seen[id(step.logits)] = weakref.ref(step.logits)

    def alive(self) -> int:
        gc.collect()
        self._seen = {key: kept for key, kept in self._seen.items() if kept() is not None}
        return len(self._seen)


@dataclass(frozen=True)
class _Timed(SamplerPlugin):
    """Passes everything on, and notes how long it takes."""

    plugin: SamplerPlugin
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"join": [], "sample": []})

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return _TimedSampler(self.plugin.open(slots, vocab_size, device), self.seconds)


class _TimedSampler(Sampler):
    def __init__(self, sampler: Sampler, seconds: dict[str, list[float]]) -> None:
        self.sampler = sampler
        self.seconds = seconds

    def join(self, slot: int, params: _Timed) -> None:
        began = perf_counter()
        self.sampler.join(slot, params.plugin)
        self.seconds["join"].append(perf_counter() - began)

    def sample(self, step: SamplerStep) -> torch.Tensor | None:
        began = perf_counter()
        answer = self.sampler.sample(step)
        self.seconds["sample"].append(perf_counter() - began)
        return answer
