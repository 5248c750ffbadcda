"""LLVM's code of the operators between the matrix products: norm, gate, rotation and KV write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from asyncinfer.kernels.native.row_tasks import RowTasks

__all__ = ["NAMES", "between_code"]

#: The functions, each of which writes numbers to its first argument.
NAMES = ("rms_norm", "silu_mul", "rope", "kv_write", "add", "widen", "narrow")


def between_code(dtype: str, lanes: int, *, rounds: bool) -> str:
    """The assembly of functions of a task, whose fields are `HEAD` and the function's arguments:

    - `rms_norm(y, x, weight, heads, size, stride, eps)` of `heads` of `size` numbers, `stride`
      numbers from one row of `x` to the next; `weight` `[heads, size]`,
    - `silu_mul(y, x, size)` of `x` `[rows, 2 * size]`,
    - `rope(y, x, cos, sin, heads, half, stride)` of `heads` of `2 * half` numbers, `stride` numbers
      from one row of `x` to the next; `cos` and `sin` `[rows, 2 * half]`,
    - `kv_write(pages, x, slots, heads, size, stride)`, which puts each head of `x` where int64
      `slots` `[rows, heads]` say in `pages` `[any, size]`,
    - `add(y, x, size, stride)`, which adds `x` to `y` `[rows, size]`, `stride` numbers from one row
      of `x` to the next,
    - `widen(y, x, size, stride)`, which writes `x` to float32 `y` `[rows, size]`, `stride` numbers
      from one row of `x` to the next,
    - `narrow(y, x, size)`, which writes float32 `x` `[rows, size]` to `y`.

    Numbers are of `dtype`, "float32" or "bfloat16", where nothing else is said, and `cos` and `sin`
    float32. All is computed in float32. `rounds`: see `Host`.

    Sizes are above 0; `size` and `half` are multiples of `lanes`. The threads of a task take one
    turn of rows after the other.
    """
    return _BetweenCode(dtype, lanes, rounds).text()


class _BetweenCode(RowTasks):
    def __init__(self, dtype: str, lanes: int, rounds: bool) -> None:
        super().__init__("between", dtype, lanes, rounds=rounds)

    def text(self) -> str:
        self._root = self.declare("llvm.sqrt.f32", self.float, self.float)
        self._size = self.declare(f"llvm.fabs.v{self.lanes}f32", self.floats, self.floats)
        self._norm()
        self._gate()
        self._rotation()
        self._write()
        self._add()
        self._widen()
        self._shorten()
        return str(self.module)

    def _norm(self) -> None:
        task, b, (y, x, weight, heads, size, stride, eps) = self.begun(
            "rms_norm", *([self.pointer] * 3 + [self.i64] * 3 + [self.float])
        )

        def head(b: Any, number: Any, which: Any) -> None:
            skip = b.mul(which, size)
            ours = self.number(b, x, b.add(b.mul(number, stride), skip))
            into = self.number(b, y, b.add(b.mul(b.mul(number, heads), size), skip))
            weights = self.number(b, weight, skip)

            def add(b: Any, at: Any, sums: Sequence[Any]) -> Sequence[Any]:
                value = self.read(b, ours, at)
                return [b.call(self.fma, [value, value, sums[0]])]

            (squares,) = self.loop(b, size, self.lanes, add, [self.all(0.0)])
            mean = b.fdiv(self.total(b, squares), b.sitofp(size, self.float))
            root = b.call(self._root, [b.fadd(mean, eps)])
            factor = self.everywhere(b, b.fdiv(self.ir.Constant(self.float, 1.0), root))

            def scale(b: Any, at: Any, _: Sequence[Any]) -> Sequence[Any]:
                weighed = b.fmul(self.read(b, ours, at), self.read(b, weights, at))
                self.put(b, b.fmul(weighed, factor), into, at)
                return []

            self.loop(b, size, self.lanes, scale, [])

        def row(b: Any, number: Any) -> None:
            def one(b: Any, which: Any, _: Sequence[Any]) -> Sequence[Any]:
                head(b, number, which)
                return []

            self.loop(b, heads, 1, one, [])

        self.each_row(b, task, row)

    def _gate(self) -> None:
        task, b, (y, x, size) = self.begun("silu_mul", self.pointer, self.pointer, self.i64)
        one, binary = self.all(1.0), self.all(-1 / math.log(2))

        def row(b: Any, number: Any) -> None:
            into = self.number(b, y, b.mul(number, size))
            gates = self.number(b, x, b.mul(b.mul(number, size), self.integer(2)))
            ups = self.number(b, gates, size)

            def part(b: Any, at: Any, _: Sequence[Any]) -> Sequence[Any]:
                gate, up = self.read(b, gates, at), self.read(b, ups, at)
                # exp(-|gate|) never overflows, and the sigmoid follows from it for either sign.
                power = self.exp2(b, b.fmul(binary, b.call(self._size, [gate])))
                above = b.select(b.fcmp_ordered("<", gate, self.all(0.0)), power, one)
                silu = b.fdiv(b.fmul(gate, above), b.fadd(one, power))
                self.put(b, b.fmul(silu, up), into, at)
                return []

            self.loop(b, size, self.lanes, part, [])

        self.each_row(b, task, row)

    def _rotation(self) -> None:
        task, b, (y, x, cos, sin, heads, half, stride) = self.begun(
            "rope", *([self.pointer] * 4 + [self.i64] * 3)
        )

        def token(b: Any, number: Any) -> None:
            size = b.mul(half, self.integer(2))
            start = b.mul(b.mul(number, size), self.integer(4))
            angles = [self.at(b, each, start) for each in (cos, sin)]
            ours = self.number(b, x, b.mul(number, stride))
            into = self.number(b, y, b.mul(number, b.mul(heads, size)))

            def head(b: Any, which: Any, _: Sequence[Any]) -> Sequence[Any]:
                source, out = (self.number(b, each, b.mul(which, size)) for each in (ours, into))

                def part(b: Any, at: Any, _: Sequence[Any]) -> Sequence[Any]:
                    there = b.add(at, half)
                    low, high = self.read(b, source, at), self.read(b, source, there)
                    for place, value, other in ((at, low, high), (there, high, low)):
                        cosine, sine = (self.load(b, each, place) for each in angles)
                        turned = b.call(self.fma, [other, sine, b.fmul(value, cosine)])
                        self.put(b, turned, out, place)
                    return []

                return self.loop(b, half, self.lanes, part, [])

            self.loop(b, heads, 1, head, [])

        self.each_row(b, task, token)

    def _write(self) -> None:
        task, b, (pages, x, slots, heads, size, stride) = self.begun(
            "kv_write", *([self.pointer] * 3 + [self.i64] * 3)
        )
        kind = self.ir.VectorType(self.ir.IntType(8 * self.bytes), self.lanes)

        def token(b: Any, number: Any) -> None:
            ours = self.number(b, x, b.mul(number, stride))
            first = b.mul(number, heads)

            def head(b: Any, which: Any, _: Sequence[Any]) -> Sequence[Any]:
                place = self.at(b, slots, b.mul(b.add(first, which), self.integer(8)))
                slot = b.load(place, typ=self.i64, align=8)
                source = self.number(b, ours, b.mul(which, size))
                into = self.number(b, pages, b.mul(slot, size))

                def part(b: Any, at: Any, _: Sequence[Any]) -> Sequence[Any]:
                    copied = b.load(self.number(b, source, at), typ=kind, align=self.bytes)
                    b.store(copied, self.number(b, into, at), align=self.bytes)
                    return []

                return self.loop(b, size, self.lanes, part, [])

            self.loop(b, heads, 1, head, [])

        self.each_row(b, task, token)

    def _add(self) -> None:
        task, b, (y, x, size, stride) = self.begun("add", *[self.pointer] * 2, *[self.i64] * 2)

        def row(b: Any, number: Any) -> None:
            into = self.number(b, y, b.mul(number, size))
            more = self.number(b, x, b.mul(number, stride))

            def part(b: Any, at: Any, _: Sequence[Any]) -> Sequence[Any]:
                total = b.fadd(self.read(b, into, at), self.read(b, more, at))
                self.put(b, total, into, at)
                return []

            self.loop(b, size, self.lanes, part, [])

        self.each_row(b, task, row)

    def _widen(self) -> None:
        task, b, (y, x, size, stride) = self.begun("widen", *[self.pointer] * 2, *[self.i64] * 2)

        def row(b: Any, number: Any) -> None:
            ours = self.number(b, x, b.mul(number, stride))
            first = b.mul(number, size)

            def part(b: Any, at: Any, _: Sequence[Any]) -> Sequence[Any]:
                self.store(b, self.read(b, ours, at), y, b.add(first, at))
                return []

            self.loop(b, size, self.lanes, part, [])

        self.each_row(b, task, row)

    def _shorten(self) -> None:
        task, b, (y, x, size) = self.begun("narrow", *[self.pointer] * 2, self.i64)

        def row(b: Any, number: Any) -> None:
            first = b.mul(number, size)

            def part(b: Any, at: Any, _: Sequence[Any]) -> Sequence[Any]:
                self.put(b, self.load(b, x, b.add(first, at)), y, b.add(first, at))
                return []

            self.loop(b, size, self.lanes, part, [])

        self.each_row(b, task, row)
