"""`KernelFigures`: how right and how fast a kernel is, as `asyncinfer doctor` tells it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from asyncinfer.kernels.device_clock import DeviceClock

__all__ = ["KernelFigures", "Stopwatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFigures:
    """A kernel that a trial has found right."""

    kernel: str
    #: Its largest error as a share of the largest number, and how much is allowed.
    error: float
    allowed: float
    #: Seconds of one call whose tensors no cache holds. None: the device had no memory to measure.
    seconds: float | None
    #: Seconds in which the device copies as many bytes as the call's tensors have.
    floor: float | None


class Stopwatch(ModuleType):
    """The kernels of a module, each timed whenever it is called."""

    def __init__(self, kernels: ModuleType, device: torch.device) -> None:
        super().__init__(kernels.__name__)
        self._kernels = kernels
        self._clock = DeviceClock(device)
        self._bandwidth = self._clock.bandwidth()
        #: Of the last call, as in `KernelFigures`.
        self.seconds = self.floor = 0.0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kernel = getattr(self._kernels, name)

        def timed(*args: Any, **options: Any) -> Any:
            found = kernel(*args, **options)
            self.seconds = self._clock.seconds(lambda: kernel(*args, **options))
            tensors = [t for t in tree_leaves((args, options, found)) if torch.is_tensor(t)]
            held = {(t.data_ptr(), t.shape): t.nbytes for t in tensors}
            self.floor = sum(held.values()) / self._bandwidth
            return found

        return timed
