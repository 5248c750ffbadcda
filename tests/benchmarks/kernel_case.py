"""`KernelCase`: one kernel on one set of inputs, with its exact answer and the bytes it moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["KernelCase"]


@dataclass(frozen=True)
class KernelCase:
    """One kernel on one set of inputs."""

    name: str
    #: Its name and its shape, for a table.
    title: str
    #: Bytes it reads and writes at least, and operations of matrix products.
    bytes: int
    flops: int
    #: Its result on the device, in the model's dtype.
    run: Callable[[], Sequence[torch.Tensor]]
    #: What it would be in float64, of the same inputs, on the same device.
    exact: Callable[[], Sequence[torch.Tensor]]
    #: What `run` has written beside its result; read for the check alone.
    written: Callable[[], Sequence[torch.Tensor]] = tuple

    def error(self) -> float:
        """The largest difference of what there is from `exact`, over the largest of that. Tokens
        drawn count by the share that differ."""
        worst = 0.0
        found = [*self.run(), *self.written()]
        for result, true in zip(found, self.exact(), strict=True):
            if not result.is_floating_point():
                worst = max(worst, float((result != true).double().mean()))
                continue
            scale = float(true.abs().amax().clamp(min=1e-30))
            worst = max(worst, float((result.double() - true).abs().amax()) / scale)
        return worst
