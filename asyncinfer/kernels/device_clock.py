"""`DeviceClock` measures the time that work takes on a device, without the host's own time."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, Final

import torch

__all__ = ["DeviceClock"]

#: Bytes read between two measurements: more than any cache holds, and enough work for a GPU that
#: the measured work is queued before the reading ends. Writing would leave dirty lines in the
#: cache, whose way to memory would be measured, too.
_FLUSHED_BYTES: Final = {"cuda": 1 << 31, "cpu": 1 << 24}


class DeviceClock:
    """Times work whose inputs no cache holds: by CUDA events, or by the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        size = _FLUSHED_BYTES[device.type]
        self._flushed = torch.empty(size, dtype=torch.uint8, device=device)

    def seconds(self, work: Callable[[], object], *, repeat: int = 15, warmup: int = 3) -> float:
        """The median of `repeat` runs, one at a time, after some that load kernels."""
        for _ in range(warmup):
            work()
        return median(self._cuda_seconds(work, repeat) if self._cuda else _timed(work, repeat))

    def bandwidth(self) -> float:
        """Bytes a second that the device reads and writes in a copy."""
        source, target = self._flushed.chunk(2)
        return self._flushed.nbytes / self.seconds(lambda: target.copy_(source))

    def _cuda_seconds(self, work: Callable[[], object], repeat: int) -> list[float]:
        pairs: list[tuple[Any, Any]] = []
        for _ in range(repeat):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._flushed.view(torch.int64).sum()
            began.record()
            work()
            ended.record()
            ended.synchronize()
            pairs.append((began, ended))
        return [began.elapsed_time(ended) / 1e3 for began, ended in pairs]


def _timed(work: Callable[[], object], repeat: int) -> list[float]:
    found = []
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return found
