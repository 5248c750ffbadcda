"""The operators between the matrix products, in float32 and bfloat16 on a CPU.

Native code takes a third of the time of torch's operators for few tokens, where calls take most of
it, and half of it for many, since each number is read and written once.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from asyncinfer.kernels import reference
from asyncinfer.kernels.native.between_code import NAMES, between_code
from asyncinfer.kernels.native.calls import empty, float_bits
from asyncinfer.kernels.native.host import Host, compiled_once, host
from asyncinfer.kernels.native.row_kernels import RowKernels
from asyncinfer.kernels.native.threads import parallel_region

__all__ = [
    "BetweenKernels",
    "add_",
    "between_kernels",
    "head_norm",
    "kv_write",
    "narrowed",
    "rms_norm",
    "rope",
    "silu_mul",
    "widened",
]

#: Arguments of each function.
_ARGUMENTS = dict(zip(NAMES, (7, 3, 7, 6, 4, 4, 3), strict=True))
_DTYPES = ("torch.float32", "torch.bfloat16")


class BetweenKernels(RowKernels):
    """The operators of `kernels.ops` with the same names as the methods, for numbers of one dtype.
    Each row is computed by itself. A method returns None where torch's operators must compute the
    result."""

    __slots__ = ("_lanes",)

    def __init__(self, dtype: torch.dtype, target: Host, region: int) -> None:
        """`region`: the address of `GOMP_parallel`. Raises `RuntimeError` where the code cannot be
        made."""
        self._lanes = target.lanes
        name = str(dtype).removeprefix("torch.")
        text = functools.partial(between_code, name, target.lanes, rounds=target.rounds)
        super().__init__(f"between {name}", text, dtype, target, region, _ARGUMENTS)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
        size = x.shape[-1]
        if size % self._lanes or not (self.dense(x) and self.dense(weight)):
            return None
        y = empty(*x.shape, dtype=self._dtype)
        places = y.data_ptr(), x.data_ptr(), weight.data_ptr()
        self.call("rms_norm", x.numel() // size, size, *places, 1, size, size, float_bits(eps))
        return y

    def head_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
        """`rms_norm` of each head of `x` `[tokens, heads, size]`, with weights `[heads, size]`."""
        tokens, heads, size = x.shape
        stride, *inside = x.stride()
        if size % self._lanes or inside != [size, 1] or not (self.plain(x) and self.dense(weight)):
            return None
        y = empty(tokens, heads, size, dtype=self._dtype)
        places = y.data_ptr(), x.data_ptr(), weight.data_ptr()
        more = heads, size, stride, float_bits(eps)
        self.call("rms_norm", tokens, heads * size, *places, *more)
        return y

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor | None:
        rows, both = gate_up.shape
        if both // 2 % self._lanes or not self.dense(gate_up):
            return None
        y = empty(rows, both // 2, dtype=self._dtype)
        self.call("silu_mul", rows, both, y.data_ptr(), gate_up.data_ptr(), both // 2)
        return y

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | None:
        tokens, heads, size = x.shape
        stride, *inside = x.stride()
        given = self.plain(x) and _floats(cos) and _floats(sin)
        if size // 2 % self._lanes or inside != [size, 1] or not given:
            return None
        y = empty(tokens, heads, size, dtype=self._dtype)
        places = (each.data_ptr() for each in (y, x, cos, sin))
        self.call("rope", tokens, heads * size, *places, heads, size // 2, stride)
        return y

    def kv_write(self, pages: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> bool:
        """Write the heads of `x` `[tokens, heads, size]` to int64 `slots` `[tokens * heads]` of
        `pages`, seen as `[any, size]`; False where torch's operators must do it."""
        tokens, heads, size = x.shape
        stride, *inside = x.stride()
        if size % self._lanes or inside != [size, 1] or not (self.plain(x) and self.dense(pages)):
            return False
        places = (each.data_ptr() for each in (pages, x, slots))
        self.call("kv_write", tokens, heads * size, *places, heads, size, stride)
        return True

    def add(self, y: torch.Tensor, x: torch.Tensor) -> bool:
        """Add `x` `[rows, size]` or `[size]` to `y` `[rows, size]`; False where torch must do
        it."""
        rows, size = y.shape
        if size % self._lanes or x.shape not in ((rows, size), (size,)):
            return False
        if not (self.dense(y) and self.dense(x)):
            return False
        stride = size if x.ndim == 2 else 0
        self.call("add", rows, size, y.data_ptr(), x.data_ptr(), size, stride)
        return True

    def widen(self, x: torch.Tensor) -> torch.Tensor | None:
        """float32 numbers of `x`."""
        rows, size = len(x), x[0].numel()
        inside = x[0].is_contiguous() and self.plain(x)
        if size % self._lanes or not inside:
            return None
        y = empty(*x.shape)
        self.call("widen", rows, size, y.data_ptr(), x.data_ptr(), size, x.stride(0))
        return y

    def narrow(self, x: torch.Tensor) -> torch.Tensor | None:
        """Numbers of float32 `x`."""
        rows, size = len(x), x[0].numel()
        if size % self._lanes or not _floats(x):
            return None
        y = empty(*x.shape, dtype=self._dtype)
        self.call("narrow", rows, size, y.data_ptr(), x.data_ptr(), size)
        return y


