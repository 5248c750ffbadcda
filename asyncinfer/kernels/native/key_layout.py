"""LLVM's code that lays out keys in blocks, whose vectors hold the same dimension of several keys,
and that fetches the next ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from asyncinfer.kernels.native.assembly import Assembly

__all__ = ["key_layout", "span_lines"]

#: Bytes of a line of a cache.
_LINE: Final = 64


def key_layout(a: Assembly, words: int, block: int, *, widens: bool = False) -> Any:
    """A function `lay(keys, step, last, laid)`: lay out the keys up to the one numbered `last`,
    which are `step` bytes apart, as words of 32 bits `[blocks, words, block]`: float32 numbers, or
    pairs of bfloat16 numbers. The last key fills its block. `words` and `block` are multiples of
    the vectors' numbers. `widens`: bfloat16 numbers become float32."""

    def some_numbers(b: Any, key: Any, number: Any) -> Any:
        """A vector of a key's words from this one on."""
        if not widens:
            return a.load(b, key, number)
        return a.wide(b, a.at(b, key, b.mul(number, a.integer(2))), "bfloat16")

    function, b = a.begin("lay", a.pointer, a.i64, a.i64, a.pointer)
    function.attributes.add("noinline")
    keys, step, last, laid = function.args
    keys_of_block = a.integer(block)

    def some_keys(b: Any, key: Any, _: Sequence[Any]) -> Sequence[Any]:
        rows = []
        for lane in range(a.lanes):
            this = b.add(key, a.integer(lane))
            this = b.select(b.icmp_signed("<", this, last), this, last)
            rows.append(a.at(b, keys, b.mul(this, step)))
        inside = b.srem(key, keys_of_block)
        begin = b.mul(b.sub(key, inside), a.integer(words))
        into = a.at(b, laid, b.mul(b.add(begin, inside), a.integer(4)))

        def numbers(b: Any, number: Any, _: Sequence[Any]) -> Sequence[Any]:
            columns = _transposed(a, b, [some_numbers(b, row, number) for row in rows])
            for index, column in enumerate(columns):
                a.store(b, column, into, b.mul(b.add(number, a.integer(index)), keys_of_block))
            return []

        a.loop(b, a.integer(words), a.lanes, numbers, [])
        return []

    whole = b.mul(b.add(b.sdiv(last, keys_of_block), a.integer(1)), keys_of_block)
    a.loop(b, whole, a.lanes, some_keys, [])
    b.ret_void()
    return function


def span_lines(
    a: Assembly, b: Any, index: Any, ahead: Sequence[Any], keys_step: Any, head_bytes: int
) -> list[Any]:
    """What the rows numbered `index` fetch of the next span, one line at each key: the first line's
    address, and the bytes to that of the next key. `ahead` are the next span's keys and values. The
    first rows fetch the keys, a line of each, others the values."""
    count = a.integer(max(1, head_bytes // _LINE))
    of_keys = b.icmp_signed("<", index, count)
    number = b.select(of_keys, index, b.sub(index, count))
    place, step = b.select(of_keys, *ahead), b.select(of_keys, keys_step, a.integer(head_bytes))
    return [a.at(b, place, b.mul(number, a.integer(_LINE))), step]


def _transposed(a: Assembly, b: Any, rows: Sequence[Any]) -> list[Any]:
    """The columns of as many vectors as a vector has numbers."""
    columns, lanes = list(rows), a.lanes
    for bit in (1 << power for power in range(lanes.bit_length() - 1)):
        # Swaps this bit of a number's row with that of its lane.
        low = [lane if not lane & bit else lanes + lane - bit for lane in range(lanes)]
        high = [lane + bit if not lane & bit else lanes + lane for lane in range(lanes)]
        for row in (row for row in range(lanes) if not row & bit):
            pair = columns[row], columns[row + bit]
            columns[row] = a.shuffle(b, pair[0], low, pair[1])
            columns[row + bit] = a.shuffle(b, pair[0], high, pair[1])
    return columns
