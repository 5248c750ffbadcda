"""The matrix product of oneDNN, for CPUs.

It is several times as fast as `F.linear` where MKL does not take its fast path. A weight can be
laid out once in the blocks in which oneDNN reads it. The operators are torch's own, which its
Inductor backend calls. Callers use `F.linear` for a torch without them, and for a dtype that the
processor has no instructions for.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from math import inf
from pathlib import Path

import torch
import torch.nn.functional as F

from asyncinfer.kernels.native import (
    BLOCK_OUTPUTS,
    BlockedWeight,
    in_blocks,
    own_blocks_work,
    read_own_blocks,
)
from asyncinfer.kernels.onednn_memory import first_numbers, place_of
from asyncinfer.kernels.threads import set_thread_count

__all__ = [
    "available",
    "blocked",
    "linear",
    "mkl_is_fast",
    "mkl_keeps_up",
    "multiplies_bfloat16",
    "native_is_faster",
    "read_blocked",
    "reorder",
    "reorder_is_faster",
    "torch_is_slow",
]

#: The row count that oneDNN plans a weight's layout for. Layouts planned for 1 row are slow at 16
#: rows. Those planned for 16 are as fast as any at 1 and at 1,024 rows.
_PLANNED_ROWS = 16
#: A float32 matrix with a side below this and at most so many bytes is multiplied faster by MKL on
#: its fast path, for 1 to 2,048 rows: a call of MKL costs 5 us, a call of oneDNN 20.
_SMALL_SIDE, _SMALL_BYTES = 512, 8 << 20
#: The product of `mkl_keeps_up`: query tokens of all heads, numbers of a vector, and keys.
_TILE = 384, 64, 512
#: A product of so few rows waits for memory, which native code always reads faster.
_FEW = 6
#: The row count at which native code's speed is measured first, and the rows that native code then
#: computes: up to `_MANY`, or any number.
_SOME, _MANY, _NO_END = 16, 96, 1 << 62
#: The sides of the measured weight, which a second-level cache holds.
_SIDES = 256, 512
#: How often each of two products is measured at least, and for how many seconds.
_TURNS, _LONG_ENOUGH = 10, 0.01
#: How many times as long native code may take, because a row's bits do not depend on other rows.
_TIE = 1.1


@functools.cache
def available(dtype: torch.dtype) -> bool:
    """Whether `reorder` and `linear` work for this dtype on this machine."""
    ops = torch.ops.mkldnn
    if not hasattr(ops, "_reorder_linear_weight") or not hasattr(ops, "_linear_pointwise"):
        return False
    if dtype is torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    return dtype is torch.float32


@functools.cache
def mkl_is_fast() -> bool:
    """Whether torch's own products take MKL's fast path, which MKL takes on Intel processors
    only."""
    try:
        about = Path("/proc/cpuinfo").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    mkl = bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
    return mkl and "GenuineIntel" in about


@functools.cache
def mkl_keeps_up() -> bool:
    """Whether MKL's products of a tile of attention take at most one and a half times as long as
    oneDNN's. On processors that are not Intel's one of the two is faster by far, depending on their
    instructions. So the first call measures, which takes some milliseconds on one thread. The least
    time of several products counts, since another program can delay some of them."""
    if mkl_is_fast() or not available(torch.float32):
        return True
    x, weight = (
        torch.ones(_TILE[0], _TILE[1], dtype=torch.float32),
        torch.ones(_TILE[2], _TILE[1], dtype=torch.float32),
    )
    return _faster(lambda: F.linear(x, weight), lambda: linear(x, weight), 1.5)


def _faster(one: Callable[[], object], other: Callable[[], object], times: float = 1.0) -> bool:
    """Whether `one` takes at most `times` times as long as `other` on one thread. False where the
    number of threads cannot be set."""
    count = torch.get_num_threads()
    if not set_thread_count(1):
        return False
    try:
        first, second = _least_seconds(one, other)
        return first <= times * second
    finally:
        set_thread_count(count)


def _least_seconds(*products: Callable[[], object]) -> list[float]:
    """The least seconds of several calls of each product, in turns. The least counts, since a
    disturbance only makes a call longer, and turns take longer together than most disturbances."""
    least, turns, start = [inf] * len(products), 0, time.perf_counter()
    while turns < _TURNS or time.perf_counter() - start < _LONG_ENOUGH:
        for index, product in enumerate(products):
            began = time.perf_counter()
            product()
            least[index] = min(least[index], time.perf_counter() - began)
        turns += 1
    return least


def reorder_is_faster(weight: torch.Tensor) -> bool:
    """Whether `linear` by a reordered `weight` `[out, in]` is faster than `F.linear`."""
    if not available(weight.dtype):
        return False
    small = min(weight.shape) < _SMALL_SIDE and weight.nbytes <= _SMALL_BYTES
    if not (small and weight.dtype is torch.float32 and mkl_is_fast()):
        return True
    # Native code is as fast as MKL there, and can be recorded.
    outputs = _block_outputs(weight.dtype)
    return outputs is not None and BlockedWeight.fits(weight, outputs)


def reorder(weight: torch.Tensor) -> torch.Tensor:
    """A copy of `weight` `[out, in]` in oneDNN's own layout, for `linear` only."""
    reordered: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PLANNED_ROWS)
    return reordered


