"""Products with packed weights on a CPU, by code compiled for this machine's processor."""

from __future__ import annotations

import functools
import time
from dataclasses import replace

import torch

from asyncinfer.kernels.block_types import block_floats
from asyncinfer.kernels.codes import decoded
from asyncinfer.kernels.native.calls import (
    ALWAYS,
    NEVER,
    empty,
    float_bits,
    is_recording,
    native_functions,
    room_threads,
)
from asyncinfer.kernels.native.host import Host, compiled_once, host
from asyncinfer.kernels.native.packed_blocks import WHOLE, Layout
from asyncinfer.kernels.native.packed_code import FIELDS, ROWS, packed_code
from asyncinfer.kernels.native.threads import ThreadChoices, parallel_region

__all__ = ["PackedKernel", "packed_kernel"]

#: Chunks of W's rows for each thread. Where another program slows one thread, the others take some
#: of its chunks.
_CHUNKS = 4
#: Numbers of W times rows of x below which another thread costs more than it saves.
_SHARED = 1 << 15
#: Bytes of x that one pass over W reads: they stay in the cache of a core.
_CACHED = 1 << 18
#: Numbers of the narrowest vectors. Groups that are no multiple of them are left to torch.
_LEAST = 8
#: Rows and groups of the trial's weight.
_OUTPUTS, _GROUPS = 2 * ROWS + 1, 2


class PackedKernel:
    """The product of one layout of blocks."""

    __slots__ = ("_batch", "_choices", "_layout", "_product", "_unpack")

    def __init__(self, layout: Layout, target: Host, region: int) -> None:
        """`region`: the address of `GOMP_parallel`. Raises `RuntimeError` where the code cannot be
        made."""
        self._batch, self._layout = target.batch, layout
        self._choices = ThreadChoices()
        text = functools.partial(packed_code, layout, target)
        fields = dict.fromkeys(("product", "floats", "halves"), FIELDS)
        made = native_functions(f"packed {layout}", text, target, region, fields)
        self._product = made["product"]
        self._unpack = {torch.float32: made["floats"], torch.bfloat16: made["halves"]}

    def __call__(self, x: torch.Tensor, blocks: torch.Tensor, factor: float) -> torch.Tensor:
        """`factor * x W^T`, float32 `[rows, out]`, of float32 `x` `[rows, in]`, on the threads of
        the caller's torch where these are faster at the moment. `blocks` is uint8
        `[out, groups, block]` and contiguous."""
        x = x.contiguous()
        rows, inputs = x.shape
        outputs, groups, _ = blocks.shape
        y = empty(rows, outputs)
        if not y.numel():
            return y
        size = max(4 * self._batch, _CACHED // (4 * inputs))
        for start in range(0, rows, size):
            count = min(size, rows - start)
            shared, choice = outputs * inputs * count > _SHARED, None
            threads = torch.get_num_threads() if shared else 1
            began = time.perf_counter()
            if threads > 1 and not is_recording():
                choice = self._choices.of(outputs, inputs, count)
                threads = threads if choice.shares(began) else 1
            scratch, most = None, room_threads(threads)
            if count > self._batch:
                scratch = empty(most * ROWS * inputs)
            chunk = -(-outputs // (most * _CHUNKS * ROWS)) * ROWS
            self._product(
                blocks.data_ptr(),
                x.data_ptr() + 4 * start * inputs,
                y.data_ptr() + 4 * start * outputs,
                0 if scratch is None else scratch.data_ptr(),
                outputs,
                count,
                groups if self._layout.group else inputs,
                chunk,
                float_bits(factor),
                threads,
                0,
                0,
                shared_above=ALWAYS if shared else NEVER,
            )
            if choice is not None:
                choice.took(threads > 1, began, time.perf_counter())
        return y

    def floats(self, blocks: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The numbers as float32 (None) or bfloat16 `[out, in]`, times their scales. `blocks` as
        for a product."""
        blocks = blocks.contiguous()
        outputs, groups, block = blocks.shape
        layout = self._layout
        inputs = groups * layout.group or block - layout.ends
        y = torch.empty(outputs, inputs, dtype=dtype or torch.float32)
        threads = 1
        if y.numel() > _SHARED:
            threads = torch.get_num_threads()
        if y.numel():
            chunk = -(-outputs // (threads * _CHUNKS))
            count = groups if layout.group else inputs
            places = blocks.data_ptr(), 0, y.data_ptr(), 0
            sizes = outputs, 0, count, chunk, float_bits(1.0), threads
            self._unpack[y.dtype](*places, *sizes, 0, 0)
        return y


def packed_kernel(layout: Layout, groups: int = 0) -> PackedKernel | None:
    """The kernel for blocks of this layout, of which a row has `groups` (0: any number), compiled
    by its first caller.

    None without `llvmlite`, on other processors, where torch's threads cannot be used, for codes
    that the processor has no instruction for, and if a trial is wrong.
    """
    target, region = host(), parallel_region()
    if target is None or region is None or layout.group % _LEAST:
        return None
    whole = groups == 1 and layout.kind is None and layout.bits == 8
    if whole and layout.group % WHOLE == 0:
        # The group is a whole row, and one kernel serves rows of all lengths.
        layout = replace(layout, group=0)
    return trusted_kernel(layout, target, region)


@compiled_once
def trusted_kernel(layout: Layout, target: Host, region: int) -> PackedKernel | None:
    """The kernel, if a trial is right."""
    kernel = PackedKernel(layout, target, region)
    return kernel if _is_right(kernel, layout) else None


def _is_right(kernel: PackedKernel, layout: Layout) -> bool:
    """Whether a small product agrees with torch's result."""
    generator = torch.Generator().manual_seed(layout.group)
    if layout.kind is None:
        blocks, weight = _groups(layout, generator)
    else:
        shape = _OUTPUTS * _GROUPS, layout.block
        # With the second highest bit of each byte cleared, no scale is infinite.
        blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) & 0xBF
        weight = block_floats(blocks, layout.code).view(_OUTPUTS, -1)
        blocks = blocks.view(_OUTPUTS, _GROUPS, -1)
    if not torch.allclose(kernel.floats(blocks), weight, rtol=1e-6, atol=1e-6):
        return False
    halves, rounded = kernel.floats(blocks, torch.bfloat16).float(), weight.bfloat16().float()
    # A processor may make numbers zero that are smaller than any normal one.
    if not torch.allclose(halves, rounded, rtol=2**-7, atol=2.0**-126):
        return False
    for rows in (1, ROWS + 1):
        x = torch.randn(rows, weight.shape[1], generator=generator, dtype=torch.float32)
        expected = x.double() @ weight.double().T
        off = (kernel(x, blocks, 2.0).double() - 2 * expected).abs().amax()
        if not off <= 1e-4 * expected.abs().amax():
            return False
    return True


def _groups(layout: Layout, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks of a few rows, and their weight as floats."""
    groups = _GROUPS if layout.group else 1
    shape = _OUTPUTS, groups, layout.numbers or 3 * WHOLE
    numbers = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    if layout.code == "e4m3":
        # No NaN, which has all bits set but the sign.
        numbers &= 0xFE
    kind = torch.float16 if layout.halves else torch.float32
    ends = torch.randn(_OUTPUTS, groups, 2, generator=generator, dtype=torch.float32)[
        ..., : 1 + layout.offset
    ].to(kind)
    blocks = torch.cat((numbers, ends.contiguous().view(torch.uint8)), dim=-1)
    weight = decoded(numbers, layout.code) * ends[..., :1].float()
    if layout.offset:
        weight += ends[..., 1:].float()
    return blocks, weight.flatten(1)
