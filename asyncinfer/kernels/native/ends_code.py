"""LLVM's code of what comes before a model's layers and after its head: rows of tables, and the
largest number of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncinfer.kernels.native.row_tasks import RowTasks

__all__ = ["NAMES", "ends_code"]

#: The functions, each of which writes to its first arguments.
NAMES = ("take", "largest")
#: Vectors of a row that are compared at once, since each comparison waits for the one before it.
_AT_ONCE = 4


def ends_code(dtype: str, lanes: int) -> str:
    """The assembly of functions of a task, whose fields are `HEAD` and the function's arguments:

    - `take(y, x, places, size)`, which copies rows of `size` bytes of `x` to `y`, those that int64
      `places` `[rows]` name,
    - `largest(values, places, x, size, stride)`, which writes the largest of `size` numbers of each
      row of `x` to float32 `values` `[rows]`, and where the first of these is to int64 `places`
      `[rows]`; NaN where a row has any, and then any place. `stride` numbers lie from one row of
      `x` to the next, and `size` is at least `lanes`.

    Numbers of `x` are of `dtype`, "float32" or "bfloat16". The threads of a task take one turn of
    rows after the other.
    """
    return _EndsCode("ends", dtype, lanes).text()


class _EndsCode(RowTasks):
    def text(self) -> str:
        self._take()
        self._largest()
        return str(self.module)

    def _take(self) -> None:
        kinds = [self.pointer, self.pointer, self.i64, self.bit]
        copy = self.declare("llvm.memcpy.p0.p0.i64", self.void, *kinds)
        task, b, (y, x, places, size) = self.begun("take", *[self.pointer] * 3, self.i64)

        def row(b: Any, number: Any) -> None:
            source = self.at(b, x, b.mul(self._int64(b, places, number), size))
            into = self.at(b, y, b.mul(number, size))
            b.call(copy, [into, source, size, self.ir.Constant(self.bit, 0)])

        self.each_row(b, task, row)

    def _largest(self) -> None:
        ir = self.ir
        task, b, (values, places, x, size, stride) = self.begun(
            "largest", *[self.pointer] * 3, *[self.i64] * 2
        )
        lane = ir.Constant(self.ints, list(range(self.lanes)))
        flags = ir.VectorType(self.bit, self.lanes)

        def row(b: Any, number: Any) -> None:
            ours = self.number(b, x, b.mul(number, stride))
            last = b.sub(size, self.integer(self.lanes))

            def part(b: Any, at: Any, found: Sequence[Any]) -> Sequence[Any]:
                wrong = found[0]
                results: list[Any] = []
                pairs = zip(found[1::2], found[2::2], strict=True)
                for turn, (highest, where) in enumerate(pairs):
                    # The last vector begins earlier, so that it ends where the row does.
                    here = b.add(at, self.integer(turn * self.lanes))
                    here = b.select(b.icmp_signed("<", here, last), here, last)
                    numbers = self.read(b, ours, here)
                    there = b.add(self.everywhere(b, b.trunc(here, self.i32)), lane)
                    above = b.fcmp_ordered(">", numbers, highest)
                    results += b.select(above, numbers, highest), b.select(above, there, where)
                    wrong = b.or_(wrong, b.fcmp_unordered("uno", numbers, numbers))
                return wrong, *results

            start = (
                ir.Constant(flags, [0] * self.lanes),
                *[self.all(float("-inf")), lane] * _AT_ONCE,
            )
            wrong, *found = self.loop(b, size, _AT_ONCE * self.lanes, part, start)
            value, place = self._first(b, found[::2], found[1::2])
            nan = ir.Constant(self.float, float("nan"))
            bits = b.bitcast(wrong, ir.IntType(self.lanes))
            without = b.icmp_unsigned("==", bits, ir.Constant(bits.type, 0))
            four, eight = (b.mul(number, self.integer(size)) for size in (4, 8))
            b.store(b.select(without, value, nan), self.at(b, values, four), align=4)
            b.store(b.zext(place, self.i64), self.at(b, places, eight), align=8)

        self.each_row(b, task, row)

    def _first(self, b: Any, highest: Sequence[Any], where: Sequence[Any]) -> tuple[Any, Any]:
        """The highest number of all lanes of vectors, and the lowest of its places."""
        pairs = []
        for numbers, places in zip(highest, where, strict=True):
            for lane in range(self.lanes):
                index = self.ir.Constant(self.i32, lane)
                pairs.append((b.extract_element(numbers, index), b.extract_element(places, index)))
        value, place = pairs[0]
        for other, there in pairs[1:]:
            equal = b.fcmp_ordered("==", other, value)
            before = b.and_(equal, b.icmp_unsigned("<", there, place))
            better = b.or_(b.fcmp_ordered(">", other, value), before)
            value, place = b.select(better, other, value), b.select(better, there, place)
        return value, place

    def _int64(self, b: Any, numbers: Any, number: Any) -> Any:
        place = self.at(b, numbers, b.mul(number, self.integer(8)))
        return b.load(place, typ=self.i64, align=8)
