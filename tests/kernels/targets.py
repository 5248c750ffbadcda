"""Where a Triton kernel's cases run: in the interpreter here, on a GPU where there is one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

__all__ = ["ONE_DTYPE", "TARGETS", "Target"]


@dataclass(frozen=True)
class Target:
    """A device, and the dtype the kernels are given there."""

    device: str
    dtype: torch.dtype
    #: How far a result may lie from the exact one, relative to its size: a few roundings.
    tolerance: float

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def check(self, result: torch.Tensor, exact: torch.Tensor) -> None:
        """`result` in any dtype against `exact` in float64."""
        assert exact.dtype is torch.float64
        close = torch.testing.assert_close
        close(result.double(), exact, rtol=self.tolerance, atol=self.tolerance)


_ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TARGETS = [
    pytest.param(Target("cpu", torch.float32, 1e-5), id="interpreted-float32"),
    pytest.param(Target("cpu", torch.float16, 4e-3), id="interpreted-float16"),
    pytest.param(Target("cuda", torch.float16, 4e-3), id="cuda-float16", marks=_ON_GPU),
    pytest.param(Target("cuda", torch.bfloat16, 2e-2), id="cuda-bfloat16", marks=_ON_GPU),
]
#: For what does not depend on the dtype, which the interpreter is slow for:
#: `@pytest.mark.parametrize("target", ONE_DTYPE, indirect=True)`.
ONE_DTYPE = [target for target in TARGETS if target.id != "interpreted-float16"]
