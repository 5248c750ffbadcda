"""Products with weights in oneDNN's blocks, by code compiled for this machine's processor."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Final

import torch

from asyncinfer.kernels.native.blocked_code import FIELDS, blocked_code, turns_of
from asyncinfer.kernels.native.blocked_tiles_code import Method
from asyncinfer.kernels.native.calls import (
    ALWAYS,
    NEVER,
    empty,
    native_functions,
    room_rows,
)
from asyncinfer.kernels.native.host import Host, compiled_once, host
from asyncinfer.kernels.native.instruction_speed import pairs_are_fast
from asyncinfer.kernels.native.matrix_registers_code import UNIT_NUMBERS
from asyncinfer.kernels.native.threads import parallel_region

__all__ = ["BLOCK_OUTPUTS", "BlockedWeight", "blocked_kernel"]

#: Outputs of a block in oneDNN's layouts: it takes the second for bfloat16 on some processors with
#: AMX.
BLOCK_OUTPUTS: Final = (64, 32)
#: Linux's system call by which a process asks for the state of its matrix units, on x86-64.
_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA = 158, 0x1023, 18
#: Numbers of a weight below which another thread costs more than it saves.
_SHARED = 1 << 15
#: Inputs above which oneDNN's products by matrix units are faster for more than so many rows, as
#: much as 1.9 times: a core's second-level cache does not hold the rows there.
_UNIT_INPUTS, _UNIT_ROWS = 4096, 96
_DTYPES = ("torch.float32", "torch.bfloat16")


class BlockedKernel:
    """The product with weights of one dtype. Each row is computed in the same order, whatever the
    others are and however many threads there are."""

    __slots__ = ("_dtype", "_product", "_turns", "method", "outputs")

    def __init__(
        self, dtype: torch.dtype, outputs: int, target: Host, region: int, method: Method
    ) -> None:
        """`outputs`: of a block; `region`: the address of `GOMP_parallel`. Raises `RuntimeError`
        where the code cannot be made."""
        self.outputs: Final = outputs
        self.method: Final = method
        self._dtype = str(dtype).removeprefix("torch.")
        # Processors with matrix units, all of one maker, read ahead by themselves.
        streams = target.tiles
        sizes = self._dtype, target.lanes, outputs
        self._turns = turns_of(method, target.lanes, target.cache_bytes)
        text = functools.partial(
            blocked_code,
            *sizes,
            method=method,
            streams=streams,
            rounds=target.rounds,
            cache_bytes=target.cache_bytes,
        )
        what = f"blocked {sizes}, {method}{', streams' * streams}"
        about = what, text, target, region, {"product": FIELDS}
        self._product = native_functions(*about, "rows")["product"]

    def __call__(
        self, x: torch.Tensor, place: int, outputs: int, inputs: int, block: int, most_rows: int
    ) -> torch.Tensor:
        """`x W^T` `[rows, outputs]`, of the dtype of `x` `[rows, inputs]`. `place`: the address of
        W's blocks of `block` bytes, see `blocked_code`; `most_rows`: see `BlockedWeight`."""
        x = x.contiguous()
        y = empty(x.shape[0], outputs, dtype=x.dtype)
        shared = outputs * inputs > _SHARED
        threads = torch.get_num_threads() if shared else 1
        self._product(
            *(place, x.data_ptr(), y.data_ptr()),
            *(outputs, inputs, block, x.shape[0], threads, 0, 0),
            shared_above=ALWAYS if shared else NEVER,
            most_rows=most_rows,
            parts=outputs // self.outputs * self._turns.count(room_rows(x.shape[0]), inputs),
        )
        return y

    def most_rows(self, inputs: int) -> int:
        """Rows up to which products with so many inputs are worth it."""
        far = self.method == "units" and inputs > _UNIT_INPUTS
        return _UNIT_ROWS if far else sys.maxsize

    def block_bytes(self, inputs: int) -> int:
        """Bytes of a block, which has room for so many inputs that they fill a line of a cache."""
        size, step = (4, 16) if self._dtype == "float32" else (2, 32)
        return self.outputs * size * -(-inputs // step) * step


@functools.cache
def matrix_units() -> bool:
    """Whether native code may use the processor's matrix units (AMX), for which Linux wants to be
    asked once in a process."""
    target = host()
    if target is None or not (target.tiles and target.rounds) or sys.platform != "linux":
        return False
    refused: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA)
    return refused == 0


def blocked_kernel(dtype: torch.dtype, outputs: int, inputs: int) -> BlockedKernel | None:
    """The kernel for weights of this dtype with so many inputs, in blocks of so many outputs,
    compiled by its first caller. None without `llvmlite`, and where torch's threads cannot be
    used."""
    target, region = host(), parallel_region()
    if target is None or region is None or str(dtype) not in _DTYPES:
        return None
    return _made(dtype, outputs, target, region, _method(dtype, inputs, target))


def _method(dtype: torch.dtype, inputs: int, target: Host) -> Method:
    """What is fastest on this processor."""
    if dtype is not torch.bfloat16:
        return "floats"
    if not target.rounds:
        return "widened"
    if inputs % UNIT_NUMBERS == 0 and matrix_units():
        return "units"
    return "pairs" if pairs_are_fast(target) else "widened"


@compiled_once
def _made(
    dtype: torch.dtype, outputs: int, target: Host, region: int, method: Method
) -> BlockedKernel | None:
    return BlockedKernel(dtype, outputs, target, region, method)


class BlockedWeight:
    """A weight in blocks that the kernel reads where it lies."""

    __slots__ = ("_kernel", "_most_rows", "_place", "_sizes")

    def __init__(
        self, kernel: BlockedKernel, place: int, sizes: tuple[int, int, int], most_rows: int
    ) -> None:
        """`place`: the address, whose memory the caller keeps; `sizes`: outputs, inputs, and bytes
        of a block; `most_rows`: see that method."""
        self._kernel = kernel
        self._most_rows = most_rows
        self._place = place
        self._sizes = sizes

    @classmethod
    def of(
        cls,
        place: int,
        nbytes: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
        block_outputs: int,
        most_rows: int,
    ) -> BlockedWeight | None:
        """The weight that occupies `nbytes` at `place`, in blocks of so many outputs; None without
        a kernel, or if the kernel cannot read its blocks."""
        outputs, inputs = shape
        kernel = blocked_kernel(dtype, block_outputs, inputs)
        if kernel is None or outputs % block_outputs or inputs % 4:
            return None
        block = kernel.block_bytes(inputs)
        if nbytes != outputs // block_outputs * block:
            return None
        most_rows = min(most_rows, kernel.most_rows(inputs))
        return cls(kernel, place, (outputs, inputs, block), most_rows)

    @classmethod
    def fits(cls, weight: torch.Tensor, block_outputs: int) -> bool:
        """Whether a kernel reads a `weight` `[out, in]` that is laid out in blocks of so many
        outputs."""
        outputs, inputs = weight.shape
        whole = outputs % block_outputs == 0 and inputs % 4 == 0
        return whole and blocked_kernel(weight.dtype, block_outputs, inputs) is not None

    @property
    def method(self) -> Method:
        """How numbers are multiplied."""
        return self._kernel.method

    @property
    def most_rows(self) -> int:
        """Rows up to which this product is faster than oneDNN's."""
        return self._most_rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x W^T`."""
        return self._kernel(x, self._place, *self._sizes, self._most_rows)
