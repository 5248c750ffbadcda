"""Host to device without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["upload"]

_ALIGN = 16


def upload(device: torch.device, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
    """The arrays as tensors on `device`, same shapes and dtypes.

    On a CPU the tensors share the arrays' memory, which must not be written to afterwards. To any
    other device all arrays go in one copy from pinned memory, ordered on the current stream.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return _packed(device, arrays, pin=True)


def _packed(
    device: torch.device, arrays: Sequence[npt.NDArray[Any]], *, pin: bool
) -> list[torch.Tensor]:
    starts: list[int] = []
    size = 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGN) * _ALIGN
    # torch's allocator of pinned memory hands this buffer out again only after the copy is done.
    staging = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    view = staging.numpy()
    for start, array in zip(starts, arrays, strict=True):
        view[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = staging.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_dtype(array)).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def _dtype(array: npt.NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
