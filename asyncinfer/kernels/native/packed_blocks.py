"""LLVM's code that reads the blocks of packed weights: numbers, scales and offsets to floats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from asyncinfer.kernels.codes import TABLES
from asyncinfer.kernels.native.assembly import Assembly
from asyncinfer.kernels.native.host import Host

__all__ = ["WHOLE", "Blocks", "Layout"]

#: How many bytes of W are fetched ahead: memory answers after several hundred cycles.
_AHEAD = 8192
#: Rows that are one group have a multiple of this many inputs.
WHOLE = 16
#: Groups of up to so many numbers are unrolled whole, larger ones part by part.
_UNROLLED = 128
#: The bits of an e4m3 number in float16, and how many times the number is larger: their exponents'
#: biases are 7 and 15.
_HALF_BITS = 0xBF80 - (1 << 16)
_HALF_BIAS = 256.0


@dataclass(frozen=True, slots=True)
class Layout:
    """How a row of W lies in memory."""

    #: What a number stands for: "int8", itself; "e4m3", a float of 8 bits that is not NaN; else one
    #: of the 16 values of a code of 4 bits in `TABLES`, two numbers a byte.
    code: str
    #: Numbers that share a scale; 0: all of a row, however many that are.
    group: int
    #: Whether scales and offsets are float16; else they are float32.
    halves: bool
    #: Whether an offset follows the scale.
    offset: bool

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
        """Bytes of a group."""
        return self.numbers + self.ends


class Blocks(Assembly):
    """The part of a module that turns blocks of one layout into vectors of floats."""

    def __init__(self, layout: Layout, host: Host) -> None:
        """Raises `RuntimeError` where the processor has no instruction for a code."""
        unrolled = layout.group or WHOLE
        if layout.group > _UNROLLED:
            unrolled = math.gcd(layout.group, _UNROLLED)
        super().__init__("packed", math.gcd(host.lanes, unrolled))
        self.layout, self.unrolled = layout, unrolled
        self._table = host.tables and layout.bits == 4 and self.lanes == 16
        # Tables of 8 values, of which numbers of 4 bits need two.
        self._halved = layout.bits == 4 and layout.code != "int4" and not self._table
        if self._halved:
            if not host.permutes or self.lanes != 8:
                raise RuntimeError(f"no instruction that looks up {layout.code}")
            name = "llvm.x86.avx2.permps"
            self._look_up = self.declare(name, self.floats, self.floats, self.ints)
        self._spreads = self._table and host.spreads
        self._qwords = self.ir.VectorType(self.i64, 8)
        self._bytes64 = self.ir.VectorType(self.byte, 64)
        if self._table:
            name = "llvm.x86.avx512.permvar.sf.512"
            self._look_up = self.declare(name, self.floats, self.floats, self.ints)
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
        """A block's scale and offset in every lane, or its 16 values in a table or two. Fetches
        what is needed some blocks later: rows are too short for processors to see that they follow
        each other."""
        if self.layout.group:
            self._fetch_later(b, block)
        numbers = self.integer(self.layout.numbers) if self.layout.group else groups
        scale, offset = self._scale(b, self.at(b, block, numbers))
        if self._table or self._halved:
            values = TABLES[self.layout.code]
            parts = [values[at : at + self.lanes] for at in range(0, len(values), self.lanes)]
            each = (self.ir.Constant(self.floats, list(part)) for part in parts)
            return tuple(self._scaled(b, part, scale, offset) for part in each)
        return scale, offset

    def _scale(self, b: Any, at: Any) -> tuple[Any, Any]:
        """The scale and the offset that lie there, in every lane; None for no offset."""
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

    def _scaled(self, b: Any, numbers: Any, scale: Any, offset: Any) -> Any:
        if offset is None:
            return b.fmul(numbers, scale)
        return b.call(self.fma, [numbers, scale, offset])

    def numbers(self, b: Any, block: Any, number: Any, ends: tuple[Any, ...]) -> Any:
        """A vector of a block's values from this number on."""
        lanes = self.lanes
        if not self.layout.group:
            self._fetch_later(b, self.at(b, block, number))
        if self.layout.bits == 8:
            return self._scaled(b, self._wide_numbers(b, self.at(b, block, number)), *ends)
        at = self.at(b, block, b.lshr(number, self.integer(1)))
        if self._spreads:
            return b.call(self._look_up, [ends[0], self._spread_out(b, at)])
        words = b.load(at, typ=self.ir.VectorType(self.i32, lanes // 8), align=1)
        bits = self.shuffle(b, words, [lane // 8 for lane in range(lanes)])
        shifts = self.ir.Constant(self.ints, [lane % 8 * 4 for lane in range(lanes)])
        bits = b.lshr(bits, shifts)
        # A look-up ignores all but the lowest bits.
        if self._table:
            return b.call(self._look_up, [ends[0], bits])
        if self._halved:
            low, high = (b.call(self._look_up, [table, bits]) for table in ends)
            eight = b.and_(bits, self.ir.Constant(self.ints, [8] * lanes))
            zeros = self.ir.Constant(self.ints, [0] * lanes)
            return b.select(b.icmp_signed("==", eight, zeros), low, high)
        bits = b.and_(bits, self.ir.Constant(self.ints, [15] * lanes))
        return self._scaled(b, b.uitofp(bits, self.floats), *ends)

    def _wide_numbers(self, b: Any, at: Any) -> Any:
        """A vector of numbers of 8 bits, before their scale."""
        numbers = b.load(at, typ=self.ir.VectorType(self.byte, self.lanes), align=1)
        if self.layout.code == "int8":
            return b.sitofp(b.sext(numbers, self.ints), self.floats)
        # Exponent and fraction go where float16 has them, and the sign stays first: that number is
        # smaller by the difference of the exponents' biases, subnormal ones included.
        kind = self.ir.VectorType(self.ir.IntType(16), self.lanes)
        moved = b.shl(b.sext(numbers, kind), self.ir.Constant(kind, [7] * self.lanes))
        kept = b.and_(moved, self.ir.Constant(kind, [_HALF_BITS] * self.lanes))
        return b.fpext(b.bitcast(kept, self.ir.VectorType(self.half, self.lanes)), self.floats)

    def _spread_out(self, b: Any, at: Any) -> Any:
        """The 16 numbers of 8 bytes, each in the lowest bits of a lane."""
        word = b.load(at, typ=self.i64, align=1)
        undefined = self.ir.Constant(self._qwords, self.ir.Undefined)
        words = b.insert_element(undefined, word, self.ir.Constant(self.i32, 0))
        words = b.bitcast(self.shuffle(b, words, [0] * 8), self._bytes64)
        shifts = [byte if byte % 4 == 0 else 0 for byte in range(64)]
        control = self.ir.Constant(self._bytes64, shifts)
        return b.bitcast(b.call(self._spread, [control, words]), self.ints)

    def _fetch_later(self, b: Any, block: Any) -> None:
        self.fetch(b, self.at(b, block, self.integer(_AHEAD)))
