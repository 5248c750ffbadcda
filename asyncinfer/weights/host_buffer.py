"""`HostBuffer`: where a part of a checkpoint's file waits for its copy to the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["FilePart", "HostBuffer"]


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a tensor of the checkpoint, and where it goes."""

    file: str
    tensor: str
    #: Bytes from the tensor's beginning.
    offset: int
    stored: torch.dtype
    #: The elements of the model's tensor that the part fills, in order.
    target: torch.Tensor

    @property
    def size(self) -> int:
        return self.target.numel() * self.stored.itemsize


class HostBuffer:
    """Host memory in which a chunk waits for its copy; pinned for a GPU."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def copy(self, chunk: FilePart) -> None:
        """Copy the chunk to its target; on a GPU in the order of the current stream."""
        source = self.memory[: chunk.size].view(chunk.stored)
        if chunk.target.dtype != chunk.stored:
            # The conversion then runs on the target's device.
            source = source.to(chunk.target.device, non_blocking=True)
        chunk.target.copy_(source, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(chunk.target.device))

    def ready(self) -> bool:
        """Whether it may be written to."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until it may be written to."""
        if self._copied is not None:
            self._copied.synchronize()
