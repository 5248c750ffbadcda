"""Allocating memory for weights."""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Final

import torch

__all__ = ["empty", "is_out_of_memory"]

#: Bytes of a huge page on most processors.
_HUGE: Final = 2 << 20


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.empty`, in huge pages for a large tensor on the host if the system gives them.

    Reading into new memory then takes one page fault instead of 512, and about half the time, and a
    matrix product needs fewer address look-ups. Only whole huge pages are asked for, so that no
    more memory is taken. Raises `MemoryError` if the system refuses the memory.
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
    # A kernel without huge pages raises.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE, skipped, size // _HUGE * _HUGE)
    return flat[skipped : skipped + size].view(dtype).view(shape)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory could not be allocated, on a device or on the host. torch
    has freed its own cache by then."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # torch raises a plain RuntimeError for memory of the host, pinned or not.
    return any(why in str(error) for why in ("can't allocate memory", "CUDA error: out of memory"))
