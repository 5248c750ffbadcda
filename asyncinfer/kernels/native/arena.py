"""`Arena`: the memory of recorded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Arena", "aligned"]

#: Numbers of the arena's smallest part, and the multiple that each tensor takes of them: a line of
#: the cache.
_PART, _LINE = 1 << 16, 16


class Arena:
    """The memory of recorded tensors, which recordings that never run at the same time share.

    Each layer takes one half and the next layer the other one, which still holds its input."""

    __slots__ = ("_halves", "_place", "_side")

    def __init__(self) -> None:
        self._halves: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self.begin()

    def begin(self) -> None:
        """Begin a recording."""
        self._side, self._place = 0, (0, 0)

    def turn(self) -> None:
        """Begin the next layer."""
        self._side, self._place = 1 - self._side, (0, 0)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of this shape."""
        half, (part, start) = self._halves[self._side], self._place
        floats = -(-prod(shape) * dtype.itemsize // 4)
        count = -(-floats // _LINE) * _LINE
        while part < len(half) and start + count > len(half[part]):
            part, start = part + 1, 0
        if part == len(half):
            half.append(torch.from_numpy(aligned(max(count, _PART))))
        self._place = part, start + count
        return half[part][start : start + count].view(dtype)[: prod(shape)].view(*shape)


def aligned(count: int, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """So many numbers from the begin of a cache's line on. numpy's memory, because torch's
    operators are refused while calls are recorded."""
    size = np.dtype(dtype).itemsize
    memory = np.empty(count + 64 // size, dtype)
    return memory[-(memory.ctypes.data // size) % (64 // size) :][:count]
