"""`WatchedPlugin`: a sampler plugin of which the torch calls in `sample` are recorded."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep

__all__ = ["TorchCalls", "WatchedPlugin"]


class TorchCalls(TorchFunctionMode):
    """The names of the torch functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def begin(self, step: SamplerStep) -> None:
        """A call of `sample` begins."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass(frozen=True)
class WatchedPlugin(SamplerPlugin):
    """Passes everything on."""

    plugin: SamplerPlugin
    calls: TorchCalls

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return _Watched(self.plugin.open(slots, vocab_size, device), self.calls)


class _Watched(Sampler):
    def __init__(self, sampler: Sampler, calls: TorchCalls) -> None:
        self.sampler = sampler
        self.calls = calls

    def join(self, slot: int, params: WatchedPlugin) -> None:
        self.sampler.join(slot, params.plugin)

    def sample(self, step: SamplerStep) -> torch.Tensor | None:
        self.calls.begin(step)
        with self.calls:
            return self.sampler.sample(step)
