"""Linear layers in full precision, laid out for the device's own matrix product."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncinfer.kernels import onednn, ops
from asyncinfer.kernels.dispatch import has_triton_kernel
from asyncinfer.kernels.linear_tiles import SMALL_TOKENS
from asyncinfer.kernels.native import add_
from asyncinfer.quantization.native_weight import NativeWeight
from asyncinfer.quantization.reordered import ReorderedWeight

__all__ = [
    "CudaLinear",
    "DenseLinear",
    "NativeLinear",
    "OneDnnLinear",
    "dense",
    "has_fused_kernels",
]


class DenseLinear:
    """`F.linear`: cuBLAS on a GPU, torch's BLAS on a CPU. Used where the other classes do not work
    or are not faster."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class OneDnnLinear:
    """A CPU layer with the weight in oneDNN's blocked layout alone. Native code multiplies it for
    as many tokens as that is faster."""

    __slots__ = ("_native", "bias", "held", "weight")

    def __init__(self, weight: ReorderedWeight, bias: torch.Tensor | None) -> None:
        self.held = weight
        self.weight = weight.tensor
        self.bias = bias
        self._native = weight.native

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._native is None or not 0 < x.shape[0] <= self._native.most_rows:
            return onednn.linear(x, self.weight, self.bias)
        y = self._native(x)
        return y if self.bias is None else add_(y, self.bias)


class NativeLinear:
    """A CPU layer whose weight native code alone multiplies."""

    __slots__ = ("bias", "held")

    def __init__(self, weight: NativeWeight, bias: torch.Tensor | None) -> None:
        self.held = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.held.shape[0]
        if not x.shape[0]:
            return x.new_empty(0, outputs)
        y = self.held.product(x)[:, :outputs]
        return y if self.bias is None else add_(y, self.bias)


class CudaLinear:
    """A GPU layer: Triton kernels for the few tokens of a decode step, cuBLAS for more. With a
    `code` the weight is quantised, as in `ops.linear_small`."""

    __slots__ = ("_arrivals", "bias", "code", "offsets", "scales", "weight")

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scales: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        code: str | None = None,
    ) -> None:
        self.weight = weight.contiguous()
        self.bias = bias
        self.scales = scales
        self.offsets = offsets
        self.code = code
        # Not shared between layers, so that CUDA streams of several engines never share counters.
        counters = -(-weight.shape[0] // 64)
        self._arrivals = torch.zeros(counters, dtype=torch.int32, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.fused(x)

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
        """The layer with the norm before it and the gate or residual after it, as in
        `ops.linear_small`; one launch if tokens are few."""
        if x.shape[0] <= SMALL_TOKENS:
            return self.fused_small(x, norm, eps, plus_one, activation, residual)
        return self.unfused(x, norm, eps, plus_one, activation, residual)

    def fused_small(
        self,
        x: torch.Tensor,
        norm: torch.Tensor | None,
        eps: float,
        plus_one: bool,
        activation: str | None,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """`fused` for few tokens, in one launch."""
        return ops.linear_small(
            x,
            self.weight,
            self.bias,
            scales=self.scales,
            offsets=self.offsets,
            code=self.code,
            norm=norm,
            eps=eps,
            plus_one=plus_one,
            activation=activation,
            residual=residual,
            arrivals=self._arrivals,
        )

    def unfused(
        self,
        x: torch.Tensor,
        norm: torch.Tensor | None,
        eps: float,
        plus_one: bool,
        activation: str | None,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """`fused` with each part in a launch of its own."""
        if norm is not None:
            x = ops.rms_norm(x, norm, eps, plus_one=plus_one)
        y = self.product(x)
        if activation == "silu":
            y = ops.silu_mul(y)
        elif activation is not None:
            y = ops.gelu_mul(y, approximate="tanh" if activation == "gelu_tanh" else "none")
        return y if residual is None else y.add_(residual)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The product alone, for many tokens."""
        return F.linear(x, self.weight, self.bias)


def has_fused_kernels(weight: torch.Tensor) -> bool:
    """Whether a weight of this device and dtype becomes a `CudaLinear`: on a GPU with Triton."""
    half = weight.dtype in (torch.float16, torch.bfloat16)
    return half and has_triton_kernel("linear_small", weight)


def dense(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> DenseLinear | OneDnnLinear | NativeLinear | CudaLinear:
    """The layer for the weight's device and dtype."""
    if has_fused_kernels(weight):
        return CudaLinear(weight, bias)
    if weight.device.type == "cpu" and onednn.native_is_faster(weight):
        return NativeLinear(NativeWeight.of(weight), bias)
    if weight.device.type == "cpu" and onednn.reorder_is_faster(weight):
        return OneDnnLinear(ReorderedWeight.of(weight), bias)
    return DenseLinear(weight, bias)
