"""LLVM's code of causal attention of a prompt's tokens.

A thread takes a tile of tokens of one KV head, and in it as many rows (one query head of a token
each) at once as registers hold sums for. Keys lie in blocks, in vectors of one number of several
keys, so that nothing has to be summed across lanes. Each row is computed in the same order,
whatever the others are and however many threads there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncinfer.kernels.native.assembly import Assembly

__all__ = ["FIELDS", "ROWS", "SPAN", "TILE", "block_of", "prefill_code", "scratch_numbers"]

#: What a call is told, each 64 bits: addresses, sizes, and last the counters that threads share.
FIELDS = (
    "q",
    "keys",
    "values",
    "out",
    "scratch",
    "tokens",
    "start",
    "tiles",
    "items",
    "q_stride",
    "out_stride",
    "keys_stride",
    "values_stride",
    "threads",
    "started",
    "next",
)
#: Rows that are computed at once.
ROWS = 6
#: Keys that all rows of a tile are computed with before the next ones, so that a core's second
#: cache holds them: a multiple of each block.
SPAN = 256
#: Rows of a tile, a multiple of `ROWS`.
TILE = 96


def block_of(lanes: int) -> int:
    """Keys of a block."""
    return lanes * (4 if lanes == 16 else 2)


def scratch_numbers() -> int:
    """float32 numbers that each thread needs: scores, and a highest score and a sum for each row of
    a tile."""
    return ROWS * SPAN + 2 * TILE


def prefill_code(head_dim: int, group: int, lanes: int, scale: float) -> str:
    """The assembly of `attend(task)`, where `task` points to `FIELDS`, as int64.

    `q` and `out` are float32 `[tokens, kv_heads * group, head_dim]`, `q_stride` and `out_stride`
    bytes from one token to the next. `keys` are float32 `[kv_heads, blocks, head_dim, block]`,
    zeros where there is none, and `values` `[kv_heads, any, head_dim]`, `keys_stride` and
    `values_stride` bytes from one head to the next. The first token is number `start` of its
    sequence, and attends to the keys before it and its own. `tiles` of `TILE // group` tokens cover
    all; `items` are `tiles * kv_heads`. `scratch` float32 `[threads, scratch_numbers()]`; `started`
    and `next` are 0. Keys are taken `SPAN` at a time, by an online softmax (Milakov and Gimelshein,
    2018). `head_dim` is a multiple of `lanes`, `scale` above 0, and `group` at most `TILE`.
    """
    return _PrefillCode(head_dim, group, lanes, scale).text()


class _PrefillCode(Assembly):
    def __init__(self, head_dim: int, group: int, lanes: int, scale: float) -> None:
        super().__init__("prefill", lanes, FIELDS)
        self._head_dim, self._group, self._scale = head_dim, group, scale
        self._block = block_of(lanes)

    def text(self) -> str:
        self.on_task("attend", self._work(self._rows()))
        return str(self.module)

    def _work(self, rows: Any) -> Any:
        """`work(task)`: take tiles of a head until there are no more."""
        function, b = self.begin("work", self.pointer)
        (task,) = function.args
        q, keys, values, out, scratch = (self.address(b, task, name) for name in FIELDS[:5])
        tokens, start, tiles, items, q_stride, out_stride, keys_stride, values_stride = (
            self.field(b, task, name) for name in FIELDS[5:13]
        )
        place = self.counted(b, task, "started")
        scratch = self.at(b, scratch, b.mul(place, self.integer(4 * scratch_numbers())))
        states = self.at(b, scratch, self.integer(4 * ROWS * SPAN))
        index, following = self.next_item(b, task, items)
        head = b.sdiv(index, tiles)
        # The last tiles have most keys, and so come first.
        tile = b.sub(b.sub(tiles, self.integer(1)), b.srem(index, tiles))
        group = self.integer(self._group)
        many = self.integer(TILE // self._group)
        first = b.mul(tile, many)
        left = b.sub(tokens, first)
        count = b.mul(b.select(b.icmp_signed("<", left, many), left, many), group)
        skip = b.mul(head, self.integer(4 * self._group * self._head_dim))
        ours = self.at(b, q, b.add(skip, b.mul(first, q_stride)))
        into = self.at(b, out, b.add(skip, b.mul(first, out_stride)))
        keys = self.at(b, keys, b.mul(head, keys_stride))
        values = self.at(b, values, b.mul(head, values_stride))
        begin = b.add(start, first)
        last = b.add(begin, b.sdiv(b.sub(count, self.integer(1)), group))
        size = self.integer(4 * self._head_dim)

        def span(b: Any, key: Any, _: Sequence[Any]) -> Sequence[Any]:
            there = self.at(b, keys, b.mul(key, size)), self.at(b, values, b.mul(key, size))
            # Where the tile begins, seen from the span's first key.
            offset = b.sub(begin, key)
            begun = b.icmp_signed(">", key, self.integer(0))

            def some(b: Any, row: Any, _: Sequence[Any]) -> Sequence[Any]:
                highest = b.sub(count, self.integer(1))
                final = b.add(row, self.integer(ROWS - 1))
                final = b.select(b.icmp_signed("<", final, highest), final, highest)
                seen = b.add(b.add(offset, b.sdiv(final, group)), self.integer(1))
                with b.if_then(b.icmp_signed(">", seen, self.integer(0))):
                    whole = self.integer(SPAN)
                    ends = b.icmp_signed("<=", seen, whole)
                    seen = b.select(ends, seen, whole)
                    strides = [q_stride, out_stride]
                    places = [ours, into, *there, scratch, states]
                    about = [row, final, offset, seen, begun, ends]
                    b.call(rows, [*places, *strides, *about])
                return []

            return self.loop(b, count, ROWS, some, [])

        self.loop(b, b.add(last, self.integer(1)), SPAN, span, [])
        b.branch(following)
        return function

    def _rows(self) -> Any:
        """`rows(q, out, keys, values, scratch, states, strides, row, last, offset, seen, begun,
        ends)`: the rows from `row` on, `last` at most, with `seen` keys of a span. The tile's first
        token is `offset` keys on. Earlier spans have `begun`, and rows may `end` with this one."""
        kinds = [self.pointer] * 6 + [self.i64] * 6 + [self.bit] * 2
        function, b = self.begin("rows", *kinds)
        function.attributes.add("noinline")
        q, out, keys, values, scratch, states, q_stride, out_stride, *more = function.args
        row, last, offset, seen, begun, ends = more
        queries, outs, limits, kept = [], [], [], []
        for number in range(ROWS):
            # The last row stands in for rows that there are not.
            this = b.add(row, self.integer(number))
            kept.append(self.at(b, states, b.mul(this, self.integer(8))))
            this = b.select(b.icmp_signed("<", this, last), this, last)
            token = b.udiv(this, self.integer(self._group))
            head = b.mul(b.urem(this, self.integer(self._group)), self.integer(4 * self._head_dim))
            queries.append(self.at(b, q, b.add(b.mul(token, q_stride), head)))
            outs.append(self.at(b, out, b.add(b.mul(token, out_stride), head)))
            limits.append(b.trunc(b.add(offset, token), self.i32))
        self._scores(b, queries, keys, scratch, seen)
        factors = [
            self._weights(b, self._row(b, scratch, number), limit, slot, seen, begun)
            for number, (limit, slot) in enumerate(zip(limits, kept, strict=True))
        ]
        self._sums(b, outs, values, scratch, seen, begun, ends, factors)
        b.ret_void()
        return function

    def _scores(self, b: Any, queries: Sequence[Any], keys: Any, scratch: Any, seen: Any) -> None:
        """The product of each query with each key, up to the end of a block."""
        parts = range(0, self._block, self.lanes)

        def block(b: Any, key: Any, _: Sequence[Any]) -> Sequence[Any]:
            ours = self.at(b, keys, b.mul(key, self.integer(4 * self._head_dim)))

            def number(b: Any, at: Any, sums: Sequence[Any]) -> Sequence[Any]:
                start = b.mul(at, self.integer(self._block))
                column = [self.load(b, ours, b.add(start, self.integer(part))) for part in parts]
                return self._products(b, [self._one(b, each, at) for each in queries], column, sums)

            sums = list(
                self.loop(
                    b,
                    self.integer(self._head_dim),
                    1,
                    number,
                    [self.all(0.0)] * (ROWS * len(parts)),
                )
            )
            for index in range(ROWS):
                into = self._row(b, scratch, index)
                for part in parts:
                    self.store(b, sums.pop(0), into, b.add(key, self.integer(part)))
            return []

        self.loop(b, seen, self._block, block, [])

    def _weights(
        self, b: Any, row: Any, limit: Any, state: Any, seen: Any, begun: Any
    ) -> tuple[Any, Any]:
        """exp of a row's scores less the highest one so far, of keys up to `limit`. That and the
        sum go to `state`; returns the factor for what came before and the sum, in every lane."""
        lowest = self.all(float("-inf"))
        lane = self.ir.Constant(self.ints, list(range(self.lanes)))
        most = self.everywhere(b, limit)
        # Scores are there up to the end of a block.
        count = b.add(seen, self.integer(self._block - 1))
        count = b.and_(count, self.integer(-self._block))

        def mask(b: Any, at: Any, values: Sequence[Any]) -> Sequence[Any]:
            number = b.add(self.everywhere(b, b.trunc(at, self.i32)), lane)
            score = b.select(b.icmp_signed("<=", number, most), self.load(b, row, at), lowest)
            self.store(b, score, row, at)
            return [b.call(self.maximum, [values[0], score])]

        before = b.select(begun, self._one(b, state, self.integer(0)), lowest)
        (vector,) = self.loop(b, count, self.lanes, mask, [before])
        highest = self.highest(b, vector)

        def weigh(b: Any, at: Any, values: Sequence[Any]) -> Sequence[Any]:
            weight = self.softmax_weight(b, b.fsub(self.load(b, row, at), highest), self._scale)
            self.store(b, weight, row, at)
            return [b.fadd(values[0], weight)]

        (sums,) = self.loop(b, count, self.lanes, weigh, [self.all(0.0)])
        factor = b.select(
            begun, self.softmax_weight(b, b.fsub(before, highest), self._scale), self.all(0.0)
        )
        earlier = b.select(
            begun, b.fmul(self._one(b, state, self.integer(1)), factor), self.all(0.0)
        )
        first = self.ir.Constant(self.i32, 0)
        total = b.fadd(b.extract_element(earlier, first), self.total(b, sums))
        b.store(b.extract_element(highest, first), state, align=4)
        b.store(total, self.at(b, state, self.integer(4)), align=4)
        return factor, self.everywhere(b, total)

    def _sums(
        self,
        b: Any,
        outs: Sequence[Any],
        values: Any,
        scratch: Any,
        seen: Any,
        begun: Any,
        ends: Any,
        factors: Sequence[tuple[Any, Any]],
    ) -> None:
        """The values by their weights, added to those of earlier spans; divided by the weights' sum
        where rows end here."""
        weights = [self._row(b, scratch, number) for number in range(ROWS)]
        vectors = self._block // self.lanes
        none = self.all(0.0)
        for first in range(0, self._head_dim, self._block):
            parts = range(first, min(first + vectors * self.lanes, self._head_dim), self.lanes)
            before = [
                b.select(begun, b.fmul(self.load(b, out, self.integer(part)), factor), none)
                for out, (factor, _) in zip(outs, factors, strict=True)
                for part in parts
            ]

            def key(
                b: Any, number: Any, sums: Sequence[Any], parts: range = parts
            ) -> Sequence[Any]:
                start = b.mul(number, self.integer(self._head_dim))
                column = [self.load(b, values, b.add(start, self.integer(part))) for part in parts]
                ones = [self._one(b, each, number) for each in weights]
                return self._products(b, ones, column, sums)

            sums = list(self.loop(b, seen, 1, key, before))
            for out, (_, total) in zip(outs, factors, strict=True):
                by = b.select(ends, total, self.all(1.0))
                for part in parts:
                    self.store(b, b.fdiv(sums.pop(0), by), out, self.integer(part))

    def _products(
        self, b: Any, numbers: Sequence[Any], column: Sequence[Any], sums: Sequence[Any]
    ) -> Sequence[Any]:
        """The sums of each row, with the products of its number and the column's vectors added."""
        pairs = ((number, vector) for number in numbers for vector in column)
        return [b.call(self.fma, [*pair, one]) for pair, one in zip(pairs, sums, strict=True)]

    def _row(self, b: Any, scratch: Any, number: int) -> Any:
        return self.at(b, scratch, self.integer(4 * SPAN * number))

    def _one(self, b: Any, floats: Any, number: Any) -> Any:
        """One of float32 `floats`, in every lane."""
        place = self.at(b, floats, b.mul(number, self.integer(4)))
        return self.everywhere(b, b.load(place, typ=self.float, align=4))
