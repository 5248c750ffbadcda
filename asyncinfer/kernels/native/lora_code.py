"""LLVM's code of low-rank adapters (LoRA: Hu et al., 2021): for each row, two thin matrices of the
row's adapter.

One thread computes both products of a row, one after the other. So the order of additions depends
on the adapter alone, and neither other rows nor the number of threads change a bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncinfer.kernels.native.assembly import Assembly

__all__ = ["FIELDS", "lora_code"]

#: The arguments of a call, 64 bits each: addresses, sizes, and the counter that threads share.
FIELDS = (
    "down",
    "up",
    "ranks",
    "x",
    "y",
    "rows",
    "slots",
    "sizes",
    "count",
    "parts",
    "inputs",
    "outputs",
    "most_rank",
    "x_stride",
    "y_stride",
    "threads",
    "next",
)

#: Rows of a thin matrix that are read at once, for one load of x or y.
_BLOCK = 4

#: Bytes of a number, by the dtype of a matrix.
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def lora_code(dtype: str, lanes: int) -> str:
    """The assembly of `add(task)`, where `task` points to `FIELDS`, as int64.

    It adds `up[s]^T (down[s] x)` to the rows of y that `rows` int64 `[count]` names, for the slots
    `s` in `slots` int64 `[count]`. `down` `[slots, most_rank * parts, inputs]` and `up`
    `[slots, most_rank, outputs]` are of `dtype` and contiguous, `ranks` int32 `[slots]`, `sizes`
    int64 `[parts]`; `x` and `y` are float32, with strides in numbers. `next` is 0.
    """
    return _LoraCode(dtype, lanes).text()


class _LoraCode(Assembly):
    def __init__(self, dtype: str, lanes: int) -> None:
        super().__init__("lora", lanes, FIELDS)
        self._dtype, self._bytes = dtype, _BYTES[dtype]
        self._one = self.declare("llvm.fma.f32", self.float, *[self.float] * 3)

    def text(self) -> str:
        down, up = self._down(), self._up()
        work = self._work(down, up)
        self.on_task("add", work)
        return str(self.module)

    def _work(self, down: Any, up: Any) -> Any:
        """`work(task)`: compute one row after the other until none is left."""
        function, b = self.begin("work", self.pointer)
        (task,) = function.args
        count, parts, inputs, outputs, most = (
            self.field(b, task, name)
            for name in ("count", "parts", "inputs", "outputs", "most_rank")
        )
        first, second, ranks, x, y, rows, slots, sizes = (
            self.address(b, task, name)
            for name in ("down", "up", "ranks", "x", "y", "rows", "slots", "sizes")
        )
        wide = b.mul(most, parts)
        inner = b.inttoptr(b.ptrtoint(b.alloca(self.float, size=wide), self.i64), self.pointer)
        index, following = self.next_item(b, task, count)
        some = b.append_basic_block()
        row, slot = (self._integer_at(b, pointer, index) for pointer in (rows, slots))
        narrow = b.load(self.at(b, ranks, b.mul(slot, self.integer(4))), typ=self.i32, align=4)
        rank = b.sext(narrow, self.i64)
        b.cbranch(b.icmp_signed(">", rank, self.integer(0)), some, following)
        b.position_at_end(some)
        size = self.integer(self._bytes)
        bytes_in, bytes_out = b.mul(inputs, size), b.mul(outputs, size)
        matrix = self.at(b, first, b.mul(slot, b.mul(wide, bytes_in)))
        strides = (self.field(b, task, name) for name in ("x_stride", "y_stride"))
        row_x, row_y = (
            self.at(b, pointer, b.mul(row, b.mul(stride, self.integer(4))))
            for pointer, stride in zip((x, y), strides, strict=True)
        )
        b.call(down, [matrix, row_x, inner, b.mul(rank, parts), inputs])
        matrix = self.at(b, second, b.mul(slot, b.mul(most, bytes_out)))

        def part(b: Any, index: Any, values: Sequence[Any]) -> Sequence[Any]:
            (start,) = values
            columns = self._integer_at(b, sizes, index)
            weight = self.at(b, matrix, b.mul(start, size))
            out = self.at(b, row_y, b.mul(start, self.integer(4)))
            factors = self.at(b, inner, b.mul(index, self.integer(4)))
            b.call(up, [weight, factors, out, rank, columns, bytes_out, parts])
            return [b.add(start, columns)]

        self.loop(b, parts, 1, part, [self.integer(0)])
        b.branch(following)
        return function

    def _down(self) -> Any:
        """`down(w, x, inner, rows, inputs)`: the products of x and each row of W."""
        kinds = [self.pointer] * 3 + [self.i64] * 2
        function, b = self.begin("down", *kinds)
        weight, x, inner, rows, inputs = function.args
        stride = b.mul(inputs, self.integer(self._bytes))
        zeros = self.ir.Constant(self.floats, [0.0] * self.lanes)

        def block(b: Any, row: Any, count: int) -> None:
            each = [
                self.at(b, weight, b.mul(stride, b.add(row, self.integer(index))))
                for index in range(count)
            ]

            def vectors(b: Any, at: Any, sums: Sequence[Any]) -> Sequence[Any]:
                self._fetch_later(b, each, at, stride)
                values = self.load(b, x, at)
                return [
                    b.call(self.fma, [self._wide(b, one, at), values, total])
                    for one, total in zip(each, sums, strict=True)
                ]

            def scalars(b: Any, at: Any, sums: Sequence[Any]) -> Sequence[Any]:
                value = self._float_at(b, x, at)
                return [
                    b.call(self._one, [self._wide_one(b, one, at), value, total])
                    for one, total in zip(each, sums, strict=True)
                ]

            sums = self._some(
                b, self.integer(0), self._whole(b, inputs), self.lanes, vectors, [zeros] * count
            )
            totals = [self.total(b, vector) for vector in sums]
            totals = self._some(b, self._whole(b, inputs), inputs, 1, scalars, totals)
            for index, total in enumerate(totals):
                out = self.at(b, inner, b.mul(b.add(row, self.integer(index)), self.integer(4)))
                b.store(total, out, align=4)

        self._blocks(b, rows, block)
        b.ret_void()
        return function

    def _up(self) -> Any:
        """`up(w, inner, y, rank, columns, stride, parts)`: add to the columns of y the rows of W,
        each times its number of `inner`. Rows of W begin `stride` bytes apart. Numbers of `inner`
        are `parts` apart."""
        function, b = self.begin("up", *[self.pointer] * 3, *[self.i64] * 4)
        weight, inner, y, rank, columns, stride, parts = function.args

        def block(b: Any, row: Any, count: int) -> None:
            numbers = [b.add(row, self.integer(index)) for index in range(count)]
            each = [self.at(b, weight, b.mul(stride, number)) for number in numbers]
            factors = [self._float_at(b, inner, b.mul(parts, number)) for number in numbers]
            spread = [self.everywhere(b, one) for one in factors]

            def vectors(at: Any) -> None:
                self._fetch_later(b, each, at, stride)
                total = self.load(b, y, at)
                for one, factor in zip(each, spread, strict=True):
                    total = b.call(self.fma, [self._wide(b, one, at), factor, total])
                b.store(total, self.at(b, y, b.mul(at, self.integer(4))), align=4)

            def scalars(at: Any) -> None:
                total = self._float_at(b, y, at)
                for one, factor in zip(each, factors, strict=True):
                    total = b.call(self._one, [self._wide_one(b, one, at), factor, total])
                b.store(total, self.at(b, y, b.mul(at, self.integer(4))), align=4)

            whole = self._whole(b, columns)
            self.each(b, self.integer(0), whole, self.lanes, vectors)
            self.each(b, whole, columns, 1, scalars)

        self._blocks(b, rank, block)
        b.ret_void()
        return function

    def _blocks(self, b: Any, rows: Any, block: Callable[[Any, Any, int], None]) -> None:
        """Emit `block(b, row, count)` for all rows: `_BLOCK` at once, and the rest one by one."""
        whole = b.sub(rows, b.srem(rows, self.integer(_BLOCK)))
        self.each(b, self.integer(0), whole, _BLOCK, lambda row: block(b, row, _BLOCK))
        self.each(b, whole, rows, 1, lambda row: block(b, row, 1))

    def _some(
        self,
        b: Any,
        start: Any,
        end: Any,
        step: int,
        body: Callable[[Any, Any, Sequence[Any]], Sequence[Any]],
        values: Sequence[Any],
    ) -> list[Any]:
        """Emit a loop of `body` over `start`, `start + step` and so on below `end`, which may not
        run at all. Returns the values after the loop."""
        before = b.block
        span = b.sub(end, start)
        with b.if_then(b.icmp_signed(">", span, self.integer(0))):
            results = self.loop(
                b, span, step, lambda b, index, now: body(b, b.add(start, index), now), values
            )
            inside = b.block
        found = []
        for value, result in zip(values, results, strict=True):
            phi = b.phi(value.type)
            phi.add_incoming(value, before)
            phi.add_incoming(result, inside)
            found.append(phi)
        return found

    def _whole(self, b: Any, count: Any) -> Any:
        """`count`, rounded down to whole vectors."""
        return b.sub(count, b.srem(count, self.integer(self.lanes)))

    def _wide(self, b: Any, weight: Any, number: Any) -> Any:
        """A vector of a matrix's numbers from this one on, as float32."""
        at = self.at(b, weight, b.mul(number, self.integer(self._bytes)))
        return self.wide(b, at, self._dtype)

    def _wide_one(self, b: Any, weight: Any, number: Any) -> Any:
        """One number of a matrix, as float32."""
        at = self.at(b, weight, b.mul(number, self.integer(self._bytes)))
        if self._dtype == "float32":
            return b.load(at, typ=self.float, align=4)
        if self._dtype == "float16":
            return b.fpext(b.load(at, typ=self.half, align=2), self.float)
        bits = b.zext(b.load(at, typ=self.ir.IntType(16), align=2), self.i32)
        return b.bitcast(b.shl(bits, self.ir.Constant(self.i32, 16)), self.float)

    def _fetch_later(self, b: Any, each: Sequence[Any], number: Any, stride: Any) -> None:
        """Prefetch the same place of the next `_BLOCK` rows, since rows are too short for a
        processor to detect the sequence. A single row is among the last, and no row follows it."""
        if len(each) == _BLOCK:
            ahead = b.add(
                b.mul(number, self.integer(self._bytes)), b.mul(stride, self.integer(_BLOCK))
            )
            for one in each:
                self.fetch(b, self.at(b, one, ahead), near=False)

    def _float_at(self, b: Any, pointer: Any, number: Any) -> Any:
        at = self.at(b, pointer, b.mul(number, self.integer(4)))
        return b.load(at, typ=self.float, align=4)

    def _integer_at(self, b: Any, pointer: Any, number: Any) -> Any:
        at = self.at(b, pointer, b.mul(number, self.integer(8)))
        return b.load(at, typ=self.i64, align=8)
