"""LLVM's code that turns the blocks of packed weights into floats: numbers, scales and offsets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncinfer.kernels.block_types import BLOCK_TYPES, BlockType
from asyncinfer.kernels.codes import TABLES
from asyncinfer.kernels.native.assembly import Assembly
from asyncinfer.kernels.native.block_reader import BlockReader
from asyncinfer.kernels.native.host import Host
from asyncinfer.kernels.native.tables import tables_for

__all__ = ["WHOLE", "Blocks", "Layout"]

#: How many bytes of W are prefetched: memory answers after several hundred cycles.
_AHEAD = 8192
#: Bytes of a cache line, which one prefetch brings.
_LINE = 64
#: Where a whole row is one group, the row's inputs are a multiple of this number.
WHOLE = 16
#: The most numbers of a group for which the loop is unrolled whole. A larger group is cut into
#: parts.
_UNROLLED = 128
#: The bits of a float16 that an e4m3 number's bits occupy, and by which factor the e4m3 number is
#: larger than that float16. The biases of their exponents are 7 and 15.
_HALF_BITS = 0xBF80 - (1 << 16)
_HALF_BIAS = 256.0


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a packed row of W in memory."""

    #: What a number stands for. "int8": itself; "e4m3": a float of 8 bits that is not NaN; a code
    #: of `TABLES`: one of its 16 values, with two numbers in a byte. Or one of `BLOCK_TYPES`, which
    #: says itself where a block's scales and offsets are.
    code: str
    #: Numbers that share a scale, or those of a GGUF block; 0: all of a row.
    group: int
    #: Whether scales and offsets are float16; else they are float32.
    halves: bool = False
    #: Whether an offset follows the scale.
    offset: bool = False

    @property
    def kind(self) -> BlockType | None:
        """The block type of a GGUF file."""
        return BLOCK_TYPES.get(self.code)

    @property
    def bits(self) -> int:
        """Bits of a number: 4 or 8."""
        return 4 if self.code in TABLES else 8

    @property
    def numbers(self) -> int:
        """Bytes of a group's numbers, if its size is known."""
        return self.group * self.bits // 8

    @property
    def ends(self) -> int:
        """Bytes of a group's scale and offset."""
        return (2 if self.halves else 4) * (2 if self.offset else 1)

    @property
    def block(self) -> int:
        """Bytes of a group, or of a block."""
        return self.numbers + self.ends if self.kind is None else self.kind.size


