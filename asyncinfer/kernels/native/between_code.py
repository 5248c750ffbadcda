"""LLVM's code of the operators between the products: a norm, a gate, a rotation, the KV write."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from asyncinfer.kernels.native.assembly import Assembly

__all__ = ["NAMES", "between_code"]

#: The functions, each of which writes float32 numbers to its first argument.
NAMES = ("rms_norm", "silu_mul", "rope", "kv_write")


def between_code(lanes: int) -> str:
    """The assembly of

    - `rms_norm(y, x, weight, rows, size, eps)`, all `[rows, size]` but for `weight` `[size]`,
    - `silu_mul(y, x, rows, size)` of `x` `[rows, 2 * size]`,
    - `rope(y, x, cos, sin, tokens, heads, half, stride)` of `heads` of `2 * half` numbers, `stride`
      numbers from one token of `x` to the next; `cos` and `sin` `[tokens, 2 * half]`,
    - `kv_write(pages, x, slots, tokens, heads, size, stride)`, which puts each head of `x` where
      int64 `slots` `[tokens, heads]` say in `pages` `[any, size]`.

    Sizes are above 0; `size` and `half` are multiples of `lanes`.
    """
    return _BetweenCode("between", lanes).text()


class _BetweenCode(Assembly):
    def text(self) -> str:
        self._root = self.declare("llvm.sqrt.f32", self.float, self.float)
        self._size = self.declare(f"llvm.fabs.v{self.lanes}f32", self.floats, self.floats)
        self._norm()
        self._gate()
        self._rotation()
        self._write()
        return str(self.module)

    def _norm(self) -> None:
        kinds = [self.pointer] * 3 + [self.i64] * 2 + [self.float]
        function, b = self.begin("rms_norm", *kinds, public=True)
        y, x, weight, rows, size, eps = function.args

        def row(b: Any, number: Any) -> None:
            start = b.mul(number, size)
            ours, into = self._number(b, x, start), self._number(b, y, start)

            def add(b: Any, at: Any, sums: Sequence[Any]) -> Sequence[Any]:
                value = self.load(b, ours, at)
                return [b.call(self.fma, [value, value, sums[0]])]

            (squares,) = self.loop(b, size, self.lanes, add, [self.all(0.0)])
            mean = b.fdiv(self.total(b, squares), b.sitofp(size, self.float))
            root = b.call(self._root, [b.fadd(mean, eps)])
            factor = self.everywhere(b, b.fdiv(self.ir.Constant(self.float, 1.0), root))

            def scale(b: Any, at: Any, _: Sequence[Any]) -> Sequence[Any]:
                weighed = b.fmul(self.load(b, ours, at), self.load(b, weight, at))
                self.store(b, b.fmul(weighed, factor), into, at)
                return []

            self.loop(b, size, self.lanes, scale, [])

        self._rows(b, rows, row)

    def _gate(self) -> None:
        kinds = [self.pointer] * 2 + [self.i64] * 2
        function, b = self.begin("silu_mul", *kinds, public=True)
        y, x, rows, size = function.args
        one, binary = self.all(1.0), self.all(-1 / math.log(2))

        def row(b: Any, number: Any) -> None:
            into = self._number(b, y, b.mul(number, size))
            gates = self._number(b, x, b.mul(b.mul(number, size), self.integer(2)))
            ups = self._number(b, gates, size)

            def part(b: Any, at: Any, _: Sequence[Any]) -> Sequence[Any]:
                gate, up = self.load(b, gates, at), self.load(b, ups, at)
                # The sigmoid by a power that never overflows.
                power = self.exp2(b, b.fmul(binary, b.call(self._size, [gate])))
                above = b.select(b.fcmp_ordered("<", gate, self.all(0.0)), power, one)
                silu = b.fdiv(b.fmul(gate, above), b.fadd(one, power))
                self.store(b, b.fmul(silu, up), into, at)
                return []

            self.loop(b, size, self.lanes, part, [])

        self._rows(b, rows, row)

    def _rotation(self) -> None:
        kinds = [self.pointer] * 4 + [self.i64] * 4
        function, b = self.begin("rope", *kinds, public=True)
        y, x, cos, sin, tokens, heads, half, stride = function.args
        size = b.mul(half, self.integer(2))

        def token(b: Any, number: Any) -> None:
            angles = [self._number(b, each, b.mul(number, size)) for each in (cos, sin)]
            ours = self._number(b, x, b.mul(number, stride))
            into = self._number(b, y, b.mul(number, b.mul(heads, size)))

            def head(b: Any, which: Any, _: Sequence[Any]) -> Sequence[Any]:
                source, out = (self._number(b, each, b.mul(which, size)) for each in (ours, into))

                def part(b: Any, at: Any, _: Sequence[Any]) -> Sequence[Any]:
                    there = b.add(at, half)
                    low, high = self.load(b, source, at), self.load(b, source, there)
                    for place, value, other in ((at, low, high), (there, high, low)):
                        cosine, sine = (self.load(b, each, place) for each in angles)
                        turned = b.call(self.fma, [other, sine, b.fmul(value, cosine)])
                        self.store(b, turned, out, place)
                    return []

                return self.loop(b, half, self.lanes, part, [])

            self.loop(b, heads, 1, head, [])

        self._rows(b, tokens, token)

    def _write(self) -> None:
        kinds = [self.pointer] * 3 + [self.i64] * 4
        function, b = self.begin("kv_write", *kinds, public=True)
        pages, x, slots, tokens, heads, size, stride = function.args

        def token(b: Any, number: Any) -> None:
            ours = self._number(b, x, b.mul(number, stride))
            first = b.mul(number, heads)

            def head(b: Any, which: Any, _: Sequence[Any]) -> Sequence[Any]:
                place = self.at(b, slots, b.mul(b.add(first, which), self.integer(8)))
                slot = b.load(place, typ=self.i64, align=8)
                source = self._number(b, ours, b.mul(which, size))
                into = self._number(b, pages, b.mul(slot, size))

                def part(b: Any, at: Any, _: Sequence[Any]) -> Sequence[Any]:
                    self.store(b, self.load(b, source, at), into, at)
                    return []

                return self.loop(b, size, self.lanes, part, [])

            self.loop(b, heads, 1, head, [])

        self._rows(b, tokens, token)

    def _rows(self, b: Any, rows: Any, body: Callable[[Any, Any], None]) -> None:
        """Emit a loop over rows, and the function's end."""

        def one(b: Any, number: Any, _: Sequence[Any]) -> Sequence[Any]:
            body(b, number)
            return []

        self.loop(b, rows, 1, one, [])
        b.ret_void()

    def _number(self, b: Any, floats: Any, number: Any) -> Any:
        """The address of one of float32 `floats`."""
        return self.at(b, floats, b.mul(number, self.integer(4)))
