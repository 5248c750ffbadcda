"""Linear layers whose weights are floats of 8 bits (e4m3) with a scale per output, made when a
model is loaded."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

from asyncinfer.kernels.codes import copy_e4m3
from asyncinfer.kernels.native import Layout, packed_kernel
from asyncinfer.quantization.dense import CudaLinear, has_fused_kernels
from asyncinfer.quantization.int8 import product_by_blocks
from asyncinfer.quantization.packed import PackedLinear
from asyncinfer.quantization.weight import QuantisedWeight

__all__ = ["CudaFp8Linear", "Fp8Linear", "fp8", "quantised_fp8", "scaled_product"]

#: The largest e4m3 number.
_MOST: Final = 448.0
#: Numbers of a weight that are quantised at a time.
_PART: Final = 1 << 20
#: `torch._scaled_mm` with scales for rows wants sizes that are multiples of this.
_MULTIPLE: Final = 16


def quantised_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` `[..., in]` as float8_e4m3fn and float32 scales `[...]`: the largest of each row at
    448. A number is off by a sixteenth of itself at most, or by 2^-19 of the row's largest
    (Micikevicius et al., FP8 formats for deep learning, 2022)."""
    rows = weight.reshape(-1, weight.shape[-1])
    numbers = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(len(rows), dtype=torch.float32, device=weight.device)
    step = max(1, _PART // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        floats = rows[part].float()
        scales[part] = floats.abs().amax(dim=1).div_(_MOST)
        # A row of zeros has the scale 0, which must not divide it.
        divisor = torch.where(scales[part] > 0, scales[part], 1.0)
        # Rounding may give a quotient beyond the largest number, which e4m3 has no infinity for.
        numbers[part] = floats.div(divisor[:, None]).clamp_(-_MOST, _MOST).to(numbers.dtype)
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


class CudaFp8Linear(CudaLinear):
    """A GPU's layer. Where the matrix units multiply e4m3 numbers, activations are rounded to e4m3
    too, each token with a scale of its own. Elsewhere each call copies the weight to floats."""

    __slots__ = ("_multiplies",)

    def __init__(
        self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        super().__init__(weight, bias, scales)
        sizes = all(size % _MULTIPLE == 0 for size in weight.shape)
        self._multiplies = sizes and _has_fp8_rows(weight.device)

    def fused(
        self,
        x: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        eps: float = 1e-6,
        plus_one: bool = False,
        activation: str | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.unfused(x, norm, eps, plus_one, activation, residual)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        assert self.scales is not None
        if x.dtype is torch.bfloat16 and self._multiplies:
            y = scaled_product(x, self.weight, self.scales)
            return y if self.bias is None else y.add_(self.bias)
        weight = self.weight.to(x.dtype)
        torch.mul(weight, self.scales[:, None], out=weight)
        return F.linear(x, weight, self.bias)


def scaled_product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`x W^T` in bfloat16 by `torch._scaled_mm`: `x` `[tokens, in]` is rounded to e4m3 with a scale
    per token, and `weight` has one per output, `scales` `[out]`."""
    numbers, of_tokens = quantised_fp8(x)
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
    numbers, scales = quantised_fp8(weight)
    if has_fused_kernels(weight):
        return CudaFp8Linear(numbers, scales, bias)
    layout = Layout("e4m3", weight.shape[1], halves=False, offset=False)
    if weight.device.type == "cpu" and packed_kernel(layout, 1) is not None:
        bits = numbers.view(torch.int8)
        return PackedLinear(
            QuantisedWeight(bits, scales[:, None], None, weight.dtype, "e4m3"), bias
        )
    return Fp8Linear(numbers, scales, bias)


def _has_fp8_rows(device: torch.device) -> bool:
    """Whether the GPU multiplies e4m3 numbers with scales for rows and columns: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