@functools.cache
def _native_rows(dtype: torch.dtype) -> int:
    """Rows up to which native code is faster than oneDNN. The first call measures, which takes some
    milliseconds on one thread."""
    weight = reorder(torch.ones(_SIDES, dtype=dtype))
    native = _read(weight, _SIDES, _NO_END)
    if native is None or not _wins(native, weight, _SOME):
        return _FEW
    return _NO_END if _wins(native, weight, 2 * _MANY) else _MANY


def _wins(native: BlockedWeight, weight: torch.Tensor, rows: int) -> bool:
    """Whether native code is about as fast as oneDNN, for a weight of `_SIDES` and so many rows."""
    x = torch.ones(rows, _SIDES[1], dtype=weight.dtype)
    return _faster(lambda: native(x), lambda: linear(x, weight), _TIE)


def multiplies_bfloat16() -> bool:
    """Whether this CPU has a product of bfloat16 numbers besides torch's, which is slow."""
    return available(torch.bfloat16) or own_blocks_work(torch.bfloat16, _SIDES[1])


def torch_is_slow(x: torch.Tensor) -> bool:
    """Whether torch's batched products of this dtype take several times as long as float32 ones:
    bfloat16 on a CPU without instructions for it."""
    return x.dtype is torch.bfloat16 and x.device.type == "cpu" and not available(x.dtype)


def native_is_faster(weight: torch.Tensor) -> bool:
    """Whether native code multiplies a CPU's `weight` `[out, in]` faster in blocks of its own than
    oneDNN or torch does: bfloat16, on processors without instructions for it."""
    dtype = weight.dtype
    if dtype is not torch.bfloat16 or not own_blocks_work(dtype, weight.shape[1]):
        return False
    return not available(dtype) or _own_blocks_win()


@functools.cache
def _own_blocks_win() -> bool:
    """Whether native code is faster in blocks of its own than oneDNN for bfloat16. The first call
    measures, which takes some milliseconds on one thread."""
    if _block_outputs(torch.bfloat16) is not None:
        # It reads those of oneDNN.
        return False
    plain = torch.ones(_SIDES, dtype=torch.bfloat16)
    blocks, weight = in_blocks(plain).view(torch.uint8), reorder(plain)
    native = read_own_blocks(blocks, _SIDES, plain.dtype)
    return native is not None and all(_wins(native, weight, rows) for rows in (_SOME, 2 * _MANY))


@functools.cache
def _block_outputs(dtype: torch.dtype) -> int | None:
    """How many outputs a block of oneDNN's layout has; None if it is not as native code reads it.
    A weight whose numbers are those of their outputs shows it."""
    most = max(BLOCK_OUTPUTS)
    order = torch.arange(most, dtype=torch.float32)
    found = first_numbers(reorder(order[:, None].expand(-1, most).to(dtype)), 2 * most)
    for outputs in BLOCK_OUTPUTS:
        # Two inputs of a bfloat16 weight lie side by side.
        numbers = order[:outputs].repeat_interleave(1 if dtype is torch.float32 else 2)
        if found is not None and torch.equal(found.float(), numbers.repeat(2 * most)[: len(found)]):
            return outputs
    return None


def _read(weight: torch.Tensor, shape: tuple[int, int], most_rows: int) -> BlockedWeight | None:
    found, outputs = place_of(weight), _block_outputs(weight.dtype)
    if found is None or outputs is None:
        return None
    return BlockedWeight.of(*found, shape, weight.dtype, outputs, most_rows)


def read_blocked(weight: torch.Tensor, shape: tuple[int, int]) -> BlockedWeight | None:
    """`blocked` without the trial, of a weight that has passed it."""
    return _read(weight, shape, _native_rows(weight.dtype))


def blocked(weight: torch.Tensor, shape: tuple[int, int]) -> BlockedWeight | None:
    """A reordered `weight`, whose shape was `[out, in]`, for native code that multiplies faster.

    None where there is no such code, and where a trial product is wrong. The trial is needed since
    oneDNN does not document its layout.
    """
    found = read_blocked(weight, shape)
    if found is None:
        return None
    x = torch.randn(
        2, shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float32
    ).to(weight.dtype)
    right = linear(x, weight).float()
    off = (found(x).float() - right).abs().amax()
    allowed = 1e-4 if weight.dtype is torch.float32 else 2e-2
    return found if off <= allowed * right.abs().amax() else None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`; `x` `[n, in]`, `weight` `[out, in]`, plain (strided) or reordered."""
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y
