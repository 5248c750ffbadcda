"""LLVM's code of a few rows of causal attention, with the keys and values of a span.

A row is one query head of one token. `ROWS` of them are computed at once, for which registers hold
the sums. Vectors hold the same dimension of several keys: nothing is summed across lanes. No other
row changes the order in which a row is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncinfer.kernels.native.assembly import Assembly
from asyncinfer.kernels.native.softmax_code import row_weights

__all__ = ["ROWS", "SPAN", "TILE", "PrefillRows", "block_of"]

#: Rows that are computed at once.
ROWS = 6
#: Keys of a span. All rows of a tile are computed with one span before the next, so that the span
#: stays in a core's second-level cache. A multiple of a block's keys.
SPAN = 256
#: The most rows of a tile, a multiple of `ROWS`.
TILE = 96


def block_of(lanes: int) -> int:
    """Keys of a block."""
    return lanes * (4 if lanes == 16 else 2)


class PrefillRows(Assembly):
    """Emits the code of rows for float32. Subclasses for other numbers override its public
    methods."""

    #: Rows that are computed at once.
    at_once = ROWS

    def __init__(
        self,
        fields: Sequence[str],
        head_dim: int,
        group: int,
        lanes: int,
        scale: float,
        size: int,
        laid_size: int,
    ) -> None:
        """`fields`: those of a task; `group`: query heads for each KV head; `size`: bytes of a
        number of queries, keys and values; `laid_size`: of a key's number in a block."""
        super().__init__("prefill", lanes, fields)
        self.head_dim, self.group = head_dim, group
        self._scale = scale
        self.block = block_of(lanes)
        #: Bytes of a head, and words of 32 bits of a key in a block.
        self.head_bytes, self.laid_words = size * head_dim, laid_size * head_dim // 4

    def rows(self) -> Any:
        """`rows(q, out, keys, values, scratch, states, ahead, step, q_stride, out_stride, row,
        last, offset, seen, begun, ends)`: compute the rows `row .. last`, at most `at_once`, with
        the first `seen` keys of a span.

        `ahead` and `step` are of `span_lines`, `offset` of `span`. `begun`: the rows have had an
        earlier span. `ends`: the rows see no later span.
        """
        kinds = [self.pointer] * 7 + [self.i64] * 7 + [self.bit] * 2
        function, b = self.begin("rows", *kinds)
        function.attributes.add("noinline")
        q, out, keys, values, scratch, states, ahead, step, *more = function.args
        q_stride, out_stride, row, last, offset, seen, begun, ends = more
        queries, outs, limits, kept = [], [], [], []
        for number in range(ROWS):
            # Rows beyond the last one are computed as the last.
            this = b.add(row, self.integer(number))
            kept.append(self.at(b, states, b.mul(this, self.integer(8))))
            this = b.select(b.icmp_signed("<", this, last), this, last)
            token = b.udiv(this, self.integer(self.group))
            head = b.mul(b.urem(this, self.integer(self.group)), self.integer(self.head_bytes))
            queries.append(self.query_of(b, q, this, b.add(b.mul(token, q_stride), head)))
            outs.append(self.sum_of(b, out, this, b.add(b.mul(token, out_stride), head)))
            limits.append(b.trunc(b.add(offset, token), self.i32))
        self._scores(b, queries, keys, scratch, seen)
        weights = row_weights(self, self.block, self._scale, self.store_weight)
        places = [self._row(b, scratch, number) for number in range(ROWS)]
        factors = weights(b, places, limits, kept, seen, begun)
        self._sums(b, outs, values, scratch, (ahead, step), seen, begun, ends, factors)
        b.ret_void()
        return function

    def _scores(self, b: Any, queries: Sequence[Any], keys: Any, scratch: Any, seen: Any) -> None:
        """Write to `scratch` the product of each query with each key, up to the end of a block."""
        parts = range(0, self.block, self.lanes)

        def block(b: Any, key: Any, _: Sequence[Any]) -> Sequence[Any]:
            block_keys = self.at(b, keys, b.mul(key, self.integer(4 * self.laid_words)))

            def number(b: Any, at: Any, sums: Sequence[Any]) -> Sequence[Any]:
                start = b.mul(at, self.integer(self.block))
                places = [b.add(start, self.integer(part)) for part in parts]
                column = [self.load(b, block_keys, place) for place in places]
                return self.products(b, [self.one(b, each, at) for each in queries], column, sums)

            none = [self.all(0.0)] * (ROWS * len(parts))
            sums = [*self.loop(b, self.integer(self.laid_words), 1, number, none)]
            for index in range(ROWS):
                into = self._row(b, scratch, index)
                for part in parts:
                    self.store(b, sums.pop(0), into, b.add(key, self.integer(part)))
            return []

        self.loop(b, seen, self.block, block, [])

    def _sums(
        self,
        b: Any,
        outs: Sequence[Any],
        values: Any,
        scratch: Any,
        fetched: tuple[Any, Any],
        seen: Any,
        begun: Any,
        ends: Any,
        factors: Sequence[tuple[Any, Any]],
    ) -> None:
        """Add the values by their weights to the rows of `outs`, after those of earlier spans times
        their factor. Rows that see no later span are divided by the weights' sum."""
        weights = [self._row(b, scratch, number) for number in range(ROWS)]
        vectors = self.block // self.lanes
        none = self.all(0.0)
        for first in range(0, self.head_dim, self.block):
            parts = range(first, min(first + vectors * self.lanes, self.head_dim), self.lanes)
            before = [
                b.select(begun, b.fmul(self.load(b, out, self.integer(part)), factor), none)
                for out, (factor, _) in zip(outs, factors, strict=True)
                for part in parts
            ]

            def key(
                b: Any, number: Any, sums: Sequence[Any], parts: range = parts
            ) -> Sequence[Any]:
                if parts.start == 0:
                    self.fetch_later(b, fetched, number)
                start = b.mul(number, self.integer(self.head_dim))
                column = [self.load(b, values, b.add(start, self.integer(part))) for part in parts]
                ones = [self.one(b, each, number) for each in weights]
                return self.products(b, ones, column, sums)

            sums = list(self.loop(b, self.rows_of(b, seen), 1, key, before))
            for out, (_, total) in zip(outs, factors, strict=True):
                by = b.select(ends, total, self.all(1.0))
                for part in parts:
                    self.store(b, b.fdiv(sums.pop(0), by), out, self.integer(part))

    def query_of(self, b: Any, queries: Any, row: Any, place: Any) -> Any:
        """Where the query of this row of a tile lies; `place`: the bytes to it in q."""
        return self.at(b, queries, place)

    def sum_of(self, b: Any, sums: Any, row: Any, place: Any) -> Any:
        """Where the sum of this row of a tile lies; `place`: the bytes to its result."""
        return self.at(b, sums, place)

    def rows_of(self, b: Any, keys: Any) -> Any:
        """The rows of `values_of` that so many keys have."""
        return keys

    def store_weight(self, b: Any, weight: Any, row: Any, at: Any) -> None:
        """Store the weights of the keys from `at` on, over a row's scores."""
        self.store(b, weight, row, at)

    def fetch_later(self, b: Any, fetched: tuple[Any, Any], row: Any) -> None:
        """Fetch what `span_lines` says, for this row of `values_of`."""
        self.fetch_line(b, fetched, row)

    def fetch_line(self, b: Any, fetched: tuple[Any, Any], row: Any) -> None:
        """Fetch the line that `span_lines` says for this key."""
        self.fetch(b, self.at(b, fetched[0], b.mul(row, fetched[1])), near=False)

    def products(
        self, b: Any, numbers: Sequence[Any], column: Sequence[Any], sums: Sequence[Any]
    ) -> Sequence[Any]:
        """The sums after the products of each row's number and each vector were added."""
        pairs = ((number, vector) for number in numbers for vector in column)
        return [b.call(self.fma, [*pair, one]) for pair, one in zip(pairs, sums, strict=True)]

    def _row(self, b: Any, scratch: Any, number: int) -> Any:
        return self.at(b, scratch, self.integer(4 * SPAN * number))
