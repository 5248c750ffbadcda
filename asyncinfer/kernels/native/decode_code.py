"""LLVM's code of decode attention: one query token of each row attends over the row's pages.

A row's keys and values are read in place, a KV head at a time, for several query heads at once. One
thread computes these heads by itself, so neither other rows nor the number of threads change a bit
of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncinfer.kernels.native.assembly import Assembly

__all__ = ["FIELDS", "SPARE", "decode_code", "heads_at_once"]

#: The arguments of a call, 64 bits each: addresses, sizes, and the counters that threads share.
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
    "row_stride",
    "table_stride",
    "scratch_stride",
    "span",
    "threads",
    "started",
    "next",
)
#: Numbers of a head's scratch memory beyond a span's scores: a vector of padding, then the head's
#: highest score and sum so far, and the factor for earlier spans.
SPARE = 32

#: Bytes of a number, by the dtype of the pages.
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def heads_at_once(group: int, head_dim: int, lanes: int) -> int:
    """Query heads that are computed together: a divisor of `group`, the query heads that share a KV
    head, and at most as many as registers hold sums for."""
    vectors = head_dim // lanes
    most = max(1, (16 if lanes == 16 else 8) // vectors)
    return max(count for count in range(1, most + 1) if group % count == 0)


def decode_code(dtype: str, head_dim: int, heads: int, lanes: int, scale: float) -> str:
    """The assembly of `attend(task)`, where `task` points to `FIELDS`, as int64. The code computes
    `heads` query heads at once, and multiplies scores by `scale`.

    - `keys` and `values`: pages of `dtype`, `[blocks, kv_heads, block, head_dim]`.
    - `q` and `out`: float32 `[rows, kv_heads * shares * heads, head_dim]`.
    - `row_stride`: numbers from one row of `q` to the next.
    - `tables`: int32 `[rows, table_stride]`; `lengths`: int32 `[rows]`, none of them 0.
    - `span`: keys of a row that are taken at a time, a multiple of `block`.
    - `scratch`: float32 `[threads, heads, scratch_stride]`, `SPARE` wider than a span or the
      longest row.
    - `started` and `next`: 0.

    Spans are joined by an online softmax (Milakov and Gimelshein, 2018). `head_dim` is a multiple
    of `lanes`.
    """
    return _DecodeCode(dtype, head_dim, heads, lanes, scale).text()


class _DecodeCode(Assembly):
    def __init__(self, dtype: str, head_dim: int, heads: int, lanes: int, scale: float) -> None:
        super().__init__("decode", lanes, FIELDS)
        self._dtype, self._bytes = dtype, _BYTES[dtype]
        self._head_dim, self._heads, self._scale = head_dim, heads, scale
        self._vectors = range(0, head_dim, lanes)

    def text(self) -> str:
        work = self._work(self._scores(), self._weights(), self._sums())
        self.on_task("attend", work)
        return str(self.module)

    def _work(self, scores: Any, weights: Any, sums: Any) -> Any:
        """`work(task)`: compute `heads` query heads of a row, then those of the next, until none is
        left."""
        function, b = self.begin("work", self.pointer)
        (task,) = function.args
        q, keys, pages_of_values, out, tables, lengths, scratch = (
            self.address(b, task, name) for name in FIELDS[:7]
        )
        rows, kv_heads, shares, block, row_stride, table_stride, stride, span = (
            self.field(b, task, name) for name in FIELDS[7:15]
        )
        place = self.counted(b, task, "started")
        floats = self.integer(4 * self._heads)
        scratch = self.at(b, scratch, b.mul(place, b.mul(stride, floats)))
        each_row = b.mul(kv_heads, shares)
        count = b.mul(rows, each_row)
        page = b.mul(block, self.integer(self._head_dim * self._bytes))
        index, following = self.next_item(b, task, count)
        row = b.sdiv(index, each_row)
        head = b.sdiv(b.srem(index, each_row), shares)
        table = self.at(b, tables, b.mul(b.mul(row, table_stride), self.integer(4)))
        length = self._integer(b, lengths, row)
        taken = self.integer(4 * self._heads * self._head_dim)
        skip, between = b.mul(head, page), b.mul(kv_heads, page)
        row_start = b.mul(b.mul(row, row_stride), self.integer(4))
        queries = self.at(b, q, b.add(row_start, b.mul(b.srem(index, each_row), taken)))
        into = self.at(b, out, b.mul(index, taken))

        def part(b: Any, index: Any, values: Sequence[Any]) -> Sequence[Any]:
            first = b.mul(index, span)
            left = b.sub(length, first)
            count = b.select(b.icmp_signed("<", left, span), left, span)
            begun = b.icmp_signed(">", first, self.integer(0))
            ends = b.icmp_signed("<=", left, span)
            pages = self.at(b, table, b.mul(b.sdiv(first, block), self.integer(4)))
            about = [pages, count, block, skip, between]
            b.call(scores, [queries, keys, scratch, stride, *about])
            b.call(weights, [scratch, stride, count, begun])
            b.call(sums, [into, pages_of_values, scratch, stride, *about, begun, ends])
            return values

        spans = b.add(b.sdiv(b.sub(length, self.integer(1)), span), self.integer(1))
        self.loop(b, spans, 1, part, [])
        b.branch(following)
        return function

    def _scores(self) -> Any:
        """`scores(q, keys, scratch, stride, ...)`: the product of each query with each key."""
        function, b = self._begun("scores")
        q, keys, scratch, stride, *row = function.args
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

        self._tokens(b, keys, row, key, [])
        b.ret_void()
        return function

    def _weights(self) -> Any:
        """`weights(scratch, stride, length, begun)`: turn each head's scores into their weights:
        exp of the score less the head's highest score so far. The highest score, the sum so far,
        and the factor for earlier spans are stored behind the weights. `begun`: there was an
        earlier span."""
        function, b = self.begin("weights", self.pointer, self.i64, self.i64, self.bit)
        scratch, stride, length, begun = function.args
        lowest = self.ir.Constant(self.floats, [float("-inf")] * self.lanes)
        zeros = self.ir.Constant(self.floats, [0.0] * self.lanes)
        first = self.ir.Constant(self.i32, 0)
        for head in range(self._heads):
            row = self._score(b, scratch, stride, head, self.integer(0))
            behind = [self._behind(b, scratch, stride, head, which) for which in range(3)]
            before = self.everywhere(b, b.load(behind[0], typ=self.float, align=4))
            before = b.select(begun, before, lowest)
            b.store(lowest, self._score(b, scratch, stride, head, length), align=4)

            def higher(b: Any, at: Any, values: Sequence[Any], row: Any = row) -> Sequence[Any]:
                return [b.call(self.maximum, [self.load(b, row, at), values[0]])]

            (most,) = self.loop(b, length, self.lanes, higher, [before])
            highest = self.highest(b, most)

            def weigh(
                b: Any, at: Any, values: Sequence[Any], row: Any = row, highest: Any = highest
            ) -> Sequence[Any]:
                weight = self.softmax_weight(b, b.fsub(self.load(b, row, at), highest), self._scale)
                b.store(weight, self.at(b, row, b.mul(at, self.integer(4))), align=4)
                return [b.fadd(values[0], weight)]

            (total,) = self.loop(b, length, self.lanes, weigh, [zeros])
            factor = b.extract_element(
                self.softmax_weight(b, b.fsub(before, highest), self._scale), first
            )
            earlier = b.fmul(b.load(behind[1], typ=self.float, align=4), factor)
            earlier = b.select(begun, earlier, self.ir.Constant(self.float, 0.0))
            results = b.extract_element(highest, first), b.fadd(earlier, self.total(b, total))
            for result, place in zip((*results, factor), behind, strict=True):
                b.store(result, place, align=4)
        b.ret_void()
        return function

    def _sums(self) -> Any:
        """`sums(out, values, scratch, stride, ..., begun, ends)`: add the values by their weights
        to `out`, after those of earlier spans if there were any (`begun`). The sums are divided by
        the weights' sum if the row `ends` with this span."""
        function, b = self._begun("sums", self.bit, self.bit)
        out, values, scratch, stride, *row, begun, ends = function.args
        zeros = self.ir.Constant(self.floats, [0.0] * self.lanes)

        def value(b: Any, number: Any, vectors: Sequence[Any], sums: Sequence[Any]) -> list[Any]:
            found: list[Any] = []
            for head in range(self._heads):
                at = self._score(b, scratch, stride, head, number)
                weight = self.everywhere(b, b.load(at, typ=self.float, align=4))
                for vector in vectors:
                    found.append(b.call(self.fma, [weight, vector, sums[len(found)]]))
            return found

        def state(head: int, which: int) -> Any:
            at = self._behind(b, scratch, stride, head, which)
            return self.everywhere(b, b.load(at, typ=self.float, align=4))

        before = []
        for head in range(self._heads):
            factor = state(head, 2)
            for place in self._vectors:
                earlier = self.load(b, out, self.integer(head * self._head_dim + place))
                before.append(b.select(begun, b.fmul(earlier, factor), zeros))
        sums = list(self._tokens(b, values, row, value, before))
        for head in range(self._heads):
            total = b.select(ends, state(head, 1), self.all(1.0))
            for place in self._vectors:
                number = self.integer(4 * (head * self._head_dim + place))
                b.store(b.fdiv(sums.pop(0), total), self.at(b, out, number), align=4)
        b.ret_void()
        return function

    def _begun(self, name: str, *more: Any) -> tuple[Any, Any]:
        """A function of numbers, pages, scratch with its stride, the `row` of `_tokens`, and
        `more`."""
        kinds = [self.pointer] * 3 + [self.i64, self.pointer] + [self.i64] * 4
        return self.begin(name, *kinds, *more)

    def _tokens(
        self,
        b: Any,
        pages: Any,
        row: Sequence[Any],
        body: Callable[[Any, Any, Sequence[Any], Sequence[Any]], Sequence[Any]],
        values: Sequence[Any],
    ) -> Sequence[Any]:
        """Emit a loop of `body(b, number, vectors, values)` over a row's tokens, for each token's
        number and vectors.

        `row`: the row's block table, its length, the tokens of a page, the bytes from a page's
        beginning to the head, and the bytes from one page to the next."""
        table, length, block, skip, between = row
        size = self.integer(self._head_dim * self._bytes)
        last = b.sdiv(b.sub(length, self.integer(1)), block)

        def place(b: Any, number: Any) -> Any:
            page = self._integer(b, table, number)
            return self.at(b, pages, b.add(b.mul(page, between), skip))

        def page(b: Any, number: Any, values: Sequence[Any]) -> Sequence[Any]:
            here, first = place(b, number), b.mul(number, block)
            following = b.add(number, self.integer(1))
            more = b.icmp_signed("<", following, last)
            # Pages lie anywhere, so the processor cannot predict the next one and needs a prefetch.
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

    def _score(self, b: Any, scratch: Any, stride: Any, head: int, number: Any) -> Any:
        place = b.add(b.mul(stride, self.integer(head)), number)
        return self.at(b, scratch, b.mul(place, self.integer(4)))

    def _behind(self, b: Any, scratch: Any, stride: Any, head: int, which: int) -> Any:
        """The address of a head's highest score (0), sum (1) or factor (2), behind the padding."""
        end = b.sub(stride, self.integer(SPARE // 2 - which))
        return self._score(b, scratch, stride, head, end)

    def _integer(self, b: Any, numbers: Any, index: Any) -> Any:
        """One of int32 `numbers`."""
        at = self.at(b, numbers, b.mul(index, self.integer(4)))
        return b.sext(b.load(at, typ=self.i32, align=4), self.i64)
