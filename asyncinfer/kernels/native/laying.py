"""Writes the numbers of a quantised matrix in one pass into the blocks that its products read."""

from __future__ import annotations

import ctypes

import torch

from asyncinfer.kernels.native.host import Host, compiled, compiled_once, host
from asyncinfer.kernels.native.laying_code import NAMES, RUN, laying_code
from asyncinfer.kernels.orders import NumberOrder, ordered

__all__ = ["LayingKernels", "laying_kernels"]

_pointer, _long = ctypes.c_void_p, ctypes.c_int64
_KINDS = (_pointer,) * 2 + (_long,) * 7 + (_pointer, _long, _pointer)
#: The fewest bytes that are copied at a time.
_LEAST = 8
#: e4m3 numbers without their sign that are NaN.
_NAN = 0x7F


class LayingKernels:
    """Writes numbers into blocks, on the caller's thread. Several threads may use it at once."""

    __slots__ = ("_functions",)

    def __init__(self, target: Host) -> None:
        """Raises `RuntimeError` where the code cannot be made."""
        kind = ctypes.CFUNCTYPE(None, *_KINDS)
        addresses = compiled("laying", laying_code, target, NAMES, {})
        self._functions = {name: kind(at) for name, at in zip(NAMES, addresses, strict=True)}

    def takes(self, order: NumberOrder, outputs: int, numbers: int) -> bool:
        """Whether a matrix in this order, with groups of `numbers` bytes, can be laid."""
        if order.kind == "rows":
            return numbers > 0 and numbers % _LEAST == 0
        return (
            numbers > 0 and numbers % RUN == 0 and outputs % (32 if order.kind == "awq" else 4) == 0
        )

    def lay(
        self,
        blocks: torch.Tensor,
        ends: torch.Tensor,
        order: NumberOrder,
        stored: torch.Tensor,
        first: int = 0,
    ) -> bool:
        """Write `stored` to uint8 `blocks` `[outputs, groups, block]`, whose blocks are numbers
        and an end: uint8 `ends` `[outputs, groups, 2, 4 or 8]`, of which those of full blocks are
        written, too. All are contiguous, and `takes` them.

        `stored` is a part of the tensor along its first dimension from `first` on: uint8 `[some
        outputs, bytes]` for "rows", whose outputs `blocks` has alone; int32 `[some words, outputs]`
        in multiples of 4 for "words", `[some inputs, outputs / 8]` in multiples of 32 for "awq".

        Returns whether no byte of "rows" is NaN as a float of 8 bits.
        """
        (outputs, _, block), size = blocks.shape, ends.shape[-1]
        numbers = block - size
        if not stored.numel():
            return True
        most = (ctypes.c_uint8 * 16)()
        name: str = order.kind
        count, start = len(stored), 0
        if order.kind == "rows":
            width = 16 if numbers % 16 == 0 else _LEAST
            name, count = f"{'swapped' if order.swapped else 'rows'}_{width}", stored.shape[1]
        else:
            start = 4 * first if order.kind == "words" else first // 2
        self._functions[name](
            blocks.data_ptr(),
            stored.data_ptr(),
            outputs,
            blocks.stride(0),
            numbers,
            block,
            start,
            count,
            order.flip,
            ends.data_ptr(),
            size,
            most,
        )
        return bool(max(most) < _NAN)


def laying_kernels() -> LayingKernels | None:
    """The functions, compiled by their first caller. None without `llvmlite`, on other processors,
    and after a failed trial."""
    target = host()
    return None if target is None else trusted_kernels(target)


@compiled_once
def trusted_kernels(target: Host) -> LayingKernels | None:
    """The functions, if a trial is right."""
    kernels = LayingKernels(target)
    return kernels if is_right(kernels) else None


def is_right(kernels: LayingKernels) -> bool:
    """Whether a small matrix in each order agrees with torch's result."""
    generator = torch.Generator().manual_seed(7)

    def some(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    words = some(16, 4 * 20).view(torch.int32)
    inputs = some(64, 4 * 20).view(torch.int32)
    cases = [
        (NumberOrder(), some(3, 72), 24, 3),
        (NumberOrder(flip=0x80), some(3, 96), 48, 3),
        (NumberOrder(swapped=True), some(3, 96), 32, 3),
        (NumberOrder(swapped=True), some(3, 96), 24, 3),
        (NumberOrder("words", 0x80), words, 32, 20),
        (NumberOrder("awq"), inputs, 16, 160),
    ]
    for order, stored, numbers, outputs in cases:
        right = ordered(stored, order, outputs)
        groups = right.shape[1] // numbers
        for size in (2, 4, 8):
            ends = some(outputs, groups, size)
            blocks = torch.zeros(outputs, groups, numbers + size, dtype=torch.uint8)
            step = len(stored) if order.kind == "rows" else len(stored) // 2
            for first in range(0, len(stored), step):
                kernels.lay(blocks, ends, order, stored[first : first + step], first)
            wanted = torch.cat((right.view(outputs, groups, numbers), ends), dim=-1)
            if not torch.equal(blocks, wanted):
                return False
    return True
