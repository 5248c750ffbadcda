"""Linear layers whose weights are int8 with a scale per output, made when a model is loaded."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from asyncinfer.kernels import onednn
from asyncinfer.kernels.native import Layout, packed_kernel
from asyncinfer.quantization.cuda_packed import CudaPackedLinear, on_gpu
from asyncinfer.quantization.packed import PackedLinear
from asyncinfer.quantization.weight import QuantisedWeight

__all__ = ["Int8Linear", "in_8_bits", "int8", "product_by_blocks", "quantised"]

#: Numbers of a weight that are converted to floats at a time: 4 MiB of float32, which fits the
#: cache that cores share. Smaller blocks cost more in calls than they gain.
_BLOCK = 1 << 20
#: Up to so many tokens torch's own product of bfloat16 and int8 is faster.
_PACKED_TOKENS = 4
#: torch's own product reads beyond a row whose length is not a multiple of this.
_PACKED_INPUTS = 32


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` `[..., out, in]` as int8 and float32 scales `[..., out]`: `int8 * scale`, symmetric,
    the largest of each row at 127. A number is off by half a scale at most."""
    weight = weight.contiguous()
    numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[:-1], dtype=torch.float32, device=weight.device)
    inputs = weight.shape[-1]
    rows = _rows(inputs)
    # A part at a time, since the whole weight in float32 would take twice the model's dtype.
    for part, into, scale in zip(
        torch.split(weight.view(-1, inputs), rows),
        torch.split(numbers.view(-1, inputs), rows),
        torch.split(scales.view(-1), rows),
        strict=True,
    ):
        floats = part.float()
        scale.copy_(floats.abs().amax(dim=1)).div_(127)
        # A row of zeros has the scale 0, which must not divide it.
        divisor = torch.where(scale > 0, scale, 1.0)
        into.copy_(floats.div(divisor[:, None]).round_().clamp_(-127, 127))
    return numbers, scales


def in_8_bits(weight: torch.Tensor) -> QuantisedWeight:
    """`quantised`, as a weight whose rows are groups."""
    numbers, scales = quantised(weight)
    return QuantisedWeight(numbers, scales[..., None], None, weight.dtype)


class Int8Linear:
    """A layer whose weight is int8, and converted to floats a block at a time in each call."""

    __slots__ = ("bias", "packed", "scales", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.scales = quantised(weight)
        self.bias = bias
        # The scales for torch's own product, if it can be used.
        self.packed: torch.Tensor | None = None
        if weight.device.type == "cpu" and _packs(weight):
            self.packed = self.scales.to(weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is not None and x.shape[0] <= _PACKED_TOKENS:
            y: torch.Tensor = torch.ops.aten._weight_int8pack_mm(
                x.contiguous(), self.weight, self.packed
            )
        else:
            y = self.by_blocks(x)
        return y if self.bias is None else y.add_(self.bias)

    def by_blocks(self, x: torch.Tensor) -> torch.Tensor:
        return product_by_blocks(x, self.weight, self.scales, torch.Tensor.copy_)


def int8(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> Int8Linear | PackedLinear | CudaPackedLinear:
    """The layer for the weight's device and dtype."""
    if on_gpu(weight):
        return CudaPackedLinear(in_8_bits(weight), bias)
    layout = Layout("int8", weight.shape[1], halves=False, offset=False)
    if weight.device.type == "cpu" and packed_kernel(layout, 1) is not None:
        return PackedLinear(in_8_bits(weight), bias)
    return Int8Linear(weight, bias)


def product_by_blocks(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    copy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """`x W^T` for a weight of 8-bit numbers `[out, in]`, each row times its scale; `copy` writes
    some of its rows to floats."""
    # 8-bit numbers are exact in every dtype, but sums of them may overflow in float16, and a CPU
    # without instructions for bfloat16 multiplies float32 several times as fast.
    cpu = x.device.type == "cpu"
    slow = cpu and x.dtype is torch.bfloat16 and not onednn.available(torch.bfloat16)
    dtype = torch.float32 if slow or x.dtype is torch.float16 else x.dtype
    own = cpu and onednn.available(dtype)
    product = onednn.linear if own else F.linear
    outputs, inputs = weight.shape
    inside = x.to(dtype)
    y = inside.new_empty(x.shape[0], outputs)
    rows = min(_rows(inputs), outputs)
    floats = inside.new_empty(rows, inputs)
    for part, out in zip(torch.split(weight, rows), torch.split(y, rows, dim=1), strict=True):
        out.copy_(product(inside, copy(floats[: part.shape[0]], part)))
    return y.mul_(scales).to(x.dtype)


def _rows(inputs: int) -> int:
    return max(1, _BLOCK // max(1, inputs))


def _packs(weight: torch.Tensor) -> bool:
    known = hasattr(torch.ops.aten, "_weight_int8pack_mm")
    return known and weight.dtype is torch.bfloat16 and weight.shape[1] % _PACKED_INPUTS == 0
