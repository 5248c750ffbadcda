"""Memory of matrices that takes pages as it is written to, and returns them when cleared."""

from __future__ import annotations

import ctypes
import math
import mmap
from typing import Final

import numpy as np
import torch

__all__ = ["forget", "zeros"]

_PAGE: Final = mmap.PAGESIZE


def zeros(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Zeros. On a CPU they take no memory until they are written to."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the system for zeroed pages.
    memory = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


def forget(part: torch.Tensor) -> None:
    """Zero a contiguous part of such a tensor, and return its pages to the system where
    possible."""
    part.zero_()
    begin, end = part.data_ptr(), part.data_ptr() + part.numel() * part.element_size()
    first, last = -(-begin // _PAGE) * _PAGE, end // _PAGE * _PAGE
    if advise is not None and part.device.type == "cpu" and first < last:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


try:
    advise = ctypes.CDLL(None).madvise if hasattr(mmap, "MADV_DONTNEED") else None
except (AttributeError, OSError, TypeError):
    advise = None