def between_kernels(dtype: torch.dtype | None = None) -> BetweenKernels | None:
    """The operators for this dtype (None: float32), compiled by their first caller. None without
    `llvmlite`, on other processors, where torch's threads cannot be used, and after a failed
    trial."""
    dtype, target, region = dtype or torch.float32, host(), parallel_region()
    if target is None or region is None or str(dtype) not in _DTYPES:
        return None
    return trusted_kernels(dtype, target, region)


@compiled_once
def trusted_kernels(dtype: torch.dtype, target: Host, region: int) -> BetweenKernels | None:
    """The operators, if a trial is right."""
    kernels = BetweenKernels(dtype, target, region)
    return kernels if is_right(kernels, dtype) else None


def is_right(kernels: BetweenKernels, dtype: torch.dtype) -> bool:
    """Whether a few rows agree with torch's results."""
    generator = torch.Generator().manual_seed(6)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

    x, weight, gates = some(3, 48), some(48), some(3, 96) * 4
    heads, cos, sin = some(3, 5, 64)[:, :4], some(3, 1, 64).float(), some(3, 1, 64).float()
    norms = some(4, 64)
    pages, slots = (
        torch.zeros(16, 64, dtype=dtype),
        torch.tensor([15, 1, 0, 7, 8, 3, 9, 2, 4, 6, 5, 12]),
    )
    written = pages.index_copy(0, slots, heads.flatten(0, 1))
    pairs = (
        (kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)),
        (kernels.head_norm(heads, norms, 1e-5), F.rms_norm(heads, (64,), None, 1e-5) * norms),
        (kernels.silu_mul(gates), reference.silu_mul(gates)),
        (kernels.rope(heads, cos, sin), reference.rope(heads, cos, sin)),
        (pages if kernels.kv_write(pages, heads, slots) else None, written),
        *((y if kernels.add(y := x.clone(), more) else None, x + more) for more in (x * 2, weight)),
        (kernels.widen(heads), heads.float()),
        (kernels.narrow(cos), cos.to(dtype)),
    )
    off = 1e-5 if dtype is torch.float32 else 2e-2
    return all(
        found is not None and torch.allclose(found, right, rtol=off, atol=off)
        for found, right in pairs
    )


#: The result of `between_kernels`, without its lock.
_kernels = functools.cache(between_kernels)


def _kernels_for(x: torch.Tensor) -> BetweenKernels | None:
    return _kernels(x.dtype) if x.is_cpu and x.numel() else None


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
) -> torch.Tensor | None:
    """`reference.rms_norm`; None where torch must compute it."""
    kernels = None if plus_one else _kernels_for(x)
    return None if kernels is None else kernels.rms_norm(x, weight, eps)


def head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
    """`BetweenKernels.head_norm`; None where torch must compute it."""
    kernels = _kernels_for(x)
    return None if kernels is None else kernels.head_norm(x, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor | None:
    """`reference.silu_mul`; None where torch must compute it."""
    kernels = _kernels_for(gate_up)
    return None if kernels is None else kernels.silu_mul(gate_up)


def kv_write(pages: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> bool:
    """`BetweenKernels.kv_write`; False where torch must do it."""
    kernels = _kernels_for(x)
    return kernels is not None and kernels.kv_write(pages, x, slots)


def add_(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`y.add_(x)`."""
    kernels = _kernels_for(y) if y.ndim == 2 else None
    return y if kernels is not None and kernels.add(y, x) else y.add_(x)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | None:
    """`reference.rope`; None where torch must compute it."""
    kernels = _kernels_for(x)
    return None if kernels is None else kernels.rope(x, cos, sin)


def widened(x: torch.Tensor) -> torch.Tensor:
    """`x` as float32; contiguous unless it is float32 already."""
    if x.dtype is torch.float32:
        return x
    kernels = _kernels_for(x)
    found = None if kernels is None else kernels.widen(x)
    return x.float().contiguous() if found is None else found


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 `x` as this dtype."""
    if x.dtype is dtype:
        return x
    kernels = _kernels(dtype) if x.is_cpu and x.numel() else None
    found = None if kernels is None else kernels.narrow(x)
    return x.to(dtype) if found is None else found


def _floats(x: torch.Tensor) -> bool:
    """Whether the tensor has float32 numbers in memory, side by side, and needs no gradient."""
    plain = type(x) is torch.Tensor and x.dtype is torch.float32 and not x.requires_grad
    return plain and x.is_contiguous()
