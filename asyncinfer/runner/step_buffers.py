"""`StepBuffers`: where a step's results arrive on the host, and what carries them there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.runner.accelerator import Accelerator
from asyncinfer.runner.slot_state import Staging

__all__ = ["BufferPool", "PinnedBuffers", "StepBuffers"]

I32 = npt.NDArray[np.int32]

#: Bytes at which each result begins, so that every dtype is aligned.
_ALIGN = 16


class StepBuffers:
    """Host memory that one step in flight owns until it is collected.

    This class serves a CPU, where results lie on the host already, and a draft model, which waits
    for each of its steps. `PinnedBuffers` serves a GPU.
    """

    def __init__(self) -> None:
        #: Pinned memory for the changes that the step sends to the device.
        self.staging = Staging()

    def fetch(self, results: torch.Tensor) -> I32:
        """Start the copy of int32 `results`. Returns the host's memory, to be read after `wait`."""
        return results.numpy()

    def fetch_all(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Start the copies of tensors of any dtype. Returns the host's tensors, to be read
        between `wait` and the next use of these buffers."""
        return [tensor.cpu() for tensor in results]

    def wait(self) -> None:
        """Return when the copies have arrived. Then all other work of the step is done too."""


class PinnedBuffers(StepBuffers):
    """Results are copied to pinned memory, on a stream beside the steps."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._computed, self._arrived = accelerator.event(), accelerator.event()
        self._pinned = accelerator.pinned(0)
        #: Where replayed steps' results arrive, by shape: a tensor, and the same memory in numpy.
        self._landings: dict[torch.Size, tuple[torch.Tensor, I32]] = {}
        #: The device's tensors, kept until they are copied: torch would reuse their memory.
        self.sources: list[torch.Tensor] = []

    def fetch(self, results: torch.Tensor) -> I32:
        landing = self._landings.get(results.shape)
        if landing is None:
            memory = self._accelerator.pinned(results.numel() * 4)
            host = memory.view(torch.int32).view(results.shape)
            landing = self._landings[results.shape] = host, host.numpy()
        self.start([results], [landing[0]])
        return landing[1]

    def fetch_all(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sizes = [-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in results]
        if sum(sizes) > self._pinned.numel():
            self._pinned = self._accelerator.pinned(max(4096, 2 * sum(sizes)))
        hosts, start = [], 0
        for tensor, size in zip(results, sizes, strict=True):
            memory = self._pinned[start : start + tensor.nbytes]
            hosts.append(memory.view(tensor.dtype).view(tensor.shape))
            start += size
        self.start(results, hosts)
        return hosts

    def wait(self) -> None:
        self._arrived.synchronize()
        self.sources.clear()

    def start(self, results: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> None:
        """Copy `results` to `hosts` once the work launched so far is done, while later steps
        run."""
        side = self._accelerator.side
        self._computed.record(self._accelerator.main)
        self._computed.wait(side)
        self.sources += results
        with self._accelerator.on_side():
            for result, host in zip(results, hosts, strict=True):
                host.copy_(result, non_blocking=True)
        self._arrived.record(side)


class BufferPool:
    """Hands the buffers of collected steps to later steps.

    Args:
        accelerator: None on a CPU.
    """

    def __init__(self, accelerator: Accelerator | None) -> None:
        self._accelerator = accelerator
        self._free: list[StepBuffers] = []

    def take(self) -> StepBuffers:
        if self._free:
            return self._free.pop()
        return StepBuffers() if self._accelerator is None else PinnedBuffers(self._accelerator)

    def give_back(self, buffers: StepBuffers) -> None:
        """Take back the buffers of a step that was collected and whose results were read."""
        self._free.append(buffers)
