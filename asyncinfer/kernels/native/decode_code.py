"""LLVM's code of decode attention: one query token of each row over its pages.

A row's keys and values are read where they lie, a head at a time, for several query heads at once.
What one thread computes for a row and its heads depends on nothing else: neither other rows nor the
number of threads change a bit of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from asyncinfer.kernels.native.assembly import Assembly

__all__ = ["FIELDS", "SPARE", "decode_code", "heads_at_once"]

#: What a call is told, each 64 bits: addresses, sizes, and last the counters that threads share.
FIELDS = (
    "q",
    "keys",
    "values",
    "out",
    "tables",
    "lengths",
    "scratch",
    "rows",
    "kv_heads",
    "shares",
    "block",
    "table_stride",
    "scratch_stride",
    "threads",
    "started",
    "next",
)
#: Numbers of scratch beyond a row's keys: a vector of scores that none has.
SPARE = 16

#: Of the pages' dtype: bytes of a number.
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: 2**x for x from -0.5 to 0.5, to a bit: the series of exp(x ln 2).
_SERIES = [math.log(2) ** power / math.factorial(power) for power in range(7)]
#: Added to a number below 2**22, it leaves the nearest integer in the lowest bits.
_MAGIC = 1.5 * 2**23


def heads_at_once(group: int, head_dim: int, lanes: int) -> int:
    """Query heads that are computed together: a divisor of `group`, those that share a KV head, for
    which registers hold the sums."""
    vectors = head_dim // lanes
    most = max(1, (16 if lanes == 16 else 8) // vectors)
    return max(count for count in range(1, most + 1) if group % count == 0)


def decode_code(dtype: str, head_dim: int, heads: int, lanes: int, scale: float) -> str:
    """The assembly of `attend(task)`, where `task` points to `FIELDS`, as int64. It computes
    `heads` at once, and multiplies scores by `scale`.

    Pages are of `dtype`, `[blocks, kv_heads, block, head_dim]`; `q` and `out` float32 `[rows,
    kv_heads * shares * heads, head_dim]`; `tables` int32 `[rows, table_stride]`; `lengths` int32
    `[rows]`, none of them 0; `scratch` float32 `[threads, heads, scratch_stride]`, `SPARE` wider
    than the longest row. `started` and `next` are 0. `head_dim` is a multiple of `lanes`.
    """
    return _Code(dtype, head_dim, heads, lanes, scale).text()


class _Code(Assembly):
    def __init__(self, dtype: str, head_dim: int, heads: int, lanes: int, scale: float) -> None:
        super().__init__("decode", lanes)
        self._dtype, self._bytes = dtype, _BYTES[dtype]
        self._head_dim, self._heads, self._scale = head_dim, heads, scale
        self._vectors = range(0, head_dim, lanes)
        width = f"v{lanes}f32"
        self._maximum = self.declare(f"llvm.maxnum.{width}", self.floats, *[self.floats] * 2)
        self._highest = self.declare(f"llvm.vector.reduce.fmax.{width}", self.float, self.floats)

    def text(self) -> str:
        work = self._work(self._scores(), self._weights(), self._sums())
        function, b = self.begin("attend", self.pointer, public=True)
        (task,) = function.args
        threads = b.trunc(self._field(b, task, "threads"), self.i32)
        self.on_threads(b, work, task, threads)
        b.ret_void()
        return str(self.module)

    def _work(self, scores: Any, weights: Any, sums: Any) -> Any:
        """`work(task)`: take the heads of a row until there are no more."""
        function, b = self.begin("work", self.pointer)
        (task,) = function.args
        q, keys, values, out, tables, lengths, scratch = (
            b.inttoptr(self._field(b, task, name), self.pointer) for name in FIELDS[:7]
        )
        rows, kv_heads, shares, block, table_stride, stride = (
            self._field(b, task, name) for name in FIELDS[7:13]
        )
        place = self._counted(b, task, "started")
        floats = self.integer(4 * self._heads)
        scratch = self.at(b, scratch, b.mul(place, b.mul(stride, floats)))
        each_row = b.mul(kv_heads, shares)
        count = b.mul(rows, each_row)
        page = b.mul(block, self.integer(self._head_dim * self._bytes))
        fetch, run, end = (b.append_basic_block() for _ in range(3))
        b.branch(fetch)
        b.position_at_end(fetch)
        index = self._counted(b, task, "next")
        b.cbranch(b.icmp_signed("<", index, count), run, end)
        b.position_at_end(end)
        b.ret_void()
        b.position_at_end(run)
        row = b.sdiv(index, each_row)
        head = b.sdiv(b.srem(index, each_row), shares)
        table = self.at(b, tables, b.mul(b.mul(row, table_stride), self.integer(4)))
        length = self._integer(b, lengths, row)
        start = b.mul(index, self.integer(4 * self._heads * self._head_dim))
        skip, between = b.mul(head, page), b.mul(kv_heads, page)
        ours = [table, length, block, skip, between]
        b.call(scores, [self.at(b, q, start), keys, scratch, stride, *ours])
        b.call(weights, [scratch, stride, length])
        b.call(sums, [self.at(b, out, start), values, scratch, stride, *ours])
        b.branch(fetch)
        return function

    def _scores(self) -> Any:
        """`scores(q, keys, scratch, stride, ...)`: the product of each query with each key."""
        function, b = self._begun("scores")
        q, keys, scratch, stride, *ours = function.args
        queries = [
            [self.load(b, q, self.integer(head * self._head_dim + at)) for at in self._vectors]
            for head in range(self._heads)
        ]
        zeros = self.ir.Constant(self.floats, [0.0] * self.lanes)

        def key(b: Any, number: Any, vectors: Sequence[Any], _: Sequence[Any]) -> Sequence[Any]:
            for head, query in enumerate(queries):
                total = zeros
                for one, other in zip(query, vectors, strict=True):
                    total = b.call(self.fma, [one, other, total])
                into = self._score(b, scratch, stride, head, number)
                b.store(self.total(b, total), into, align=4)
            return []

        self._tokens(b, keys, ours, key, [])
        b.ret_void()
        return function

    def _weights(self) -> Any:
        """`weights(scratch, stride, length)`: the softmax of each head's scores but for its sum,
        which goes behind the last one."""
        function, b = self.begin("weights", self.pointer, self.i64, self.i64)
        scratch, stride, length = function.args
        lowest = self.ir.Constant(self.floats, [float("-inf")] * self.lanes)
        zeros = self.ir.Constant(self.floats, [0.0] * self.lanes)
        for head in range(self._heads):
            row = self._score(b, scratch, stride, head, self.integer(0))
            b.store(lowest, self._score(b, scratch, stride, head, length), align=4)

            def higher(b: Any, at: Any, values: Sequence[Any], row: Any = row) -> Sequence[Any]:
                return [b.call(self._maximum, [self.load(b, row, at), values[0]])]

            (most,) = self.loop(b, length, self.lanes, higher, [lowest])
            highest = self.everywhere(b, b.call(self._highest, [most]))

            def weigh(
                b: Any, at: Any, values: Sequence[Any], row: Any = row, highest: Any = highest
            ) -> Sequence[Any]:
                weight = self._power(b, b.fsub(self.load(b, row, at), highest))
                b.store(weight, self.at(b, row, b.mul(at, self.integer(4))), align=4)
                return [b.fadd(values[0], weight)]

            (total,) = self.loop(b, length, self.lanes, weigh, [zeros])
            b.store(self.total(b, total), self._score(b, scratch, stride, head, length), align=4)
        b.ret_void()
        return function

    def _sums(self) -> Any:
        """`sums(out, values, scratch, stride, ...)`: the values by their weights."""
        function, b = self._begun("sums")
        out, values, scratch, stride, *ours = function.args
        zeros = self.ir.Constant(self.floats, [0.0] * self.lanes)

        def value(b: Any, number: Any, vectors: Sequence[Any], sums: Sequence[Any]) -> list[Any]:
            found: list[Any] = []
            for head in range(self._heads):
                at = self._score(b, scratch, stride, head, number)
                weight = self.everywhere(b, b.load(at, typ=self.float, align=4))
                for vector in vectors:
                    found.append(b.call(self.fma, [weight, vector, sums[len(found)]]))
            return found

        sums = list(
            self._tokens(b, values, ours, value, [zeros] * self._heads * len(self._vectors))
        )
        for head in range(self._heads):
            at = self._score(b, scratch, stride, head, ours[1])
            total = self.everywhere(b, b.load(at, typ=self.float, align=4))
            for place in self._vectors:
                number = self.integer(4 * (head * self._head_dim + place))
                b.store(b.fdiv(sums.pop(0), total), self.at(b, out, number), align=4)
        b.ret_void()
        return function

    def _begun(self, name: str) -> tuple[Any, Any]:
        """A function of numbers, pages, scratch with its stride, and of what `_tokens` is given."""
        kinds = [self.pointer] * 3 + [self.i64, self.pointer] + [self.i64] * 4
        return self.begin(name, *kinds)

    def _tokens(
        self,
        b: Any,
        pages: Any,
        ours: Sequence[Any],
        body: Callable[[Any, Any, Sequence[Any], Sequence[Any]], Sequence[Any]],
        values: Sequence[Any],
    ) -> Sequence[Any]:
        """Emit a loop of `body(b, token's number, its vectors, values)` over a row's tokens.

        `ours`: its table of pages, its length, the tokens of a page, and the bytes from a page's
        begin to the head and from one page to the next."""
        table, length, block, skip, between = ours
        size = self.integer(self._head_dim * self._bytes)
        last = b.sdiv(b.sub(length, self.integer(1)), block)

        def place(b: Any, number: Any) -> Any:
            page = self._integer(b, table, number)
            return self.at(b, pages, b.add(b.mul(page, between), skip))

        def page(b: Any, number: Any, values: Sequence[Any]) -> Sequence[Any]:
            here, first = place(b, number), b.mul(number, block)
            following = b.add(number, self.integer(1))
            more = b.icmp_signed("<", following, last)
            # Pages lie anywhere, so no processor sees which one comes next.
            there = place(b, b.select(more, following, last))
            left = b.sub(length, first)
            count = b.select(b.icmp_signed("<", left, block), left, block)

            def token(b: Any, at: Any, values: Sequence[Any]) -> Sequence[Any]:
                offset = b.mul(at, size)
                for line in range(0, self._head_dim * self._bytes, 64):
                    self.fetch(b, self.at(b, there, b.add(offset, self.integer(line))), near=False)
                start = self.at(b, here, offset)
                vectors = [
                    self.wide(b, self.at(b, start, self.integer(at * self._bytes)), self._dtype)
                    for at in self._vectors
                ]
                return body(b, b.add(first, at), vectors, values)

            return self.loop(b, count, 1, token, values)

        return self.loop(b, b.add(last, self.integer(1)), 1, page, values)

    def _power(self, b: Any, x: Any) -> Any:
        """`exp(scale x)` for x of at most 0; 0 where that is no normal number."""
        x = b.fmul(x, self._all(self._scale / math.log(2)))
        whole = b.fadd(x, self._all(_MAGIC))
        part = b.fsub(x, b.fsub(whole, self._all(_MAGIC)))
        power = self._all(_SERIES[-1])
        for factor in reversed(_SERIES[:-1]):
            power = b.call(self.fma, [power, part, self._all(factor)])
        shift = self.ir.Constant(self.ints, [23] * self.lanes)
        exponent = b.shl(b.bitcast(whole, self.ints), shift)
        power = b.bitcast(b.add(b.bitcast(power, self.ints), exponent), self.floats)
        # Not so for NaN, which stays one.
        small = b.fcmp_ordered("<", x, self._all(-125.0))
        return b.select(small, self._all(0.0), power)

    def _all(self, value: float) -> Any:
        return self.ir.Constant(self.floats, [value] * self.lanes)

    def _score(self, b: Any, scratch: Any, stride: Any, head: int, number: Any) -> Any:
        place = b.add(b.mul(stride, self.integer(head)), number)
        return self.at(b, scratch, b.mul(place, self.integer(4)))

    def _integer(self, b: Any, numbers: Any, index: Any) -> Any:
        """One of int32 `numbers`."""
        at = self.at(b, numbers, b.mul(index, self.integer(4)))
        return b.sext(b.load(at, typ=self.i32, align=4), self.i64)

    def _field(self, b: Any, task: Any, name: str) -> Any:
        at = self.at(b, task, self.integer(8 * FIELDS.index(name)))
        return b.load(at, typ=self.i64, align=8)

    def _counted(self, b: Any, task: Any, name: str) -> Any:
        """A counter's value, which is one more for the next thread that asks."""
        at = self.at(b, task, self.integer(8 * FIELDS.index(name)))
        return b.atomic_rmw("add", at, self.integer(1), "monotonic")
