"""CPU layers whose weights stay in a few bits."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from asyncinfer.kernels import onednn
from asyncinfer.kernels.block_types import BLOCK_TYPES
from asyncinfer.kernels.codes import decoded
from asyncinfer.kernels.native import Layout, add_, packed_kernel
from asyncinfer.quantization.blocks import BlockWeight
from asyncinfer.quantization.laid import LaidWeight, laid
from asyncinfer.quantization.packed_weight import PackedWeight
from asyncinfer.quantization.stacked import StackedWeight
from asyncinfer.quantization.weight import QuantisedWeight

__all__ = ["PackedLinear", "PackedRows", "held_for_rows", "packed_linear"]

#: Numbers that are unpacked at a time: 4 MiB of float32 or 2 of bfloat16, which fit the cores'
#: shared cache.
_TILE = 1 << 20
#: Up to so many rows the kernel beats unpacking and a product in bfloat16, where the processor has
#: instructions for that.
_KERNEL_ROWS = 12


class PackedRows:
    """The rows of a weight `[out, in]` on a CPU. A `BlockWeight` stays as it is where there is a
    kernel for it; all others are a `LaidWeight`.

    Blocks of whole numbers of 4 bits are the rows of torch's quantised embeddings, which it unpacks
    in one pass. Others are unpacked by the kernel, or else by torch's operators.
    """

    __slots__ = ("_blocks", "_factor", "_kernel", "_layout", "dtype", "shape", "weight")

    def __init__(self, weight: QuantisedWeight | BlockWeight | LaidWeight) -> None:
        self.shape = weight.shape
        self.dtype = weight.dtype
        #: The weight in the blocks that are read.
        self.weight: BlockWeight | LaidWeight
        if isinstance(weight, BlockWeight):
            self._layout = Layout(weight.code, BLOCK_TYPES[weight.code].numbers)
            self._kernel = packed_kernel(self._layout)
            if self._kernel is not None:
                self.weight = weight
                self._factor = 1.0
                self._blocks = weight.blocks.view(self.shape[0], -1, self._layout.block)
                return
            weight = weight.grouped()
        self.weight = held = laid(weight) if isinstance(weight, QuantisedWeight) else weight
        # The factor of unpacked numbers.
        self._factor = held.factor
        self._blocks, self._layout = held.blocks, held.layout
        self._kernel = packed_kernel(self._layout, self._blocks.shape[1])

    @property
    def device(self) -> torch.device:
        return self._blocks.device

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self._blocks.nbytes

    def __getitem__(self, index: slice | torch.Tensor) -> torch.Tensor:
        """Rows as float32 `[rows, in]`."""
        blocks = self._blocks[index]
        if self._layout.code == "int4":
            floats: torch.Tensor = torch.ops.quantized.embedding_bag_4bit_unpack(
                blocks.view(-1, blocks.shape[-1])
            )
        elif self._kernel is not None:
            floats = self._kernel.floats(blocks)
        else:
            floats = self._decoded(blocks)
        floats = floats.view(-1, self.shape[1])
        return floats if self._factor == 1.0 else floats.mul_(self._factor)

    def in_bfloat16(self, start: int, end: int) -> torch.Tensor:
        """Rows `start` to `end - 1` in bfloat16, rounded once."""
        if self._kernel is None:
            return self[start:end].bfloat16()
        halves = self._kernel.floats(self._blocks[start:end], torch.bfloat16)
        # A power of two rounds nothing.
        return halves if self._factor == 1.0 else halves.mul_(self._factor)

    def _decoded(self, blocks: torch.Tensor) -> torch.Tensor:
        """The numbers of `blocks` `[rows, groups, bytes]` as float32 `[rows, groups, group]`, by
        torch's operators."""
        layout = self._layout
        numbers, ends = blocks[..., : layout.numbers], blocks[..., layout.numbers :]
        both = ends.contiguous().view(torch.float16 if layout.halves else torch.float32).float()
        floats = decoded(numbers, layout.code).mul_(both[..., :1])
        return floats.add_(both[..., 1:]) if layout.offset else floats

    @property
    def has_kernel(self) -> bool:
        """Whether `product` can be called."""
        return self._kernel is not None

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """`x W^T`, float32 `[tokens, out]`, of float32 `x` `[tokens, in]`."""
        assert self._kernel is not None
        return self._kernel(x, self._blocks, self._factor)


class PackedLinear:
    """A layer whose weight is multiplied as it is packed, by a kernel made for the processor.

    Where there is no kernel, and for many tokens where the processor has instructions for
    bfloat16, the weight is unpacked a tile at a time in each call, for a product in floats while
    the tile is in the cache.
    """

    __slots__ = ("_dtype", "_product", "bias", "rows")

    def __init__(
        self,
        weight: QuantisedWeight | BlockWeight | LaidWeight | PackedRows,
        bias: torch.Tensor | None,
    ) -> None:
        self.rows = weight if isinstance(weight, PackedRows) else PackedRows(weight)
        self.bias = bias
        halves = self.rows.dtype is torch.bfloat16 and onednn.available(torch.bfloat16)
        self._dtype = torch.bfloat16 if halves else torch.float32
        self._product = self.rows.product if self.rows.has_kernel else None

    @property
    def held(self) -> PackedWeight:
        """The weight in its blocks."""
        return self.rows.weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        few = self._dtype is torch.float32 or x.shape[0] <= _KERNEL_ROWS
        if not few or self._product is None:
            y = self._by_tiles(x)
        elif x.dtype is torch.float32:
            y = self._product(x)
        else:
            y = self._product(x.float()).to(x.dtype)
        return y if self.bias is None else add_(y, self.bias)

    def _by_tiles(self, x: torch.Tensor) -> torch.Tensor:
        outputs, inputs = self.rows.shape
        inside, halves = x.to(self._dtype), self._dtype is torch.bfloat16
        product = onednn.linear if halves else F.linear
        step = max(1, _TILE // inputs)
        y = inside.new_empty(x.shape[0], outputs)
        for start in range(0, outputs, step):
            end = min(start + step, outputs)
            tile = self.rows.in_bfloat16(start, end) if halves else self.rows[start:end]
            y[:, start:end] = product(inside, tile)
        return y.to(x.dtype)


class StackedLinear:
    """Layers of the same inputs, whose outputs are concatenated."""

    __slots__ = ("_parts", "bias", "held")

    def __init__(self, weight: StackedWeight, bias: torch.Tensor | None) -> None:
        self._parts = [packed_linear(part, None) for part in weight.parts]
        #: The weights in their blocks.
        self.held: StackedWeight = replace(weight, parts=tuple(part.held for part in self._parts))
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([part(x) for part in self._parts], dim=-1)
        return y if self.bias is None else y.add_(self.bias)


def packed_linear(
    weight: PackedWeight | PackedRows, bias: torch.Tensor | None
) -> PackedLinear | StackedLinear:
    """The CPU layer for a weight that stays as it is."""
    if isinstance(weight, StackedWeight):
        return StackedLinear(weight, bias)
    assert isinstance(weight, QuantisedWeight | BlockWeight | LaidWeight | PackedRows)
    return PackedLinear(weight, bias)


def held_for_rows(weight: torch.Tensor | PackedWeight) -> torch.Tensor | PackedRows:
    """A weight whose rows are looked up: packed on a CPU if it is quantised, else as floats."""
    if isinstance(weight, torch.Tensor):
        return weight
    if weight.device.type == "cpu" and isinstance(
        weight, QuantisedWeight | BlockWeight | LaidWeight
    ):
        return PackedRows(weight)
    return weight.dequantised()
