"""LLVM's code of products of bfloat16 numbers by a processor's matrix units (AMX).

A block of W in oneDNN's layout, bfloat16 `[inputs / 2, outputs, 2]`, is what the units read as it
lies. The weights of a few inputs are multiplied with all rows while the nearest cache holds them. A
row's sums depend on no other row, and are added up in the same order wherever the row lies.
"""

from __future__ import annotations

from typing import Any

from asyncinfer.kernels.native.blocked_tiles_code import LINE, STREAM_AHEAD, BlockedTiles
from asyncinfer.kernels.native.matrix_registers_code import (
    COLUMNS,
    MOST_ROWS,
    ROWS,
    UNIT_NUMBERS,
    MatrixRegisters,
)

__all__ = ["MatrixUnits"]

#: Inputs whose weights are multiplied with all rows of a turn before the next ones. With two groups
#: of rows of x, the nearest cache holds them.
_DEPTH = 256
#: Lines of later weights, and of results, that are prefetched with each `UNIT_NUMBERS` inputs: in
#: `_DEPTH` inputs those of a group's results.
_LINES = MOST_ROWS * UNIT_NUMBERS // _DEPTH


class MatrixUnits:
    """Emits the products of a block of W."""

    def __init__(self, code: BlockedTiles) -> None:
        self._code = code
        self._registers = MatrixRegisters(code)
        self._few, self._many = (self._product(groups) for groups in (1, 2))

    def block(self, b: Any, weights: tuple[Any, Any], places: tuple[Any, ...], *sizes: Any) -> None:
        """Write the products with all inputs to `into`, bfloat16. `weights` are this block and the
        one that the thread multiplies next, which is prefetched; `places` those of the first row in
        x, in `kept` float32 `[rows, outputs]`, which has room for sums, and in `into`, which may be
        `kept`. `sizes`: `inputs`, bytes of a row of x, of one of `into`, and `rows`."""
        c = self._code
        inputs, x_bytes, into_bytes, rows = sizes
        whole = b.and_(rows, c.integer(-MOST_ROWS))
        rest = b.sub(rows, whole)
        strides = x_bytes, c.integer(c.sum_bytes), into_bytes
        later = [c.at(b, at, b.mul(whole, by)) for at, by in zip(places, strides, strict=True)]
        sizes = inputs, x_bytes, into_bytes
        none = c.integer(0)
        with b.if_then(b.icmp_signed(">", whole, none)):
            b.call(self._many, [*weights, *places, *sizes, whole, c.ir.Constant(c.bit, 1)])
        alone = b.icmp_signed("==", whole, none)
        with b.if_then(b.icmp_signed(">", rest, c.integer(ROWS))):
            b.call(self._many, [*weights, *later, *sizes, rest, alone])
        few = b.and_(b.icmp_signed(">", rest, none), b.icmp_signed("<=", rest, c.integer(ROWS)))
        with b.if_then(few):
            b.call(self._few, [*weights, *later, *sizes, rest, alone])

    def _product(self, groups: int) -> Any:
        """`product(w, after, x, kept, into, inputs, x_bytes, into_bytes, rows, fetches)`: what
        `block` says, for up to 16 rows with one of the `groups` of registers, and with two for 17
        to 31, or for any multiple of 32. `fetches`: prefetch what is read next."""
        c = self._code
        function, b = c.begin(f"units_{groups}", *[c.pointer] * 5, *[c.i64] * 4, c.bit)
        # A copy in each caller would take long to compile.
        function.attributes.add("noinline")
        weight, after, x, kept, into, inputs, x_bytes, into_bytes, rows, fetches = function.args
        first = c.least(b, rows, c.integer(ROWS))
        others = c.least(b, b.sub(rows, first), c.integer(ROWS))
        self._registers.configure(b, [first, others][:groups])

        def part(start: Any) -> None:
            """Add the products of `_DEPTH` inputs."""
            end = c.least(b, inputs, b.add(start, c.integer(_DEPTH)))

            def group(row: Any) -> None:
                some = c.least(b, b.sub(rows, row), c.integer(MOST_ROWS))
                strides = x_bytes, c.integer(c.sum_bytes), into_bytes
                places = [
                    c.at(b, at, b.mul(row, by))
                    for at, by in zip((x, kept, into), strides, strict=True)
                ]
                fetch = self._fetches(
                    b, (weight, after), (places[2], into_bytes), (start, end, inputs), row, fetches
                )
                for output in range(0, c.outputs, 2 * COLUMNS):
                    numbers = c.at(b, weight, c.integer(4 * output))
                    sums = c.at(b, places[1], c.integer(4 * output))
                    theirs = places[0], sums, numbers
                    self._sums(
                        b, groups, theirs, x_bytes, (start, end), fetch if not output else None
                    )
                with b.if_then(b.icmp_signed("==", end, inputs)):
                    self._rounded(b, places[1], places[2], into_bytes, some)

            c.each(b, c.integer(0), rows, MOST_ROWS, group)

        c.each(b, c.integer(0), inputs, _DEPTH, part)
        self._registers.release(b)
        b.ret_void()
        return function

    def _sums(
        self,
        b: Any,
        groups: int,
        places: tuple[Any, ...],
        x_bytes: Any,
        part: tuple[Any, Any],
        fetch: Any,
    ) -> None:
        """Add the products of a part of the inputs to a group of rows' sums of 32 outputs."""
        c, units = self._code, self._registers
        x, sums, weight = places
        start, end = part
        of_groups = range(0, ROWS * groups, ROWS)
        kept = [c.at(b, sums, c.integer(c.sum_bytes * row)) for row in of_groups]
        theirs = [c.at(b, x, b.mul(x_bytes, c.integer(row))) for row in of_groups]
        is_first = b.icmp_signed("==", start, c.integer(0))
        with b.if_else(is_first) as (new, old):
            with new:
                units.clear(b, groups)
            with old:
                units.read(b, kept, c.integer(c.sum_bytes))

        def some(at: Any) -> None:
            if fetch is not None:
                fetch(at)
            numbers = c.at(b, weight, b.mul(at, c.integer(c.input_bytes)))
            left = [c.at(b, row, b.mul(at, c.integer(2))) for row in theirs]
            units.multiply(b, left, x_bytes, numbers, c.integer(4 * c.outputs))

        c.each(b, start, end, UNIT_NUMBERS, some)
        units.write(b, kept, c.integer(c.sum_bytes))

    def _rounded(self, b: Any, sums: Any, into: Any, into_bytes: Any, rows: Any) -> None:
        """Write the sums of so many rows to `into`, as bfloat16."""
        c = self._code
        parts = range(0, c.outputs, c.lanes)

        def row(number: Any) -> None:
            own = c.at(b, sums, b.mul(number, c.integer(c.sum_bytes)))
            place = c.at(b, into, b.mul(number, into_bytes))
            # They may be written over the sums.
            halves = [c.rounded(b, c.load(b, own, c.integer(at)), at_once=True) for at in parts]
            for at, half in zip(parts, halves, strict=True):
                b.store(half, c.at(b, place, c.integer(2 * at)), align=2)

        c.each(b, c.integer(0), rows, 1, row)

    def _fetches(
        self,
        b: Any,
        weights: tuple[Any, Any],
        results: tuple[Any, Any],
        inputs: tuple[Any, Any, Any],
        row: Any,
        fetches: Any,
    ) -> Any:
        """A function that emits, for the inputs from `at` on, the prefetches of a group of rows:
        where a turn begins of the weights that it reads next, later of a share of those of the next
        part, and of the lines that its results go to."""
        c = self._code
        (weight, after), (into, into_bytes), (start, end, whole) = weights, results, inputs
        begins = b.and_(fetches, b.icmp_signed("==", row, c.integer(0)))
        goes_on = b.and_(fetches, b.icmp_signed(">", row, c.integer(0)))
        ends = b.icmp_signed("==", end, whole)
        block = b.mul(whole, c.integer(c.input_bytes))
        # Of the groups after the first.
        share = b.mul(
            b.sub(row, c.integer(MOST_ROWS)),
            c.integer(LINE * _LINES * _DEPTH // UNIT_NUMBERS // MOST_ROWS),
        )

        def lines(ahead: Any, count: int, every: int) -> None:
            """Of this block, or of the next where it ends before."""
            beyond = b.sub(ahead, block)
            inside = b.icmp_signed("<", beyond, c.integer(0))
            place = c.at(b, b.select(inside, weight, after), b.select(inside, ahead, beyond))
            for line in range(0, count, every):
                c.fetch(b, c.at(b, place, c.integer(line)), near=every == c.fetch_every)

        def fetch(at: Any) -> None:
            on = b.sub(at, start)
            with b.if_then(begins):
                ahead = b.add(b.mul(at, c.integer(c.input_bytes)), c.integer(STREAM_AHEAD))
                lines(ahead, UNIT_NUMBERS * c.input_bytes, c.fetch_every)
            with b.if_then(goes_on):
                of_part = b.mul(b.add(start, c.integer(_DEPTH)), c.integer(c.input_bytes))
                step = b.mul(on, c.integer(LINE * _LINES // UNIT_NUMBERS))
                lines(b.add(of_part, b.add(share, step)), LINE * _LINES, LINE)
            with b.if_then(ends):
                for number in range(_LINES):
                    line = b.add(b.mul(on, c.integer(_LINES)), c.integer(number * UNIT_NUMBERS))
                    line = b.lshr(line, c.integer(UNIT_NUMBERS.bit_length() - 1))
                    c.fetch(b, c.at(b, into, b.mul(line, into_bytes)), writes=True)

        return fetch
