"""Products with a weight in oneDNN's layout, by code compiled for this machine's processor."""

from __future__ import annotations

import functools
from typing import Final

import torch

from asyncinfer.kernels.native.between import narrowed, widened
from asyncinfer.kernels.native.blocked_code import (
    FIELDS,
    OUTPUTS,
    blocked_code,
    padded_inputs,
    parts_of,
)
from asyncinfer.kernels.native.calls import (
    ALWAYS,
    NEVER,
    empty,
    native_functions,
    room_rows,
)
from asyncinfer.kernels.native.host import Host, compiled_once, host
from asyncinfer.kernels.native.threads import parallel_region

__all__ = ["BlockedWeight", "blocked_kernel"]

#: Numbers of a weight below which another thread costs more than it saves.
_SHARED = 1 << 15
_DTYPES = ("torch.float32", "torch.bfloat16")


class BlockedKernel:
    """The product with weights of one dtype. Each row is computed in the same order, whatever the
    others are and however many threads there are."""

    __slots__ = ("_dtype", "_product", "pairs")

    def __init__(self, dtype: torch.dtype, target: Host, region: int) -> None:
        """`region`: the address of `GOMP_parallel`. Raises `RuntimeError` where the code cannot be
        made."""
        self._dtype = str(dtype).removeprefix("torch.")
        #: Whether an instruction multiplies two inputs at a time.
        self.pairs: Final = target.rounds and dtype is torch.bfloat16
        text = functools.partial(blocked_code, self._dtype, target.lanes, pairs=self.pairs)
        about = f"blocked {self._dtype}, {self.pairs}", text, target, region, {"product": FIELDS}
        self._product = native_functions(*about, "rows")["product"]

    def __call__(
        self, x: torch.Tensor, place: int, outputs: int, inputs: int, block: int, most_rows: int
    ) -> torch.Tensor:
        """`x W^T` `[rows, outputs]`, of the dtype of `x` `[rows, inputs]`. `place`: the address of
        W's blocks of `block` bytes, see `blocked_code`; `most_rows`: see `BlockedWeight`."""
        rows = (x if self.pairs else widened(x)).contiguous()
        y = empty(x.shape[0], outputs, dtype=rows.dtype)
        shared = outputs * inputs > _SHARED
        threads = torch.get_num_threads() if shared else 1
        self._product(
            *(place, rows.data_ptr(), y.data_ptr()),
            *(outputs, inputs, block, x.shape[0], threads, 0, 0),
            shared_above=ALWAYS if shared else NEVER,
            most_rows=most_rows,
            parts=parts_of(outputs, room_rows(x.shape[0])),
        )
        return narrowed(y, x.dtype)

    def block_bytes(self, inputs: int) -> int:
        """Bytes of `OUTPUTS` outputs."""
        size = 4 if self._dtype == "float32" else 2
        return OUTPUTS * padded_inputs(self._dtype, inputs) * size


def blocked_kernel(dtype: torch.dtype) -> BlockedKernel | None:
    """The kernel for weights of this dtype, compiled by its first caller. None without `llvmlite`,
    for bfloat16 without AVX-512, and where torch's threads cannot be used."""
    target, region = host(), parallel_region()
    if target is None or region is None or str(dtype) not in _DTYPES:
        return None
    if dtype is torch.bfloat16 and target.lanes < 16:
        return None
    return _made(dtype, target, region)


@compiled_once
def _made(dtype: torch.dtype, target: Host, region: int) -> BlockedKernel | None:
    return BlockedKernel(dtype, target, region)


class BlockedWeight:
    """A weight in oneDNN's layout that the kernel reads where it lies."""

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
        cls, place: int, nbytes: int, shape: tuple[int, int], dtype: torch.dtype, most_rows: int
    ) -> BlockedWeight | None:
        """The weight that occupies `nbytes` at `place`; None without a kernel, or if the kernel
        cannot read its blocks."""
        kernel = blocked_kernel(dtype)
        outputs, inputs = shape
        if kernel is None or outputs % OUTPUTS or inputs % 4:
            return None
        block = kernel.block_bytes(inputs)
        if nbytes != outputs // OUTPUTS * block:
            return None
        return cls(kernel, place, (outputs, inputs, block), most_rows)

    @property
    def pairs(self) -> bool:
        """Whether an instruction multiplies two inputs at a time."""
        return self._kernel.pairs

    @property
    def most_rows(self) -> int:
        """Rows up to which this product is faster than oneDNN's."""
        return self._most_rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x W^T`."""
        return self._kernel(x, self._place, *self._sizes, self._most_rows)
