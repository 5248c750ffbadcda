"""`KernelFigures`: the accuracy and speed of a kernel, as `asyncinfer doctor` reports them."""

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
    """The figures of a kernel that passed its trial."""

    kernel: str
    #: The largest error as a share of the largest number, and the largest that is allowed.
    error: float
    allowed: float
    #: Seconds of one call whose tensors no cache holds. None: the device lacked memory to measure.
    seconds: float | None
    #: Seconds that the device takes to copy as many bytes as the call's tensors have.
    floor: float | None


class Stopwatch(ModuleType):
    """Stands for a module of kernels, and times each call."""

    def __init__(self, kernels: ModuleType, device: torch.device) -> None:
        super().__init__(kernels.__name__)
        self._kernels = kernels
        self._clock = DeviceClock(device)
        self._bandwidth = self._clock.bandwidth()
        #: The figures of the last call, as in `KernelFigures`.
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
