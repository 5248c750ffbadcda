"""Layers of a GPU whose weights stay in whole numbers of 4 bits."""

from __future__ import annotations

import torch

from asyncinfer.kernels import ops
from asyncinfer.kernels.dispatch import has_triton_kernel
from asyncinfer.quantization.dense import CudaLinear
from asyncinfer.quantization.weight import QuantisedWeight

__all__ = ["CudaInt4Linear", "Int4Grouped", "kernels_read"]

_HALVES = (torch.float16, torch.bfloat16)
#: Kernels take groups of at least so many inputs, a power of two, or one group for a whole row.
_LEAST_GROUP = 16


def kernels_read(weight: QuantisedWeight) -> bool:
    """Whether the Triton kernels can read the weight as it is: of 4 bits, on a GPU."""
    if weight.named != "int4" or weight.dtype not in _HALVES:
        return False
    group = weight.group
    fits = group == weight.inputs or (group >= _LEAST_GROUP and group & (group - 1) == 0)
    return fits and has_triton_kernel("linear_small", weight.numbers)


class CudaInt4Linear(CudaLinear):
    """A layer whose kernels turn numbers into floats as they load them: for few tokens in one
    launch with the norm before and the gate or residual after, for many in a tiled product."""

    __slots__ = ()

    def __init__(self, weight: QuantisedWeight, bias: torch.Tensor | None) -> None:
        offsets = None if weight.offsets is None else weight.offsets.contiguous()
        super().__init__(weight.numbers, bias, weight.scales.contiguous(), offsets, "int4")

    def product(self, x: torch.Tensor) -> torch.Tensor:
        assert self.scales is not None
        # As a grouped product with a single expert.
        ends = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
        return ops.grouped_linear(
            x,
            self.weight[None],
            ends,
            None if self.bias is None else self.bias[None],
            scales=self.scales[None],
            offsets=None if self.offsets is None else self.offsets[None],
            code="int4",
        )


class Int4Grouped:
    """Layers of many experts in one grouped product. The host does not read `ends`."""

    def __init__(self, weight: QuantisedWeight, bias: torch.Tensor | None) -> None:
        self._numbers = weight.numbers.contiguous()
        self._scales = weight.scales.contiguous()
        self._offsets = None if weight.offsets is None else weight.offsets.contiguous()
        self._bias = bias

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return ops.grouped_linear(
            x,
            self._numbers,
            ends,
            self._bias,
            scales=self._scales,
            offsets=self._offsets,
            code="int4",
        )
