"""Results on their way to the host, on a stream of their own, into pinned buffers that rotate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.runner.accelerator import Accelerator
from asyncinfer.runner.slot_state import Staging

__all__ = ["Berth", "Berths"]

_ALIGN = 16


class Berth:
    """What a step in flight has to itself until it is collected: pinned memory both ways, and the
    events around the way back."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._drawn, self._there = accelerator.event(), accelerator.event()
        #: For what the step sends.
        self.staging = Staging()
        self._pinned = accelerator.pinned(0)
        #: Where a recorded step's results land, by shape: a tensor and the same memory.
        self._landings: dict[torch.Size, tuple[torch.Tensor, npt.NDArray[np.int32]]] = {}
        #: Results are kept until they were copied.
        self._sources: list[torch.Tensor] = []

    def fetch(self, results: torch.Tensor) -> npt.NDArray[np.int32]:
        """Start the copy of int32 `results`; where it will be, after `wait`."""
        landing = self._landings.get(results.shape)
        if landing is None:
            memory = self._accelerator.pinned(results.numel() * 4)
            host = memory.view(torch.int32).view(results.shape)
            landing = self._landings[results.shape] = host, host.numpy()
        self._start([results], [landing[0]])
        return landing[1]

    def fetch_all(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Start the copies of tensors of any kind; where they will be, after `wait`, until the
        berth is given back."""
        sizes = [-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in results]
        if sum(sizes) > self._pinned.numel():
            self._pinned = self._accelerator.pinned(max(4096, 2 * sum(sizes)))
        hosts, start = [], 0
        for tensor, size in zip(results, sizes, strict=True):
            memory = self._pinned[start : start + tensor.nbytes]
            hosts.append(memory.view(tensor.dtype).view(tensor.shape))
            start += size
        self._start(results, hosts)
        return hosts

    def wait(self) -> None:
        """Until the copies are there, and with them all that the step did."""
        self._there.synchronize()
        self._sources.clear()

    def _start(self, results: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> None:
        side = self._accelerator.side
        self._drawn.record(self._accelerator.main)
        self._drawn.wait(side)
        self._sources += results
        with self._accelerator.on_side():
            for result, host in zip(results, hosts, strict=True):
                host.copy_(result, non_blocking=True)
        self._there.record(side)


class Berths:
    """As many as there are steps in flight."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._free: list[Berth] = []

    def take(self) -> Berth:
        return self._free.pop() if self._free else Berth(self._accelerator)

    def give_back(self, berth: Berth) -> None:
        """The step was collected and its results were read."""
        self._free.append(berth)
