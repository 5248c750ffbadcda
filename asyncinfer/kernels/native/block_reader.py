"""LLVM's code that reads the blocks of GGUF files."""

from __future__ import annotations

from typing import Any

from asyncinfer.kernels.block_types import BlockType, Plane
from asyncinfer.kernels.native.assembly import Assembly
from asyncinfer.kernels.native.host import Host
from asyncinfer.kernels.native.tables import tables_for

__all__ = ["BlockReader"]

#: The bits of the float 2^-127, the least power of two that an exponent byte encodes.
_LEAST_POWER = 1 << 22
#: Numbers, one in each byte, that are extracted from their planes at a time.
_WIDTH = 32


class BlockReader:
    """Emits code that turns blocks of a type into vectors of floats. Blocks are unrolled whole."""

    def __init__(self, assembly: Assembly, kind: BlockType, host: Host) -> None:
        """Raises `RuntimeError` where the processor has no instruction for a code."""
        self._a, self._kind = assembly, kind
        # Numbers whose bits have the same place in neighbouring bytes, so that one shift extracts
        # them.
        self._width = min(_WIDTH, *(plane.run for plane in kind.planes if plane.run > 1))
        self._tables = None
        if kind.bits == 4:
            # Each group makes a table of its own, which serves two vectors at least.
            code = "int4" if kind.code == "int" else kind.code
            self._tables = tables_for(assembly, host, code)

    def ends(self, b: Any, block: Any) -> tuple[Any, Any]:
        """The scales of a block's groups as a vector, and their offsets or None; one scale is in
        every lane."""
        scales, offsets = getattr(self, f"_{self._kind.scales}")(b, block, self._kind.at)
        if self._kind.less and self._tables is not None:
            offsets = b.fmul(scales, self._floats([-self._kind.less] * scales.type.count))
        return scales, offsets

    def numbers(self, b: Any, block: Any, start: int, ends: tuple[Any, Any]) -> Any:
        """A vector of a block's values from number `start` on."""
        kind, a = self._kind, self._a
        scale, offset = ends
        if kind.group < kind.numbers:
            lanes = [start // kind.group] * a.lanes
            scale, offset = (None if each is None else a.shuffle(b, each, lanes) for each in ends)
        if self._tables is not None:
            tables = self._tables.made(b, scale, offset)
            return self._tables.values(b, tables, self._indices(b, block, start))
        # Shifts and masks go through bytes four times as fast as through whole lanes.
        first = start % self._width
        data = self._data(b, block, start - first)
        data = a.shuffle(b, data, range(first, first + a.lanes))
        return a.scaled(b, b.sitofp(b.sext(data, a.ints), a.floats), scale, offset)

    def _indices(self, b: Any, block: Any, start: int) -> Any:
        """Numbers of 4 bits from `start` on, each in the lowest bits of a lane. Low and high halves
        of the same bytes make two vectors."""
        (plane,) = self._kind.planes
        turn, a = start // plane.run, self._a
        place = plane.start + turn // 2 * plane.run + start % plane.run
        bits = self._bytes(b, block, place, a.lanes)
        return b.lshr(bits, self._ints([4] * a.lanes)) if turn % 2 else bits

    def _data(self, b: Any, block: Any, start: int) -> Any:
        """The numbers from `start` on, one in each byte, joined from all planes."""
        first, *others = self._kind.planes
        bits, shift = self._plane(b, block, first, start), first.bits
        for plane in others:
            part = self._plane(b, block, plane, start)
            bits = b.or_(bits, b.shl(part, self._of_bytes([shift] * self._width)))
            shift += plane.bits
        if self._kind.less:
            bits = b.sub(bits, self._of_bytes([self._kind.less] * self._width))
        return bits

    def _plane(self, b: Any, block: Any, plane: Plane, start: int) -> Any:
        """The bits of a plane, a number in each byte."""
        a, width = self._a, self._width
        if plane.run == 1:
            # Bits of neighbours lie side by side.
            place = self._at(b, block, plane.start + start // 8)
            word = b.load(place, typ=a.ir.IntType(width), align=1)
            chosen = b.bitcast(word, a.ir.VectorType(a.ir.IntType(1), width))
            return b.zext(chosen, a.ir.VectorType(a.byte, width))
        turn, each = start // plane.run, 8 // plane.bits
        place = plane.start + turn // each * plane.run + start % plane.run
        kind = a.ir.VectorType(a.byte, width)
        bits = b.load(self._at(b, block, place), typ=kind, align=1)
        shift = turn % each * plane.bits
        if shift:
            bits = b.lshr(bits, self._of_bytes([shift] * width))
        if shift + plane.bits == 8:
            return bits
        return b.and_(bits, self._of_bytes([(1 << plane.bits) - 1] * width))

    def _half(self, b: Any, block: Any, at: int) -> tuple[Any, None]:
        return self._spread_half(b, block, at, self._a.lanes), None

    def _halves(self, b: Any, block: Any, at: int) -> tuple[Any, Any]:
        lanes = self._a.lanes
        return self._spread_half(b, block, at, lanes), self._spread_half(b, block, at + 2, lanes)

    def _exponent(self, b: Any, block: Any, at: int) -> tuple[Any, None]:
        a, data = self._a, self._bytes(b, block, at, 1)
        exponents = a.shuffle(b, data, [0] * a.lanes)
        powers = b.shl(exponents, self._ints([23] * a.lanes))
        least = b.icmp_unsigned("==", exponents, self._ints([0] * a.lanes))
        powers = b.select(least, self._ints([_LEAST_POWER] * a.lanes), powers)
        return b.bitcast(powers, a.floats), None

    def _k(self, b: Any, block: Any, at: int) -> tuple[Any, Any]:
        first, second, rest = (self._bytes(b, block, at + 4 + 4 * part, 4) for part in range(3))
        low, top = self._ints([15] * 4), self._ints([48] * 4)
        two, four = self._ints([2] * 4), self._ints([4] * 4)
        found = []
        for one, nibble in ((first, b.and_(rest, low)), (second, b.lshr(rest, four))):
            high = b.or_(nibble, b.and_(b.lshr(one, two), top))
            found.append(self._joined(b, b.and_(one, self._ints([63] * 4)), high))
        return self._times(b, block, at, found)

    def _q2(self, b: Any, block: Any, at: int) -> tuple[Any, Any]:
        data = self._bytes(b, block, 0, 16)
        low = b.and_(data, self._ints([15] * 16))
        high = b.lshr(data, self._ints([4] * 16))
        return self._times(b, block, at, [low, high])

    def _q3(self, b: Any, block: Any, at: int) -> tuple[Any, None]:
        data, high = self._bytes(b, block, at - 12, 8), self._bytes(b, block, at - 4, 4)
        low = b.and_(data, self._ints([15] * 8))
        lows = self._joined(b, low, b.lshr(data, self._ints([4] * 8)))
        highs = self._a.shuffle(b, high, list(range(4)) * 4)
        highs = b.lshr(highs, self._ints([lane // 4 * 2 for lane in range(16)]))
        return self._six_bits(b, block, at, lows, highs)

    def _q6(self, b: Any, block: Any, at: int) -> tuple[Any, None]:
        a = self._a
        kind = a.ir.VectorType(a.byte, 16)
        data = b.load(self._at(b, block, at - 16), typ=kind, align=1)
        scales = b.sitofp(b.sext(data, a.ir.VectorType(a.i32, 16)), self._of_floats(16))
        return b.fmul(scales, self._spread_half(b, block, at, 16)), None

    def _xs(self, b: Any, block: Any, at: int) -> tuple[Any, None]:
        data, high = self._bytes(b, block, at + 4, 4), self._bytes(b, block, at + 2, 2)
        spread = self._a.shuffle(b, data, [lane // 2 for lane in range(8)])
        spread = b.lshr(spread, self._ints([lane % 2 * 4 for lane in range(8)]))
        lows = b.and_(spread, self._ints([15] * 8))
        highs = self._a.shuffle(b, high, [lane // 4 for lane in range(8)])
        highs = b.lshr(highs, self._ints([lane % 4 * 2 for lane in range(8)]))
        return self._six_bits(b, block, at, lows, highs)

    def _six_bits(self, b: Any, block: Any, at: int, lows: Any, highs: Any) -> tuple[Any, None]:
        """Scales of 6 bits less 32, times the float16 at `at`."""
        count = lows.type.count
        highs = b.shl(b.and_(highs, self._ints([3] * count)), self._ints([4] * count))
        whole = b.sub(b.or_(lows, highs), self._ints([32] * count))
        scales = b.sitofp(whole, self._of_floats(count))
        return b.fmul(scales, self._spread_half(b, block, at, count)), None

    def _times(self, b: Any, block: Any, at: int, both: list[Any]) -> tuple[Any, Any]:
        """`both`: the whole numbers of scales and of offsets. Scales are multiplied by the float16
        at `at`, and offsets by the negative of the next one."""
        count = both[0].type.count
        scales, offsets = (b.sitofp(each, self._of_floats(count)) for each in both)
        scale, least = (self._spread_half(b, block, at + 2 * part, count) for part in range(2))
        return b.fmul(scales, scale), b.fmul(offsets, b.fneg(least))

    def _joined(self, b: Any, first: Any, second: Any) -> Any:
        """The lanes of both vectors, in order."""
        count = 2 * int(first.type.count)
        mask = self._a.ir.Constant(self._a.ir.VectorType(self._a.i32, count), list(range(count)))
        return b.shuffle_vector(first, second, mask)

    def _spread_half(self, b: Any, block: Any, at: int, count: int) -> Any:
        """A float16 in every lane of floats. It is loaded as a vector, since a scalar load would
        merge with what the register held, and wait for that."""
        half = b.load(self._at(b, block, at), typ=self._a.ir.VectorType(self._a.half, 1), align=1)
        return b.fpext(self._a.shuffle(b, half, [0] * count), self._of_floats(count))

    def _bytes(self, b: Any, block: Any, at: int, count: int) -> Any:
        """Bytes as a vector of whole numbers."""
        a = self._a
        data = b.load(self._at(b, block, at), typ=a.ir.VectorType(a.byte, count), align=1)
        return b.zext(data, a.ir.VectorType(a.i32, count))

    def _at(self, b: Any, block: Any, place: int) -> Any:
        return self._a.at(b, block, self._a.integer(place))

    def _ints(self, values: list[int]) -> Any:
        return self._a.ir.Constant(self._a.ir.VectorType(self._a.i32, len(values)), values)

    def _of_bytes(self, values: list[int]) -> Any:
        return self._a.ir.Constant(self._a.ir.VectorType(self._a.byte, len(values)), values)

    def _floats(self, values: list[float]) -> Any:
        return self._a.ir.Constant(self._of_floats(len(values)), values)

    def _of_floats(self, count: int) -> Any:
        return self._a.ir.VectorType(self._a.float, count)
