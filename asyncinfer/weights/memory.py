"""Memory that weights are read into."""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Final

import torch

__all__ = ["empty", "is_out_of_memory"]

#: Of a huge page, on the processors that most people have.
_HUGE: Final = 2 << 20


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor as `torch.empty` makes it, its values whatever they are.

    A large one on the host lies in huge pages, where the system gives them to who asks: reading
    into new memory takes one fault instead of 512, and about half the time; and a matrix product
    looks up fewer addresses. Whole pages only are asked for, so that no more memory is taken.
    `MemoryError` where the system refuses.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error.strerror}") from error
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    skipped = -flat.data_ptr() % _HUGE
    # A kernel that has none says so.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE, skipped, size // _HUGE * _HUGE)
    return flat[skipped : skipped + size].view(dtype).view(shape)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is one for memory that could not be allocated, on a device or on the host.
    Torch has tried everything by then, its own cache included."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # A CPU's, and pinned memory's, have no class of their own.
    return any(why in str(error) for why in ("can't allocate memory", "CUDA error: out of memory"))