class Blocks(Assembly):
    """Emits the code that turns blocks of one layout into vectors of floats."""

    def __init__(self, layout: Layout, host: Host, fields: Sequence[str] = ()) -> None:
        """`fields`: those of a task. Raises `RuntimeError` where the processor has no instruction
        for a code."""
        unrolled = layout.group or WHOLE
        if layout.group > _UNROLLED and layout.kind is None:
            unrolled = math.gcd(layout.group, _UNROLLED)
        super().__init__("packed", math.gcd(host.lanes, unrolled), fields)
        self.layout, self.unrolled = layout, unrolled
        self._reader = None if layout.kind is None else BlockReader(self, layout.kind, host)
        self._tables = tables_for(self, host, layout.code) if layout.code in TABLES else None
        self._spreads = self._tables is not None and self.lanes == 16 and host.spreads
        self._qwords = self.ir.VectorType(self.i64, 8)
        self._bytes64 = self.ir.VectorType(self.byte, 64)
        if self._spreads:
            name = "llvm.x86.avx512.pmultishift.qb.512"
            self._spread = self.declare(name, self._bytes64, *[self._bytes64] * 2)

    def row_bytes(self, b: Any, groups: Any) -> tuple[Any, Any]:
        """Bytes of a row of W, packed and as floats."""
        if not self.layout.group:
            return b.add(groups, self.integer(self.layout.ends)), b.mul(groups, self.integer(4))
        floats = b.mul(groups, self.integer(4 * self.layout.group))
        return b.mul(groups, self.integer(self.layout.block)), floats

    def ends(self, b: Any, block: Any, groups: Any) -> tuple[Any, ...]:
        """A block's scale and offset in every lane, or its 16 values in one or two tables. The code
        prefetches later blocks, since rows are too short for a processor to detect the sequence."""
        if self._reader is not None:
            for line in range(0, self.layout.block, _LINE):
                self._fetch_later(b, self.at(b, block, self.integer(line)))
            return self._reader.ends(b, block)
        if self.layout.group:
            self._fetch_later(b, block)
        numbers = self.integer(self.layout.numbers) if self.layout.group else groups
        scale, offset = self._scale(b, self.at(b, block, numbers))
        if self._tables is not None:
            return self._tables.made(b, scale, offset)
        return scale, offset

    def _scale(self, b: Any, at: Any) -> tuple[Any, Any]:
        """The scale and the offset at an address, in every lane; None for no offset."""
        layout = self.layout
        count, kind = 2 if layout.offset else 1, self.half if layout.halves else self.float
        pair = b.load(at, typ=self.ir.VectorType(kind, count), align=2 if layout.halves else 1)
        # Scale and offset alternate in the lanes: one broadcast and one conversion load both.
        turns = self.shuffle(b, pair, [lane % count for lane in range(self.lanes)])
        if layout.halves:
            turns = b.fpext(turns, self.floats)
        if not layout.offset:
            scale, offset = turns, None
        else:
            scale, offset = (
                self.shuffle(b, turns, [lane // 2 * 2 + which for lane in range(self.lanes)])
                for which in (0, 1)
            )
        if layout.code == "e4m3":
            scale = b.fmul(scale, self.ir.Constant(self.floats, [_HALF_BIAS] * self.lanes))
        return scale, offset

    def numbers(self, b: Any, block: Any, place: Any, start: int, ends: tuple[Any, ...]) -> Any:
        """A vector of a block's values from number `place + start` on."""
        lanes = self.lanes
        if self._reader is not None:
            # A GGUF block is unrolled whole, so `place` is 0.
            return self._reader.numbers(b, block, start, (ends[0], ends[1]))
        number = b.add(place, self.integer(start))
        if not self.layout.group:
            self._fetch_later(b, self.at(b, block, number))
        if self.layout.bits == 8:
            return self.scaled(b, self._wide_numbers(b, self.at(b, block, number)), *ends)
        at = self.at(b, block, b.lshr(number, self.integer(1)))
        if self._tables is not None and self._spreads:
            return self._tables.values(b, ends, self._spread_out(b, at))
        words = b.load(at, typ=self.ir.VectorType(self.i32, lanes // 8), align=1)
        bits = self.shuffle(b, words, [lane // 8 for lane in range(lanes)])
        shifts = self.ir.Constant(self.ints, [lane % 8 * 4 for lane in range(lanes)])
        bits = b.lshr(bits, shifts)
        if self._tables is not None:
            return self._tables.values(b, ends, bits)
        bits = b.and_(bits, self.ir.Constant(self.ints, [15] * lanes))
        return self.scaled(b, b.uitofp(bits, self.floats), *ends)

    def _wide_numbers(self, b: Any, at: Any) -> Any:
        """A vector of numbers of 8 bits, before their scale."""
        numbers = b.load(at, typ=self.ir.VectorType(self.byte, self.lanes), align=1)
        if self.layout.code == "int8":
            return b.sitofp(b.sext(numbers, self.ints), self.floats)
        # Exponent and fraction move to where float16 has them, and the sign stays first. The
        # float16 is smaller by the difference of the exponents' biases. So are subnormal numbers.
        kind = self.ir.VectorType(self.ir.IntType(16), self.lanes)
        moved = b.shl(b.sext(numbers, kind), self.ir.Constant(kind, [7] * self.lanes))
        kept = b.and_(moved, self.ir.Constant(kind, [_HALF_BITS] * self.lanes))
        return b.fpext(b.bitcast(kept, self.ir.VectorType(self.half, self.lanes)), self.floats)

    def _spread_out(self, b: Any, at: Any) -> Any:
        """The 16 4-bit numbers of the 8 bytes at an address, each in the lowest bits of a lane."""
        word = b.load(at, typ=self.i64, align=1)
        undefined = self.ir.Constant(self._qwords, self.ir.Undefined)
        words = b.insert_element(undefined, word, self.ir.Constant(self.i32, 0))
        words = b.bitcast(self.shuffle(b, words, [0] * 8), self._bytes64)
        shifts = [byte if byte % 4 == 0 else 0 for byte in range(64)]
        control = self.ir.Constant(self._bytes64, shifts)
        return b.bitcast(b.call(self._spread, [control, words]), self.ints)

    def _fetch_later(self, b: Any, block: Any) -> None:
        # Codes of 4 bits take so long to decode that prefetches into the nearest cache keep up.
        near = self.layout.bits == 4 and self._reader is None
        self.fetch(b, self.at(b, block, self.integer(_AHEAD)), near=near)
