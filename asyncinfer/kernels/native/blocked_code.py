"""LLVM's code of products of few tokens with a weight as oneDNN lays it out.

Sixty-four outputs lie side by side for each input, so that a vector has outputs and not inputs:
nothing has to be summed across its lanes, and memory is read from one end to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncinfer.kernels.native.assembly import Assembly

__all__ = ["FIELDS", "MOST_ROWS", "OUTPUTS", "blocked_code", "padded_inputs"]

#: What a call is told, each 64 bits: addresses, sizes, and last the counter that threads share.
FIELDS = ("weight", "x", "y", "outputs", "inputs", "block", "rows", "threads", "next")
#: Outputs of a block.
OUTPUTS = 64
#: Rows of x: as many as registers hold sums for.
MOST_ROWS = 6

#: Bytes that are fetched ahead, into the second cache.
_AHEAD = 8192
_LINE = 64


def padded_inputs(dtype: str, inputs: int) -> int:
    """Inputs that a block has room for."""
    step = 16 if dtype == "float32" else 32
    return -(-inputs // step) * step


def blocked_code(dtype: str, lanes: int) -> str:
    """The assembly of `product(task)`, where `task` points to `FIELDS`, as int64.

    It writes `x W^T` to `y` float32 `[rows, outputs]` for at most `MOST_ROWS` rows of `x` float32
    `[rows, inputs]`. W is of `dtype`, in blocks of `OUTPUTS` outputs and `block` bytes: float32
    `[inputs, OUTPUTS]`, bfloat16 `[inputs / 2, OUTPUTS, 2]`. `outputs` is a multiple of `OUTPUTS`,
    `inputs` of 2. `next` is 0.
    """
    return _Code(dtype, lanes).text()


class _Code(Assembly):
    def __init__(self, dtype: str, lanes: int) -> None:
        super().__init__("blocked", lanes, FIELDS)
        self._halves = dtype == "bfloat16"

    def text(self) -> str:
        work = self._work([self._tile(rows) for rows in range(1, MOST_ROWS + 1)])
        self.on_task("product", work)
        return str(self.module)

    def _work(self, tiles: Sequence[Any]) -> Any:
        """`work(task)`: multiply blocks of W until there are no more."""
        function, b = self.begin("work", self.pointer)
        (task,) = function.args
        weight, x, y = (self.address(b, task, name) for name in FIELDS[:3])
        outputs, inputs, block, rows = (self.field(b, task, name) for name in FIELDS[3:7])
        fetch, run, end = (b.append_basic_block() for _ in range(3))
        b.branch(fetch)
        b.position_at_end(fetch)
        index = self.counted(b, task, "next")
        first = b.mul(index, self.integer(OUTPUTS))
        b.cbranch(b.icmp_signed("<", first, outputs), run, end)
        b.position_at_end(end)
        b.ret_void()
        b.position_at_end(run)
        ours = self.at(b, weight, b.mul(index, block))
        into = self.at(b, y, b.mul(first, self.integer(4)))
        for count, tile in enumerate(tiles, 1):
            with b.if_then(b.icmp_signed("==", rows, self.integer(count))):
                b.call(tile, [ours, x, into, inputs, b.mul(outputs, self.integer(4))])
        b.branch(fetch)
        return function

    def _tile(self, rows: int) -> Any:
        """`tile(w, x, y, inputs, y bytes)`: a block of W with `rows` of x."""
        kinds = [self.pointer] * 3 + [self.i64] * 2
        function, b = self.begin(f"tile_{rows}", *kinds)
        # A copy in each caller would take long to compile.
        function.attributes.add("noinline")
        weight, x, y, inputs, y_bytes = function.args
        x_bytes = b.mul(inputs, self.integer(4))
        theirs = [self.at(b, x, b.mul(x_bytes, self.integer(row))) for row in range(rows)]
        vectors = range(0, OUTPUTS, self.lanes)
        zeros = self.ir.Constant(self.floats, [0.0] * self.lanes)

        def pair(b: Any, first: Any, sums: Sequence[Any]) -> Sequence[Any]:
            """Add the products of two inputs."""
            found = list(sums)
            size = OUTPUTS * (2 if self._halves else 4)
            start = self.at(b, weight, b.mul(first, self.integer(size)))
            for line in range(0, 2 * size, _LINE):
                self.fetch(b, self.at(b, start, self.integer(_AHEAD + line)), near=False)
            columns = self._columns(b, start, vectors)
            for which, column in enumerate(columns):
                place = b.mul(b.add(first, self.integer(which)), self.integer(4))
                for row, each in enumerate(theirs):
                    number = b.load(self.at(b, each, place), typ=self.float, align=4)
                    value = self.everywhere(b, number)
                    for index, numbers in enumerate(column):
                        at = row * len(vectors) + index
                        found[at] = b.call(self.fma, [numbers, value, found[at]])
            return found

        sums = list(self.loop(b, inputs, 2, pair, [zeros] * rows * len(vectors)))
        for row in range(rows):
            out = self.at(b, y, b.mul(y_bytes, self.integer(row)))
            for start in vectors:
                b.store(sums.pop(0), self.at(b, out, self.integer(4 * start)), align=4)
        b.ret_void()
        return function

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
