"""The operators between the matrix products, in float32 on a CPU.

Native code takes a third of the time of torch's operators for few tokens, where calls take most of
it, and half of it for many, since each number is read and written once.
"""

from __future__ import annotations

import functools
import threading

import torch
import torch.nn.functional as F

from asyncinfer.kernels import reference
from asyncinfer.kernels.native.between_code import HEAD, NAMES, between_code
from asyncinfer.kernels.native.calls import (
    ALWAYS,
    NEVER,
    NativeFunction,
    empty,
    float_bits,
    room_threads,
)
from asyncinfer.kernels.native.host import Host, compiled, host
from asyncinfer.kernels.native.threads import parallel_region

__all__ = [
    "BetweenKernels",
    "add_",
    "between_kernels",
    "head_norm",
    "kv_write",
    "rms_norm",
    "rope",
    "silu_mul",
]

#: Arguments of each function behind `HEAD`.
_ARGUMENTS = {"rms_norm": 7, "silu_mul": 3, "rope": 7, "kv_write": 6, "add": 4}
#: Numbers above which another thread saves more than it costs.
_ALONE = 1 << 16
#: Turns of each thread, so that threads end at about the same time.
_TURNS = 4

_lock = threading.Lock()


class BetweenKernels:
    """The operators of `kernels.ops` with the same names as the methods. Each row is computed by
    itself. A method returns None where torch's operators must compute the result."""

    __slots__ = ("_add", "_lanes", "_norm", "_rope", "_silu", "_write")

    def __init__(self, target: Host, region: int) -> None:
        """`region`: the address of `GOMP_parallel`. Raises `RuntimeError` where the code cannot be
        made."""
        self._lanes = target.lanes
        text = functools.partial(between_code, target.lanes)
        addresses = compiled("between", text, target, NAMES, {"GOMP_parallel": region})
        self._norm, self._silu, self._rope, self._write, self._add = (
            NativeFunction(address, len(HEAD) + _ARGUMENTS[name], HEAD.index("threads"))
            for name, address in zip(NAMES, addresses, strict=True)
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
        size = x.shape[-1]
        if size % self._lanes or not (_dense(x) and _dense(weight)):
            return None
        y = empty(*x.shape)
        places = y.data_ptr(), x.data_ptr(), weight.data_ptr()
        _call(self._norm, x.numel() // size, size, *places, 1, size, size, float_bits(eps))
        return y

    def head_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
        """`rms_norm` of each head of `x` `[tokens, heads, size]`, with weights `[heads, size]`."""
        tokens, heads, size = x.shape
        stride, *inside = x.stride()
        if size % self._lanes or inside != [size, 1] or not (_plain(x) and _dense(weight)):
            return None
        y = empty(tokens, heads, size)
        places = y.data_ptr(), x.data_ptr(), weight.data_ptr()
        more = heads, size, stride, float_bits(eps)
        _call(self._norm, tokens, heads * size, *places, *more)
        return y

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor | None:
        rows, both = gate_up.shape
        if both // 2 % self._lanes or not _dense(gate_up):
            return None
        y = empty(rows, both // 2)
        _call(self._silu, rows, both, y.data_ptr(), gate_up.data_ptr(), both // 2)
        return y

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | None:
        tokens, heads, size = x.shape
        stride, *inside = x.stride()
        given = _plain(x) and _dense(cos) and _dense(sin)
        if size // 2 % self._lanes or inside != [size, 1] or not given:
            return None
        y = empty(tokens, heads, size)
        places = (each.data_ptr() for each in (y, x, cos, sin))
        _call(self._rope, tokens, heads * size, *places, heads, size // 2, stride)
        return y

    def kv_write(self, pages: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> bool:
        """Write the heads of `x` `[tokens, heads, size]` to int64 `slots` `[tokens * heads]` of
        `pages`, seen as `[any, size]`; False where torch's operators must do it."""
        tokens, heads, size = x.shape
        stride, *inside = x.stride()
        if size % self._lanes or inside != [size, 1] or not (_plain(x) and _dense(pages)):
            return False
        places = (each.data_ptr() for each in (pages, x, slots))
        _call(self._write, tokens, heads * size, *places, heads, size, stride)
        return True

    def add(self, y: torch.Tensor, x: torch.Tensor) -> bool:
        """Add `x` `[rows, size]` or `[size]` to `y` `[rows, size]`; False where torch must do
        it."""
        rows, size = y.shape
        if size % self._lanes or x.shape not in ((rows, size), (size,)):
            return False
        if not (_dense(y) and _dense(x)):
            return False
        stride = size if x.ndim == 2 else 0
        _call(self._add, rows, size, y.data_ptr(), x.data_ptr(), size, stride)
        return True


def between_kernels() -> BetweenKernels | None:
    """The operators, compiled by their first caller. None without `llvmlite`, on other processors,
    where torch's threads cannot be used, and after a failed trial."""
    with _lock:
        return trusted_kernels(host(), parallel_region())


@functools.cache
def trusted_kernels(target: Host | None, region: int | None) -> BetweenKernels | None:
    """The operators, if their code compiles and a trial is right."""
    if target is None or region is None:
        return None
    try:
        kernels = BetweenKernels(target, region)
    except RuntimeError:
        return None
    return kernels if is_right(kernels) else None


def is_right(kernels: BetweenKernels) -> bool:
    """Whether a few rows agree with torch's results."""
    generator = torch.Generator().manual_seed(6)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x, weight, gates = some(3, 48), some(48), some(3, 96) * 4
    heads, cos, sin = some(3, 5, 64)[:, :4], some(3, 1, 64), some(3, 1, 64)
    norms = some(4, 64)
    pages, slots = torch.zeros(16, 64), torch.tensor([15, 1, 0, 7, 8, 3, 9, 2, 4, 6, 5, 12])
    written = pages.index_copy(0, slots, heads.flatten(0, 1))
    pairs = (
        (kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)),
        (kernels.head_norm(heads, norms, 1e-5), F.rms_norm(heads, (64,), None, 1e-5) * norms),
        (kernels.silu_mul(gates), reference.silu_mul(gates)),
        (kernels.rope(heads, cos, sin), reference.rope(heads, cos, sin)),
        (pages if kernels.kv_write(pages, heads, slots) else None, written),
        *((y if kernels.add(y := x.clone(), more) else None, x + more) for more in (x * 2, weight)),
    )
    return all(
        found is not None and torch.allclose(found, right, rtol=1e-5, atol=1e-5)
        for found, right in pairs
    )


#: The result of `between_kernels`, without its lock.
_kernels = functools.cache(between_kernels)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
) -> torch.Tensor | None:
    """`reference.rms_norm`; None where torch must compute it."""
    if plus_one or not _some(x) or (kernels := _kernels()) is None:
        return None
    return kernels.rms_norm(x, weight, eps)


def head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
    """`BetweenKernels.head_norm`; None where torch must compute it."""
    kernels = _kernels() if _some(x) else None
    return None if kernels is None else kernels.head_norm(x, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor | None:
    """`reference.silu_mul`; None where torch must compute it."""
    kernels = _kernels() if _some(gate_up) else None
    return None if kernels is None else kernels.silu_mul(gate_up)


def kv_write(pages: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> bool:
    """`BetweenKernels.kv_write`; False where torch must do it."""
    kernels = _kernels() if _some(x) else None
    return kernels is not None and kernels.kv_write(pages, x, slots)


def add_(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`y.add_(x)`."""
    kernels = _kernels() if y.ndim == 2 and _some(y) else None
    return y if kernels is not None and kernels.add(y, x) else y.add_(x)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | None:
    """`reference.rope`; None where torch must compute it."""
    kernels = _kernels() if _some(x) else None
    return None if kernels is None else kernels.rope(x, cos, sin)


def _call(function: NativeFunction, rows: int, size: int, *arguments: int) -> None:
    """Call it for rows of `size` numbers, on torch's threads where these pay."""
    shared = rows > 1 and rows * size > _ALONE
    threads = torch.get_num_threads() if shared else 1
    turn = -(-rows // (room_threads(threads) * _TURNS)) if shared else rows
    above = ALWAYS if shared else NEVER
    function(rows, turn, threads, 0, *arguments, shared_above=above)


def _some(x: torch.Tensor) -> bool:
    return x.is_cpu and x.numel() > 0


def _plain(x: torch.Tensor) -> bool:
    """Whether the tensor has numbers in memory and needs no gradient."""
    return type(x) is torch.Tensor and x.dtype is torch.float32 and not x.requires_grad


def _dense(x: torch.Tensor) -> bool:
    return _plain(x) and x.is_contiguous()
