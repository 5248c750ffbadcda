"""Linear layers whose weights are floats of 8 bits (e4m3) with a scale per output, made when a
model is loaded."""

from __future__ import annotations

from typing import Final

import torch

from asyncinfer.kernels.codes import copy_e4m3
from asyncinfer.kernels.native import Layout, packed_kernel
from asyncinfer.kernels.rehearsal import device_of
from asyncinfer.quantization.cuda_packed import CudaPackedLinear, on_gpu
from asyncinfer.quantization.int8 import product_by_blocks
from asyncinfer.quantization.packed import PackedLinear
from asyncinfer.quantization.weight import QuantisedWeight

__all__ = ["CudaFp8Linear", "Fp8Linear", "fp8", "in_e4m3", "quantised_fp8", "scaled_product"]

#: The largest e4m3 number.
_MOST: Final = 448.0
#: Numbers that are quantised at a time.
_PART: Final = 1 << 20
#: The same for activations on a GPU, where each part is several launches: 16 MiB of float32.
_LARGE_PART: Final = 1 << 22
#: `torch._scaled_mm` with scales for rows wants sizes that are multiples of this.
_MULTIPLE: Final = 16


def quantised_fp8(weight: torch.Tensor, part: int = _PART) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` `[..., in]` as float8_e4m3fn and float32 scales `[...]`: the largest of each row at
    448. A number is off by a sixteenth of itself at most, or by 2^-19 of the row's largest
    (Micikevicius et al., FP8 formats for deep learning, 2022). `part`: how many numbers are floats
    at the same time."""
    rows = weight.reshape(-1, weight.shape[-1])
    numbers = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(len(rows), dtype=torch.float32, device=weight.device)
    step = max(1, part // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        some = slice(start, start + step)
        floats = rows[some].float()
        scales[some] = floats.abs().amax(dim=1).div_(_MOST)
        # A row of zeros has the scale 0, by which nothing may be divided.
        divisor = torch.where(scales[some] > 0, scales[some], 1.0)
        # Rounding may give a quotient above the largest number, and e4m3 has no infinity.
        numbers[some] = floats.div(divisor[:, None]).clamp_(-_MOST, _MOST).to(numbers.dtype)
    return numbers.view(weight.shape), scales.view(weight.shape[:-1])


class Fp8Linear:
    """A layer whose weight is converted to floats a block at a time in each call."""

    __slots__ = ("bias", "scales", "weight")

    def __init__(
        self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        self.weight = weight
        self.scales = scales
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = product_by_blocks(x, self.weight, self.scales, copy_e4m3)
        return y if self.bias is None else y.add_(self.bias)


class CudaFp8Linear(CudaPackedLinear):
    """A GPU layer with a scale for each output. Where the matrix units multiply e4m3 numbers, the
    activations of many tokens are rounded to e4m3 too, with a scale for each token."""

    __slots__ = ("_multiplies",)

    def __init__(self, weight: QuantisedWeight, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        sizes = all(size % _MULTIPLE == 0 for size in weight.shape)
        self._multiplies = sizes and _has_fp8_rows(weight.device)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.bfloat16 or not self._multiplies:
            return super().product(x)
        assert self.scales is not None
        numbers = self.weight.view(torch.float8_e4m3fn)
        y = scaled_product(x, numbers, self.scales.view(-1))
        return y if self.bias is None else y.add_(self.bias)


def scaled_product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`x W^T` in bfloat16 by `torch._scaled_mm`: `x` `[tokens, in]` is rounded to e4m3 with a scale
    per token, and `weight` has one per output, `scales` `[out]`."""
    numbers, of_tokens = quantised_fp8(x, _LARGE_PART)
    y: torch.Tensor = torch._scaled_mm(
        numbers,
        weight.t(),
        scale_a=of_tokens[:, None],
        scale_b=scales[None, :],
        out_dtype=torch.bfloat16,
    )
    return y


def fp8(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> Fp8Linear | CudaFp8Linear | PackedLinear:
    """The layer for the weight's device and dtype."""
    if on_gpu(weight):
        return CudaFp8Linear(in_e4m3(weight), bias)
    layout = Layout("e4m3", weight.shape[1], halves=False, offset=False)
    if weight.device.type == "cpu" and packed_kernel(layout, 1) is not None:
        return PackedLinear(in_e4m3(weight), bias)
    return Fp8Linear(*quantised_fp8(weight), bias)


def in_e4m3(weight: torch.Tensor) -> QuantisedWeight:
    """`quantised_fp8`, as a weight whose rows are groups."""
    numbers, scales = quantised_fp8(weight)
    return QuantisedWeight(numbers.view(torch.int8), scales[..., None], None, weight.dtype, "e4m3")


def _has_fp8_rows(device: torch.device) -> bool:
    """Whether the GPU multiplies e4m3 numbers with scales for rows and columns: from Hopper on."""
    device = device_of(device)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
