"""LLVM's code of causal attention of a prompt's tokens in bfloat16.

One instruction adds the products of two pairs of numbers (`vdpbf16ps`): two dimensions of a query
and a key for a score, the weights and values of two keys for a sum. A pair is a word of 32 bits.
Scores and sums are float32; a weight is rounded to bfloat16 before its products, as FlashAttention
does (Dao et al., 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncinfer.kernels.native.assembly import Assembly
from asyncinfer.kernels.native.prefill_code import SPAN, TILE, PrefillCode, scratch_numbers

__all__ = ["pairs_code", "pairs_scratch"]


def pairs_scratch(head_dim: int) -> int:
    """The words of a thread's scratch memory: as in float32, where keys and values take the place
    of its keys, and the sums of a tile."""
    return scratch_numbers(head_dim) + TILE * head_dim


def pairs_code(head_dim: int, group: int, lanes: int, scale: float) -> str:
    """As `prefill_code`, where queries, keys, values and results are bfloat16, and `scratch` has
    `pairs_scratch` words. `head_dim` is a multiple of `2 * lanes`."""
    return _PairsCode(head_dim, group, lanes, scale, 2).text()


class _PairsCode(PrefillCode):
    def text(self) -> str:
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.lanes}"
        self._pairs = self.declare(name, self.floats, self.floats, self.halves, self.halves)
        self._lay_values = _value_layout(self, self._head_dim)
        return super().text()

    @property
    def scratch(self) -> int:
        return pairs_scratch(self._head_dim)

    def sums_of(self, b: Any, scratch: Any, out: Any) -> Any:
        return self.at(b, scratch, self.integer(4 * SPAN * self._words))

    def sum_of(self, b: Any, sums: Any, row: Any, place: Any) -> Any:
        return self.at(b, sums, b.mul(row, self.integer(4 * self._head_dim)))

    def values_of(self, b: Any, values: Any, last: Any, scratch: Any) -> Any:
        b.call(self._lay_values, [values, last, scratch])
        return scratch

    def rows_of(self, b: Any, keys: Any) -> Any:
        one = self.integer(1)
        return b.lshr(b.add(keys, one), one)

    def store_weight(self, b: Any, weight: Any, row: Any, at: Any) -> None:
        # The scores that this writes over were read before.
        place = self.at(b, row, b.mul(at, self.integer(2)))
        b.store(self.rounded(b, weight, at_once=True), place, align=2)

    def fetch_later(self, b: Any, fetched: tuple[Any, Any], row: Any) -> None:
        key = b.shl(row, self.integer(1))
        super().fetch_later(b, fetched, key)
        super().fetch_later(b, fetched, b.add(key, self.integer(1)))

    def finish(self, b: Any, sums: Any, out: Any, rows: Any, out_stride: Any) -> None:
        group = self.integer(self._group)

        def one(b: Any, row: Any, _: Sequence[Any]) -> Sequence[Any]:
            head = b.mul(b.urem(row, group), self.integer(2 * self._head_dim))
            place = self.at(b, out, b.add(b.mul(b.udiv(row, group), out_stride), head))
            own = self.sum_of(b, sums, row, None)
            for part in range(0, self._head_dim, self.lanes):
                vector = self.rounded(b, self.load(b, own, self.integer(part)), at_once=True)
                b.store(vector, self.at(b, place, self.integer(2 * part)), align=2)
            return []

        self.loop(b, rows, 1, one, [])

    def products(
        self, b: Any, numbers: Sequence[Any], column: Sequence[Any], sums: Sequence[Any]
    ) -> Sequence[Any]:
        words = [b.bitcast(number, self.halves) for number in numbers]
        others = [b.bitcast(vector, self.halves) for vector in column]
        pairs = ((word, other) for word in words for other in others)
        return [b.call(self._pairs, [one, *pair]) for pair, one in zip(pairs, sums, strict=True)]


def _value_layout(a: Assembly, head_dim: int) -> Any:
    """A function `lay_values(values, last, laid)`: lay out the values up to the one numbered
    `last`, bfloat16 `[keys, head_dim]`, as `[keys / 2, head_dim, 2]`: of each dimension the numbers
    of two keys. Where the last key is alone, it is its own neighbour."""
    function, b = a.begin("lay_values", a.pointer, a.i64, a.pointer)
    function.attributes.add("noinline")
    values, last, laid = function.args
    row_bytes, narrow = a.integer(2 * head_dim), a.ir.VectorType(a.ir.IntType(16), a.lanes)
    sixteen = a.ir.Constant(a.ints, [16] * a.lanes)

    def two_keys(b: Any, key: Any, _: Sequence[Any]) -> Sequence[Any]:
        following = b.add(key, a.integer(1))
        following = b.select(b.icmp_signed("<", following, last), following, last)
        rows = [a.at(b, values, b.mul(number, row_bytes)) for number in (key, following)]
        into = a.at(b, laid, b.mul(key, row_bytes))
        for part in range(0, head_dim, a.lanes):
            low, high = (
                b.zext(b.load(a.at(b, row, a.integer(2 * part)), typ=narrow, align=2), a.ints)
                for row in rows
            )
            words = b.or_(low, b.shl(high, sixteen))
            b.store(words, a.at(b, into, a.integer(4 * part)), align=4)
        return []

    a.loop(b, b.add(last, a.integer(1)), 2, two_keys, [])
    b.ret_void()
    return function
