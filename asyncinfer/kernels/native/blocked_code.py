"""LLVM's code of products with a weight in oneDNN's layout.

For each input the layout has the weights of 64 outputs side by side. A vector therefore holds
outputs: nothing is summed across its lanes, and memory is read sequentially. The weights of a few
inputs are multiplied with all rows while a near cache holds them. Meanwhile the weights of the next
inputs are prefetched. Sums of rows lie side by side until they are whole: in the result they may be
so many bytes apart that a cache has the same few places for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncinfer.kernels.native.assembly import Assembly

__all__ = ["FIELDS", "OUTPUTS", "TILE_ROWS", "blocked_code", "padded_inputs"]

#: The arguments of a call, 64 bits each: addresses, sizes, and the counter that threads share.
FIELDS = ("weight", "x", "y", "outputs", "inputs", "block", "rows", "threads", "next")
#: Outputs of a block.
OUTPUTS = 64
#: Rows of x in a tile: as many as there are registers for their sums.
TILE_ROWS = 6

#: Rows of x that a thread takes at a time: a multiple of a tile's, and few enough that threads end
#: at about the same time.
_TURN = 96
#: Inputs after which sums go to memory, a multiple of 4; twice as many where one instruction
#: multiplies two, which takes as long.
_DEPTH = 64
#: Bytes of a row's sums.
_SUM_BYTES = 4 * OUTPUTS
#: Bytes of a line of a cache.
_LINE = 64


def padded_inputs(dtype: str, inputs: int) -> int:
    """Inputs that a block has room for."""
    step = 16 if dtype == "float32" else 32
    return -(-inputs // step) * step


def blocked_code(dtype: str, lanes: int, *, pairs: bool) -> str:
    """The assembly of `product(task)`, where `task` points to `FIELDS`, as int64.

    It writes `x W^T` to `y` float32 `[rows, outputs]` for `x` float32 `[rows, inputs]`. W is of
    `dtype`, in blocks of `OUTPUTS` outputs and `block` bytes: float32 `[inputs, OUTPUTS]`, bfloat16
    `[inputs / 2, OUTPUTS, 2]`. `outputs` is a multiple of `OUTPUTS`, `inputs` of 4. `next` is 0.

    With `pairs`, all of them are bfloat16, and one instruction multiplies two inputs (`vdpbf16ps`).
    """
    return _BlockedCode(dtype, lanes, pairs).text()


class _BlockedCode(Assembly):
    def __init__(self, dtype: str, lanes: int, pairs: bool) -> None:
        super().__init__("blocked", lanes, FIELDS)
        self._halves, self._pairs = dtype == "bfloat16", pairs
        #: Bytes of a number of x and of y.
        self._x_bytes = 2 if pairs else 4
        if pairs:
            kinds = [self.floats, self.halves, self.halves]
            name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}"
            self._product = self.declare(name, self.floats, *kinds)
        self._depth = 2 * _DEPTH if pairs else _DEPTH
        #: Bytes of one input's numbers in a block.
        self._input_bytes = OUTPUTS * (2 if self._halves else 4)

    def text(self) -> str:
        work = self._work([self._tile(rows) for rows in range(1, TILE_ROWS + 1)])
        self.on_task("product", work)
        return str(self.module)

    def _work(self, tiles: Sequence[Any]) -> Any:
        """`work(task)`: multiply a block of W by rows of x, then the next, until none is left."""
        function, b = self.begin("work", self.pointer)
        (task,) = function.args
        # A thread's sums `[_TURN, OUTPUTS]`.
        kept = b.alloca(self.ir.ArrayType(self.byte, _TURN * _SUM_BYTES))
        kept.align = _LINE
        weight, x, y = (self.address(b, task, name) for name in FIELDS[:3])
        outputs, inputs, block, rows = (self.field(b, task, name) for name in FIELDS[3:7])
        turns = b.sdiv(b.add(rows, self.integer(_TURN - 1)), self.integer(_TURN))
        blocks = b.sdiv(outputs, self.integer(OUTPUTS))
        units = b.mul(blocks, turns)
        started = self.counted(b, task, "next")
        before = b.block
        fetch, run, end = (b.append_basic_block() for _ in range(3))
        b.branch(fetch)
        b.position_at_end(fetch)
        index = b.phi(self.i64)
        index.add_incoming(started, before)
        b.cbranch(b.icmp_signed("<", index, units), run, end)
        b.position_at_end(end)
        b.ret_void()
        b.position_at_end(run)
        # The next block is chosen now, so that it can be prefetched.
        following = self.counted(b, task, "next")
        last = b.icmp_signed(">=", following, units)
        after = b.srem(b.select(last, index, following), blocks)
        column, turn = b.srem(index, blocks), b.sdiv(index, blocks)
        own, coming = (self.at(b, weight, b.mul(each, block)) for each in (column, after))
        first = b.mul(turn, self.integer(_TURN))
        count = self._least(b, self.integer(_TURN), b.sub(rows, first))
        x_bytes = b.mul(inputs, self.integer(self._x_bytes))
        y_bytes = b.mul(outputs, self.integer(self._x_bytes))
        into = self.at(b, y, b.mul(column, self.integer(OUTPUTS * self._x_bytes)))

        def some(start: Any) -> None:
            """Add the products of `self._depth` inputs."""
            depth = self._least(b, self.integer(self._depth), b.sub(inputs, start))
            numbers = self.at(b, own, b.mul(start, self.integer(self._input_bytes)))
            more = b.icmp_signed("<", b.add(start, self.integer(self._depth)), inputs)
            on = self.at(b, numbers, self.integer(self._depth * self._input_bytes))
            ahead = b.select(more, on, coming)
            columns = self.at(b, x, b.mul(start, self.integer(self._x_bytes)))
            # Sums become bfloat16 when all are whole.
            again = self.ir.Constant(self.bit, 1) if self._pairs else more
            bytes_of = b.select(again, self.integer(_SUM_BYTES), y_bytes)

            def group(row: Any) -> None:
                left = b.sub(count, row)
                number = b.add(first, row)
                old = self.at(b, kept, b.mul(row, self.integer(_SUM_BYTES)))
                places = (
                    self.at(b, columns, b.mul(number, x_bytes)),
                    old,
                    b.select(again, old, self.at(b, into, b.mul(number, y_bytes))),
                )
                several = self._least(b, self.integer(TILE_ROWS), left)
                for size, tile in enumerate(tiles, 1):
                    with b.if_then(b.icmp_signed("==", several, self.integer(size))):
                        b.call(tile, [numbers, ahead, *places, depth, x_bytes, bytes_of, start])

            self.each(b, self.integer(0), count, TILE_ROWS, group)

        self.each(b, self.integer(0), inputs, self._depth, some)
        if self._pairs:

            def narrow(row: Any) -> None:
                sums = self.at(b, kept, b.mul(row, self.integer(_SUM_BYTES)))
                place = self.at(b, into, b.mul(b.add(first, row), y_bytes))
                for at in range(0, OUTPUTS, self.lanes):
                    halves = self.rounded(b, self.load(b, sums, self.integer(at)), at_once=True)
                    b.store(halves, self.at(b, place, self.integer(2 * at)), align=2)

            self.each(b, self.integer(0), count, 1, narrow)
        index.add_incoming(following, b.block)
        b.branch(fetch)
        return function

    def _least(self, b: Any, one: Any, other: Any) -> Any:
        return b.select(b.icmp_signed("<", one, other), one, other)

    def _tile(self, rows: int) -> Any:
        """`tile(w, ahead, x, old, y, inputs, x_bytes, y_bytes, before)`: multiply `inputs` of a
        block of W by `rows` rows of x, add `old`, the sums of the `before` inputs before, and write
        the sums to y. The function prefetches as many bytes of `ahead` as it reads of `w`."""
        kinds = [self.pointer] * 5 + [self.i64] * 4
        function, b = self.begin(f"tile_{rows}", *kinds)
        # A copy in each caller would take long to compile.
        function.attributes.add("noinline")
        weight, ahead, x, old, y, inputs, x_bytes, y_bytes, before = function.args
        theirs = [self.at(b, x, b.mul(x_bytes, self.integer(row))) for row in range(rows)]
        kept = [self.at(b, old, self.integer(_SUM_BYTES * row)) for row in range(rows)]
        into = [self.at(b, y, b.mul(y_bytes, self.integer(row))) for row in range(rows)]
        new = b.icmp_signed("==", before, self.integer(0))
        width = self._width(rows)
        vectors = range(0, width, self.lanes)

        def part(start: Any) -> None:
            """Compute `width` outputs from `start` on."""
            # Two inputs of a bfloat16 weight lie side by side.
            ours = self.at(b, weight, b.mul(start, self.integer(4)))
            # Each part prefetches as much as it reads.
            share = b.mul(start, b.mul(inputs, self.integer(self._input_bytes // OUTPUTS)))
            coming = self.at(b, ahead, share)

            def pair(b: Any, first: Any, sums: Sequence[Any]) -> Sequence[Any]:
                """Add the products of two inputs."""
                found = list(sums)
                read = 2 * width * self._input_bytes // OUTPUTS
                for line in range(0, read, _LINE):
                    on = b.mul(first, self.integer(read // 2))
                    self.fetch(
                        b, self.at(b, self.at(b, coming, on), self.integer(line)), near=False
                    )
                numbers = self.at(b, ours, b.mul(first, self.integer(self._input_bytes)))
                if self._pairs:
                    return self._both(b, numbers, vectors, theirs, first, found)
                for which, column in enumerate(self._columns(b, numbers, vectors)):
                    at = b.mul(b.add(first, self.integer(which)), self.integer(4))
                    for row, each in enumerate(theirs):
                        number = b.load(self.at(b, each, at), typ=self.float, align=4)
                        value = self.everywhere(b, number)
                        for index, vector in enumerate(column):
                            sum_of = row * len(vectors) + index
                            found[sum_of] = b.call(self.fma, [vector, value, found[sum_of]])
                return found

            def pairs(b: Any, first: Any, sums: Sequence[Any]) -> Sequence[Any]:
                """Add the products of four inputs. A branch for each two takes 1 to 4 % longer."""
                return pair(b, b.add(first, self.integer(2)), pair(b, first, sums))

            places = [b.add(start, self.integer(vector)) for vector in vectors]
            before = [self.load(b, row, place) for row in kept for place in places]
            sums = [b.select(new, self.all(0.0), each) for each in before]
            found = iter(self.loop(b, inputs, 4, pairs, sums))
            for row in into:
                for place in places:
                    self.store(b, next(found), row, place)

        self.each(b, self.integer(0), self.integer(OUTPUTS), width, part)
        b.ret_void()
        return function

    def _both(
        self,
        b: Any,
        start: Any,
        vectors: range,
        theirs: Sequence[Any],
        first: Any,
        sums: list[Any],
    ) -> list[Any]:
        """Add the products of two inputs, which lie side by side in W and in x, to each row's
        `sums`."""
        places = [self.at(b, start, self.integer(4 * at)) for at in vectors]
        columns = [b.load(place, typ=self.halves, align=4) for place in places]
        at = b.mul(first, self.integer(2))
        for row, each in enumerate(theirs):
            pair = b.load(self.at(b, each, at), typ=self.i32, align=4)
            values = b.bitcast(self.everywhere(b, pair), self.halves)
            for index, column in enumerate(columns):
                sum_of = row * len(vectors) + index
                sums[sum_of] = b.call(self._product, [sums[sum_of], column, values])
        return sums

    def _width(self, rows: int) -> int:
        """Outputs that a tile of so many rows has sums for in registers."""
        sums = 4 * TILE_ROWS if self.lanes == 16 else 2 * TILE_ROWS
        width = OUTPUTS
        while rows * width > sums * self.lanes:
            width //= 2
        return width

    def _columns(self, b: Any, start: Any, vectors: range) -> list[list[Any]]:
        """The numbers of two inputs for all outputs of a block, as vectors of floats."""
        if not self._halves:
            return [
                [
                    b.load(
                        self.at(b, start, self.integer(4 * (which * OUTPUTS + at))),
                        typ=self.floats,
                        align=4,
                    )
                    for at in vectors
                ]
                for which in range(2)
            ]
        both = [
            b.load(self.at(b, start, self.integer(4 * at)), typ=self.ints, align=4)
            for at in vectors
        ]
        # A bfloat16 number is the higher half of a float32 one.
        shift = self.ir.Constant(self.ints, [16] * self.lanes)
        mask = self.ir.Constant(self.ints, [-(1 << 16)] * self.lanes)
        return [
            [b.bitcast(b.shl(bits, shift), self.floats) for bits in both],
            [b.bitcast(b.and_(bits, mask), self.floats) for bits in both],
        ]
