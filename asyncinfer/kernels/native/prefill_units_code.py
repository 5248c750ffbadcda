"""LLVM's code of causal attention of a prompt's tokens in bfloat16, by matrix units (AMX).

The units multiply a group of queries by the keys of a span, and then the weights by its values.
Vectors compute the weights in between. Keys and values are laid out in pairs, as the units read
them. A weight is rounded to bfloat16 before its products, as FlashAttention does (Dao et al.,
2022). Scores and sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncinfer.kernels.native.matrix_registers_code import (
    COLUMNS,
    MOST_ROWS,
    ROWS,
    UNIT_NUMBERS,
    MatrixRegisters,
)
from asyncinfer.kernels.native.prefill_code import scratch_numbers
from asyncinfer.kernels.native.prefill_halves_code import PairsCode
from asyncinfer.kernels.native.prefill_rows_code import SPAN, TILE
from asyncinfer.kernels.native.softmax_code import row_weights

__all__ = ["units_code", "units_scratch"]

#: Rows whose weights are computed at once.
_TOGETHER = 4
#: Bytes from one row of scores to the next.
_ROW_BYTES = 4 * SPAN


def units_scratch(head_dim: int) -> int:
    """The words of a thread's scratch memory: what `scratch_numbers` says, the sums of a tile, and
    its queries side by side."""
    return scratch_numbers(head_dim, MOST_ROWS) + 3 * TILE * head_dim // 2


def units_code(head_dim: int, group: int, lanes: int, scale: float) -> str:
    """As `halves_code`, where `scratch` has `units_scratch` words, and `head_dim` is a multiple of
    `UNIT_NUMBERS`."""
    return _UnitsCode(head_dim, group, lanes, scale).text()


class _UnitsCode(PairsCode):
    at_once = MOST_ROWS

    def text(self) -> str:
        self._units = MatrixRegisters(self)
        return super().text()

    @property
    def value_keys(self) -> int:
        return self.block

    @property
    def scratch(self) -> int:
        return units_scratch(self.head_dim)

    def queries_of(self, b: Any, scratch: Any, q: Any, q_stride: Any, rows: Any) -> Any:
        sums = self.sums_of(b, scratch, None)
        queries = self.at(b, sums, self.integer(4 * TILE * self.head_dim))
        group = self.integer(self.group)

        def one(row: Any) -> None:
            head = b.mul(b.urem(row, group), self.integer(self.head_bytes))
            query = self.at(b, q, b.add(b.mul(b.udiv(row, group), q_stride), head))
            into = self.at(b, queries, b.mul(row, self.integer(self.head_bytes)))
            for part in range(0, self.head_dim // 2, self.lanes):
                self.store(b, self.load(b, query, self.integer(part)), into, self.integer(part))

        self.each(b, self.integer(0), rows, 1, one)
        return queries

    def rows(self) -> Any:
        kinds = [self.pointer] * 7 + [self.i64] * 7 + [self.bit] * 2
        function, b = self.begin("rows", *kinds)
        function.attributes.add("noinline")
        queries, out, keys, values, scores, states, ahead, step, *more = function.args
        _, _, row, last, offset, seen, begun, ends = more
        queries = self.at(b, queries, b.mul(row, self.integer(self.head_bytes)))
        sums = self.at(b, out, b.mul(row, self.integer(4 * self.head_dim)))
        states = self.at(b, states, b.mul(row, self.integer(8)))
        count = b.add(b.sub(last, row), self.integer(1))
        # Weights beyond the keys that are seen, up to the end of a block, are zero.
        whole = b.and_(b.add(seen, self.integer(self.block - 1)), self.integer(-self.block))
        self._units.configure(b)
        self._products(b, queries, keys, scores, whole)
        self._weights(b, scores, states, sums, (row, count, offset, seen), begun)
        self._sums_of_values(b, scores, values, sums, whole)
        self._units.release(b)
        self.each(b, self.integer(0), seen, 1, lambda key: self.fetch_line(b, (ahead, step), key))
        with b.if_then(ends):
            self._divided(b, sums, states, count)
        b.ret_void()
        return function

    def _products(self, b: Any, queries: Any, keys: Any, scores: Any, whole: Any) -> None:
        """Write to `scores` the product of each query with each of `whole` keys."""
        row_bytes = self.integer(self.head_bytes)
        places = [self.at(b, queries, self.integer(at * self.head_bytes)) for at in (0, ROWS)]
        inside = self.integer(self.block - 1)

        def some_keys(key: Any) -> None:
            within = b.and_(key, inside)
            begin = self.at(b, keys, b.mul(b.sub(key, within), self.integer(4 * self.laid_words)))
            begin = self.at(b, begin, b.mul(within, self.integer(4)))
            self._units.clear(b)
            for number in range(0, self.head_dim, UNIT_NUMBERS):
                left = [self.at(b, place, self.integer(2 * number)) for place in places]
                pairs = self.at(b, begin, self.integer(2 * number * self.block))
                self._units.multiply(b, left, row_bytes, pairs, self.integer(4 * self.block))
            self._units.write(b, self._groups(b, scores, b.mul(key, self.integer(4))), self._step)

        self.each(b, self.integer(0), whole, 2 * COLUMNS, some_keys)

    def _weights(
        self, b: Any, scores: Any, states: Any, sums: Any, rows: Sequence[Any], begun: Any
    ) -> None:
        """Turn the scores into weights, and multiply the sums of earlier spans by their factor."""
        first, count, offset, seen = rows
        weights = row_weights(self, self.block, self._scale, self.store_weight)

        def some(row: Any) -> None:
            places, limits, kept, own = [], [], [], []
            for number in range(_TOGETHER):
                this = b.add(row, self.integer(number))
                token = b.udiv(b.add(first, this), self.integer(self.group))
                limits.append(b.trunc(b.add(offset, token), self.i32))
                places.append(self.at(b, scores, b.mul(this, self._step)))
                kept.append(self.at(b, states, b.mul(this, self.integer(8))))
                own.append(self.at(b, sums, b.mul(this, self.integer(4 * self.head_dim))))
            found = weights(b, places, limits, kept, seen, begun)
            for place, (factor, _) in zip(own, found, strict=True):
                for part in range(0, self.head_dim, self.lanes):
                    before = self.load(b, place, self.integer(part))
                    after = b.select(begun, b.fmul(before, factor), self.all(0.0))
                    self.store(b, after, place, self.integer(part))

        self.each(b, self.integer(0), count, _TOGETHER, some)

    def _sums_of_values(self, b: Any, weights: Any, values: Any, sums: Any, whole: Any) -> None:
        """Add the values of `whole` keys by their weights."""
        row_bytes = self.integer(4 * self.head_dim)
        for number in range(0, self.head_dim, 2 * COLUMNS):
            begin = self.at(b, sums, self.integer(4 * number))
            places = [self.at(b, begin, self.integer(4 * at * self.head_dim)) for at in (0, ROWS)]
            self._units.read(b, places, row_bytes)

            def some_keys(key: Any, number: int = number) -> None:
                left = self._groups(b, weights, b.mul(key, self.integer(2)))
                right = self.at(b, values, b.mul(key, self.integer(self.head_bytes)))
                right = self.at(b, right, self.integer(4 * number))
                self._units.multiply(b, left, self._step, right, row_bytes)

            self.each(b, self.integer(0), whole, UNIT_NUMBERS, some_keys)
            self._units.write(b, places, row_bytes)

    def _divided(self, b: Any, sums: Any, states: Any, count: Any) -> None:
        """Divide the sums by those of the weights."""

        def one(row: Any) -> None:
            total = self.one(b, states, b.add(b.mul(row, self.integer(2)), self.integer(1)))
            place = self.at(b, sums, b.mul(row, self.integer(4 * self.head_dim)))
            for part in range(0, self.head_dim, self.lanes):
                number = self.integer(part)
                self.store(b, b.fdiv(self.load(b, place, number), total), place, number)

        self.each(b, self.integer(0), count, 1, one)

    @property
    def _step(self) -> Any:
        return self.integer(_ROW_BYTES)

    def _groups(self, b: Any, scores: Any, on: Any) -> list[Any]:
        """Where the rows of each register begin, `on` bytes from the first score."""
        begin = self.at(b, scores, on)
        return [begin, self.at(b, begin, self.integer(ROWS * _ROW_BYTES))]
