"""The random tensors of a trial."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Final

import torch

__all__ = ["SEED", "Case", "Numbers"]

SEED: Final = 20_251

#: Runs a module's kernel on numbers in a dtype, and returns the results.
Case = Callable[[ModuleType, torch.dtype], tuple[torch.Tensor, ...]]


class Numbers:
    """Random tensors that are the same in each run, rounded to the dtype of the trial."""

    def __init__(self, device: torch.device, dtype: torch.dtype, wanted: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(SEED)
        self._device, self._dtype, self._wanted = device, dtype, wanted

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(*shape, generator=self._generator, dtype=torch.float32).mul_(scale)
        return values.to(self._device, self._dtype).to(self._wanted)

    def bytes(self, *shape: int) -> torch.Tensor:
        """uint8, of any value."""
        values = torch.randint(256, shape, generator=self._generator, dtype=torch.uint8)
        return values.to(self._device)
