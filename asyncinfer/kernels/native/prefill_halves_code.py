"""LLVM's code of causal attention of a prompt's tokens in bfloat16.

Either one instruction adds the products of two pairs of numbers (`vdpbf16ps`): two dimensions of a
query and a key for a score, the weights and values of two keys for a sum. A pair is a word of 32
bits, and a weight is rounded to bfloat16 before its products, as FlashAttention does (Dao et al.,
2022). Or numbers are widened to float32 first: a tile's queries, and the keys and values of a span.
Scores and sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncinfer.kernels.native.assembly import Assembly
from asyncinfer.kernels.native.key_layout import key_layout
from asyncinfer.kernels.native.prefill_code import PrefillCode, scratch_numbers
from asyncinfer.kernels.native.prefill_rows_code import SPAN, TILE

__all__ = ["PairsCode", "halves_code", "halves_scratch"]


def halves_scratch(head_dim: int, *, pairs: bool) -> int:
    """The words of a thread's scratch memory. Besides what it has in float32: the sums of a tile,
    and where numbers are widened the queries of a tile and the values of a span. Pairs of keys and
    of values take as much as its keys there."""
    more = TILE if pairs else 2 * TILE + SPAN
    return scratch_numbers(head_dim) + more * head_dim


def halves_code(
    head_dim: int, group: int, lanes: int, scale: float, *, pairs: bool, rounds: bool = True
) -> str:
    """As `prefill_code`, where queries, keys, values and results are bfloat16, and `scratch` has
    `halves_scratch` words. `pairs`: by the instruction for pairs, and `head_dim` is a multiple of
    `2 * lanes`. `rounds`: see `Host`."""
    if pairs:
        return PairsCode(head_dim, group, lanes, scale).text()
    return _WidenedCode(head_dim, group, lanes, scale, rounds=rounds).text()


class _HalvesCode(PrefillCode):
    """What both ways share: sums lie in the scratch memory until they are whole."""

    #: See `Host`.
    rounds = True

    def sums_of(self, b: Any, scratch: Any, out: Any) -> Any:
        return self.at(b, scratch, self.integer(4 * SPAN * self.laid_words))

    def sum_of(self, b: Any, sums: Any, row: Any, place: Any) -> Any:
        return self.at(b, sums, b.mul(row, self.integer(4 * self.head_dim)))

    def finish(self, b: Any, sums: Any, out: Any, rows: Any, out_stride: Any) -> None:
        group = self.integer(self.group)

        def one(b: Any, row: Any, _: Sequence[Any]) -> Sequence[Any]:
            head = b.mul(b.urem(row, group), self.integer(self.head_bytes))
            place = self.at(b, out, b.add(b.mul(b.udiv(row, group), out_stride), head))
            own = self.sum_of(b, sums, row, None)
            for part in range(0, self.head_dim, self.lanes):
                vector = self.load(b, own, self.integer(part))
                vector = self.rounded(b, vector, at_once=self.rounds)
                b.store(vector, self.at(b, place, self.integer(2 * part)), align=2)
            return []

        self.loop(b, rows, 1, one, [])


class _WidenedCode(_HalvesCode):
    def __init__(
        self, head_dim: int, group: int, lanes: int, scale: float, *, rounds: bool
    ) -> None:
        super().__init__(head_dim, group, lanes, scale, size=2)
        self.rounds = rounds

    @property
    def scratch(self) -> int:
        return halves_scratch(self.head_dim, pairs=False)

    def key_layout(self) -> Any:
        return key_layout(self, self.laid_words, self.block, widens=True)

    def queries_of(self, b: Any, scratch: Any, q: Any, q_stride: Any, rows: Any) -> Any:
        behind = self.integer(4 * (SPAN + TILE) * self.head_dim)
        group, queries = self.integer(self.group), self.at(b, scratch, behind)

        def one(b: Any, row: Any, _: Sequence[Any]) -> Sequence[Any]:
            head = b.mul(b.urem(row, group), self.integer(self.head_bytes))
            query = self.at(b, q, b.add(b.mul(b.udiv(row, group), q_stride), head))
            self._widen(b, query, self.query_of(b, queries, row, None))
            return []

        self.loop(b, rows, 1, one, [])
        return queries

    def query_of(self, b: Any, queries: Any, row: Any, place: Any) -> Any:
        return self.at(b, queries, b.mul(row, self.integer(4 * self.head_dim)))

    def values_of(self, b: Any, values: Any, last: Any, scratch: Any) -> Any:
        def one(b: Any, key: Any, _: Sequence[Any]) -> Sequence[Any]:
            value = self.at(b, values, b.mul(key, self.integer(self.head_bytes)))
            into = self.at(b, scratch, b.mul(key, self.integer(4 * self.head_dim)))
            self._widen(b, value, into)
            return []

        self.loop(b, b.add(last, self.integer(1)), 1, one, [])
        return scratch

    def _widen(self, b: Any, head: Any, into: Any) -> None:
        """Write the bfloat16 numbers of a head as float32."""
        for part in range(0, self.head_dim, self.lanes):
            numbers = self.wide(b, self.at(b, head, self.integer(2 * part)), "bfloat16")
            self.store(b, numbers, into, self.integer(part))


class PairsCode(_HalvesCode):
    """Emits the code for pairs, and what the code for matrix units shares with it."""

    def __init__(self, head_dim: int, group: int, lanes: int, scale: float) -> None:
        super().__init__(head_dim, group, lanes, scale, size=2, laid_size=2)

    def text(self) -> str:
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.lanes}"
        self._pairs = self.declare(name, self.floats, self.floats, self.halves, self.halves)
        self._lay_values = _value_layout(self, self.head_dim, self.value_keys)
        return super().text()

    @property
    def value_keys(self) -> int:
        """The keys of a span whose values are laid out are a multiple of these."""
        return 2

    @property
    def scratch(self) -> int:
        return halves_scratch(self.head_dim, pairs=True)

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
        self.fetch_line(b, fetched, key)
        self.fetch_line(b, fetched, b.add(key, self.integer(1)))

    def products(
        self, b: Any, numbers: Sequence[Any], column: Sequence[Any], sums: Sequence[Any]
    ) -> Sequence[Any]:
        words = [b.bitcast(number, self.halves) for number in numbers]
        others = [b.bitcast(vector, self.halves) for vector in column]
        pairs = ((word, other) for word in words for other in others)
        return [b.call(self._pairs, [one, *pair]) for pair, one in zip(pairs, sums, strict=True)]


def _value_layout(a: Assembly, head_dim: int, block: int) -> Any:
    """A function `lay_values(values, last, laid)`: lay out the values up to the one numbered
    `last`, bfloat16 `[keys, head_dim]`, as `[keys / 2, head_dim, 2]`: of each dimension the numbers
    of two keys. The last key fills its block of so many keys."""
    function, b = a.begin("lay_values", a.pointer, a.i64, a.pointer)
    function.attributes.add("noinline")
    values, last, laid = function.args
    row_bytes, narrow = a.integer(2 * head_dim), a.ir.VectorType(a.ir.IntType(16), a.lanes)
    sixteen = a.ir.Constant(a.ints, [16] * a.lanes)

    def two_keys(b: Any, key: Any, _: Sequence[Any]) -> Sequence[Any]:
        numbers = [a.least(b, b.add(key, a.integer(more)), last) for more in (0, 1)]
        rows = [a.at(b, values, b.mul(number, row_bytes)) for number in numbers]
        into = a.at(b, laid, b.mul(key, row_bytes))
        for part in range(0, head_dim, a.lanes):
            low, high = (
                b.zext(b.load(a.at(b, row, a.integer(2 * part)), typ=narrow, align=2), a.ints)
                for row in rows
            )
            words = b.or_(low, b.shl(high, sixteen))
            b.store(words, a.at(b, into, a.integer(4 * part)), align=4)
        return []

    whole = b.and_(b.add(last, a.integer(block)), a.integer(-block))
    a.loop(b, whole, 2, two_keys, [])
    b.ret_void()
    return function
