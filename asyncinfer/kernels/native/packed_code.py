"""LLVM's code of products with packed weights.

A row of a weight is a sequence of blocks. A block holds the numbers of a group, then the group's
scale, and its offset if it has one; or it is a block of a GGUF file. Four rows of W are multiplied
by several rows of x at once, in registers. Where x has more rows, the four rows of W are unpacked
once, into scratch memory that the nearest cache holds.

The order of additions in an output depends on the number of inputs alone, so neither other rows of
x nor the number of threads change a bit of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from asyncinfer.kernels.native.host import Host
from asyncinfer.kernels.native.packed_blocks import Blocks, Layout

__all__ = ["FIELDS", "ROWS", "packed_code"]

#: The arguments of a call, 64 bits each: addresses, sizes, and the counters that threads share.
FIELDS = (
    *("blocks", "x", "y", "scratch", "outputs", "rows", "groups", "chunk", "factor"),
    *("threads", "started", "next"),
)

#: Rows of W that are multiplied at once.
ROWS = 4
#: The most numbers of an unpacked row for which the loop is unrolled.
_UNROLLED = 32
#: A loop's body: `(builder, index, values)` to the values after it.
_Body = Callable[[Any, Any, Sequence[Any]], Sequence[Any]]


def packed_code(layout: Layout, host: Host) -> str:
    """The assembly of `product(task)`, where `task` points to `FIELDS`, as int64, which writes
    `factor * x W^T` to `y`. `factor` is float32, and `next` and `started` are 0.

    `groups` are those of a row, or its inputs where these are one group. `x` float32 `[rows, in]`,
    `y` float32 `[rows, outputs]`. Threads take `chunk` rows of W at a time. `scratch` holds `ROWS`
    unpacked rows for each thread, and may be null for no more rows of x than `host.batch`.

    There are two more functions of such a task, `floats` and `halves`, which write W
    itself to `y`, float32 or bfloat16 `[outputs, in]`, without the factor. Raises `RuntimeError`
    where the processor has no instruction for a code.
    """
    return _PackedCode(layout, host).text()


class _PackedCode(Blocks):
    def __init__(self, layout: Layout, host: Host) -> None:
        super().__init__(layout, host, FIELDS)
        self._batch, self._rounds = host.batch, host.rounds

    def text(self) -> str:
        self._unpack = self._unpacking(4)
        # Rows of W beyond a multiple of `ROWS` are multiplied one by one. Models hardly ever have
        # such rows.
        self._tiles = {
            (rows, batch, packed): self._tile(rows, batch, packed)
            for rows in (1, ROWS)
            for batch in range(1, self._batch + 1 if rows == ROWS else 2)
            for packed in (True, False)
        }
        self.on_task("product", self._work())
        self.on_task("floats", self._writing(self._unpack, 4))
        self.on_task("halves", self._writing(self._unpacking(2), 2))
        return str(self.module)

    def _work(self) -> Any:
        """`work(task)`: multiply one chunk of W's rows after the other until none is left."""
        function, b = self.begin("work", self.pointer)
        (task,) = function.args
        blocks, x, y, scratch = (self.address(b, task, name) for name in FIELDS[:4])
        outputs, rows, groups = (self.field(b, task, name) for name in FIELDS[4:7])
        factor = b.load(self.place(b, task, "factor"), typ=self.float, align=4)
        taken, floats = self.row_bytes(b, groups)
        place = self.counted(b, task, "started")
        scratch = self.at(b, scratch, b.mul(place, b.mul(floats, self.integer(ROWS))))
        many = b.icmp_signed(">", rows, self.integer(self._batch))
        first, last, fetch = self._next_chunk(b, task)
        wide = b.mul(outputs, self.integer(4))

        def multiply(b: Any, count: int, weight: Any, stride: Any, out: Any, packed: bool) -> None:
            batch = self._batch if count == ROWS else 1
            whole = b.sub(rows, b.srem(rows, self.integer(batch)))

            def at(size: int, row: Any) -> None:
                theirs = self.at(b, x, b.mul(row, floats))
                into = self.at(b, out, b.mul(row, wide))
                b.call(
                    self._tiles[count, size, packed],
                    [weight, stride, groups, theirs, floats, into, wide, factor],
                )

            self.each(b, self.integer(0), whole, batch, lambda row: at(batch, row))
            left = b.sub(rows, whole)
            for size in range(1, batch):
                with b.if_then(b.icmp_signed("==", left, self.integer(size))):
                    at(size, whole)

        def some(count: int, row: Any) -> None:
            weight = self.at(b, blocks, b.mul(row, taken))
            out = self.at(b, y, b.mul(row, self.integer(4)))
            with b.if_else(many) as (unpacked, packed):
                with unpacked:
                    for each in range(count):
                        start = self.at(b, weight, b.mul(taken, self.integer(each)))
                        into = self.at(b, scratch, b.mul(floats, self.integer(each)))
                        b.call(self._unpack, [start, groups, into])
                    multiply(b, count, scratch, floats, out, False)
                with packed:
                    multiply(b, count, weight, taken, out, True)

        whole = b.sub(last, b.srem(b.sub(last, first), self.integer(ROWS)))
        self.each(b, first, whole, ROWS, lambda row: some(ROWS, row))
        self.each(b, whole, last, 1, lambda row: some(1, row))
        b.branch(fetch)
        return function

    def _writing(self, unpack: Any, size: int) -> Any:
        """`writing(task)`: unpack one chunk of W's rows after the other into y until none is left.
        Numbers of y have `size` bytes."""
        function, b = self.begin(f"writing_{size}", self.pointer)
        (task,) = function.args
        blocks, y = (self.address(b, task, name) for name in ("blocks", "y"))
        groups = self.field(b, task, "groups")
        taken, floats = self.row_bytes(b, groups)
        wide = b.udiv(b.mul(floats, self.integer(size)), self.integer(4))
        first, last, fetch = self._next_chunk(b, task)

        def row(number: Any) -> None:
            start = self.at(b, blocks, b.mul(taken, number))
            b.call(unpack, [start, groups, self.at(b, y, b.mul(wide, number))])

        self.each(b, first, last, 1, row)
        b.branch(fetch)
        return function

    def _next_chunk(self, b: Any, task: Any) -> tuple[Any, Any, Any]:
        """Take a chunk of W's rows that no other thread has; the function returns once none is
        left. Returns the chunk's first row, its end, and the block to branch to for the next chunk.
        """
        outputs, chunk = (self.field(b, task, name) for name in ("outputs", "chunk"))
        chunks = b.sdiv(b.add(outputs, b.sub(chunk, self.integer(1))), chunk)
        index, fetch = self.next_item(b, task, chunks)
        first = b.mul(index, chunk)
        last = b.add(first, chunk)
        return first, b.select(b.icmp_signed("<", last, outputs), last, outputs), fetch

    def _tile(self, rows: int, batch: int, packed: bool) -> Any:
        """`tile(w, w_bytes, groups, x, x_bytes, y, y_bytes, factor)`: multiply `rows` rows of W by
        `batch` rows of x. Rows of each begin so many bytes apart."""
        kinds = [self.pointer, self.i64, self.i64, self.pointer, self.i64]
        kinds += [self.pointer, self.i64, self.float]
        function, b = self.begin(f"tile_{rows}_{batch}_{'packed' if packed else 'floats'}", *kinds)
        # A copy in each caller would take long to compile.
        function.attributes.add("noinline")
        weight, weight_bytes, groups, x, x_bytes, y, y_bytes, factor = function.args
        ours = [self.at(b, weight, b.mul(weight_bytes, self.integer(row))) for row in range(rows)]
        theirs = [self.at(b, x, b.mul(x_bytes, self.integer(row))) for row in range(batch)]

        def part(
            b: Any, weights: Any, inputs: Any, place: Any, end: int, ends: Any, sums: Sequence[Any]
        ) -> Sequence[Any]:
            """Add the products of `end` numbers from `place` on."""
            found = list(sums)
            for start in range(0, end, self.lanes):
                number = b.add(place, self.integer(start))
                columns = [self.load(b, each, number) for each in inputs]
                for row, each in enumerate(weights):
                    if packed:
                        numbers = self.numbers(b, each, place, start, ends[row])
                    else:
                        numbers = self.load(b, each, number)
                    for column, values in enumerate(columns):
                        at = row * batch + column
                        found[at] = b.call(self.fma, [numbers, values, found[at]])
            return found

        def group(b: Any, index: Any, sums: Sequence[Any]) -> Sequence[Any]:
            sizes = self.integer(self.layout.block), self.integer(4 * self.layout.group)
            block, floats = (b.mul(index, size) for size in sizes)
            weights = [self.at(b, each, block) for each in ours]
            inputs = [self.at(b, each, floats) for each in theirs]
            ends = [self.ends(b, each, groups) for each in weights]

            def packed_part(b: Any, place: Any, sums: Sequence[Any]) -> Sequence[Any]:
                return part(b, weights, inputs, place, self.unrolled, ends, sums)

            return self._parts(b, packed_part, sums, groups)

        def plain(b: Any, place: Any, sums: Sequence[Any]) -> Sequence[Any]:
            return part(b, ours, theirs, place, step, None, sums)

        zeros = [self.ir.Constant(self.floats, [0.0] * self.lanes)] * (rows * batch)
        step = math.gcd(self.unrolled, _UNROLLED)
        if packed:
            sums = self._groups(b, groups, group, zeros)
        else:
            count = b.mul(groups, self.integer(self.layout.group or 1))
            sums = self.loop(b, count, step, plain, zeros)
        for column in range(batch):
            out = self.at(b, y, b.mul(y_bytes, self.integer(column)))
            for row in range(rows):
                total = self.total(b, sums[row * batch + column])
                into = self.at(b, out, self.integer(4 * row))
                b.store(b.fmul(total, factor), into, align=4)
        b.ret_void()
        return function

    def _unpacking(self, size: int) -> Any:
        """`unpack(blocks, groups, floats)`: write a row's numbers, of `size` bytes, to `floats`."""
        function, b = self.begin(f"unpack_{size}", self.pointer, self.i64, self.pointer)
        blocks, groups, floats = function.args
        # Without this, LLVM would read scales again after each store, which might have changed
        # them.
        floats.add_attribute("noalias")

        def group(b: Any, index: Any, sums: Sequence[Any]) -> Sequence[Any]:
            block = self.at(b, blocks, b.mul(index, self.integer(self.layout.block)))
            out = self.at(b, floats, b.mul(index, self.integer(size * self.layout.group)))
            ends = self.ends(b, block, groups)

            def part(b: Any, place: Any, sums: Sequence[Any]) -> Sequence[Any]:
                for start in range(0, self.unrolled, self.lanes):
                    number = b.add(place, self.integer(start))
                    into = self.at(b, out, b.mul(number, self.integer(size)))
                    numbers = self.numbers(b, block, place, start, ends)
                    if size == 2:
                        numbers = self.rounded(b, numbers, at_once=self._rounds)
                    b.store(numbers, into, align=size)
                return sums

            return self._parts(b, part, sums, groups)

        self._groups(b, groups, group, [])
        b.ret_void()
        return function

    def _groups(self, b: Any, groups: Any, group: _Body, values: Sequence[Any]) -> Sequence[Any]:
        """Emit `group` for each group of a row; returns the values after the last."""
        if not self.layout.group:
            return group(b, self.integer(0), values)
        return self.loop(b, groups, 1, group, values)

    def _parts(self, b: Any, part: _Body, values: Sequence[Any], groups: Any) -> Sequence[Any]:
        """Emit `part` for each unrolled part of a group; returns the values after the last."""
        if self.unrolled == self.layout.group:
            return part(b, self.integer(0), values)
        end = self.integer(self.layout.group) if self.layout.group else groups
        return self.loop(b, end, self.unrolled, part, values)
