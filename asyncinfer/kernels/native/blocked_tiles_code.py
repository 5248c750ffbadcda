"""LLVM's code of a tile of a product: some inputs of a block of W, and a few rows of x.

For each input a block has the weights of 64 or 32 outputs side by side. A vector therefore holds
outputs: nothing is summed across its lanes, and memory is read sequentially. Meanwhile the weights
of the next inputs are prefetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal

from asyncinfer.kernels.native.assembly import Assembly

__all__ = ["LINE", "STREAM_AHEAD", "BlockedTiles", "Method", "tile_rows"]

#: How numbers are multiplied. "floats": all are float32. With the others they are bfloat16.
#: "widened": they become float32, of x a few inputs at a time. "pairs": an instruction multiplies
#: two inputs (`vdpbf16ps`). "units": matrix units do (AMX).
Method = Literal["floats", "widened", "pairs", "units"]

#: Rows of x in a tile: as many as there are registers for their sums; where vectors are short and
#: W is widened, which takes registers of its own.
_ROWS, _WIDENED_ROWS = 6, 5
#: Bytes of a line of a cache.
LINE = 64
#: Inputs whose products a tile's loop adds at a time.
_TOGETHER = 4
#: Where a processor reads ahead by itself, fewer prefetches keep it reading for a few rows. On two
#: cores of an Intel Xeon with AMX, weights came in at 18 GB/s so, and at 15 with one for each line.
_STREAM_EVERY = 256
#: How many bytes ahead it prefetches there.
STREAM_AHEAD = 4 << 10


def tile_rows(method: Method, lanes: int) -> int:
    """The most rows of x in a tile."""
    return _WIDENED_ROWS if method == "widened" and lanes == 8 else _ROWS


class BlockedTiles(Assembly):
    """Emits the code of tiles."""

    def __init__(
        self,
        dtype: str,
        lanes: int,
        outputs: int,
        fields: Sequence[str],
        *,
        method: Method,
        streams: bool,
    ) -> None:
        """`outputs`: of a block; `streams`: the processor reads ahead by itself, up to the end of a
        page."""
        super().__init__("blocked", lanes, fields)
        self._halves, self._pairs = dtype == "bfloat16", method == "pairs"
        #: The most rows of a tile.
        self.tile_rows = tile_rows(method, lanes)
        if self._pairs:
            kinds = [self.floats, self.halves, self.halves]
            name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}"
            self._product = self.declare(name, self.floats, *kinds)
        self.outputs = outputs
        #: Bytes of one input's numbers in a block.
        self.input_bytes = outputs * (2 if self._halves else 4)
        #: Bytes between two lines that are prefetched.
        self.fetch_every = _STREAM_EVERY if streams else LINE
        #: Bytes of a row's sums.
        self.sum_bytes = 4 * outputs

    def tile(self, rows: int) -> Any:
        """`tile(w, ahead, x, old, y, inputs, x_bytes, y_bytes, before, halvings)`: multiply
        `inputs` of a block of W by `rows` rows of x, add `old`, the sums of the `before` inputs
        before, and write the sums to y. The function prefetches as much of `ahead` as it reads of
        `w`, halved so often, at most `most_halvings` times. Tiles of other rows prefetch the rest:
        where each prefetched all, 1,024 rows took 1.12 times as long."""
        kinds = [self.pointer] * 5 + [self.i64] * 5
        function, b = self.begin(f"tile_{rows}", *kinds)
        # A copy in each caller would take long to compile.
        function.attributes.add("noinline")
        weight, ahead, x, old, y, inputs, x_bytes, y_bytes, before, halvings = function.args
        theirs = [self.at(b, x, b.mul(x_bytes, self.integer(row))) for row in range(rows)]
        kept = [self.at(b, old, self.integer(self.sum_bytes * row)) for row in range(rows)]
        into = [self.at(b, y, b.mul(y_bytes, self.integer(row))) for row in range(rows)]
        new = b.icmp_signed("==", before, self.integer(0))
        width = self._width(rows)
        vectors = range(0, width, self.lanes)

        def part(start: Any) -> None:
            """Compute `width` outputs from `start` on."""
            # Two inputs of a bfloat16 weight lie side by side.
            ours = self.at(b, weight, b.mul(start, self.integer(4)))
            # Each part prefetches as much as it reads, halved.
            share = b.mul(start, b.mul(inputs, self.integer(self.input_bytes // self.outputs)))
            coming = self.at(b, ahead, b.lshr(share, halvings))

            def prefetch(b: Any, first: Any) -> None:
                """Prefetch what is due while the inputs from `first` on are multiplied."""
                read = width * self.input_bytes // self.outputs
                place = b.lshr(b.mul(first, self.integer(read)), halvings)
                place = self.at(b, coming, place)
                lines = range(0, _TOGETHER * read, LINE)
                if self.fetch_every == LINE:
                    self._fetch_halved(b, place, lines, halvings)
                    return
                with b.if_else(b.icmp_signed("==", halvings, self.integer(0))) as (all_, halved):
                    with all_:
                        for line in range(0, _TOGETHER * read, self.fetch_every):
                            self.fetch(b, self.at(b, place, self.integer(line)), near=False)
                    with halved:
                        less = b.sub(halvings, self.integer(1))
                        self._fetch_halved(b, place, lines[: len(lines) // 2], less)

            def pair(b: Any, first: Any, sums: Sequence[Any]) -> Sequence[Any]:
                """Add the products of two inputs."""
                found = list(sums)
                numbers = self.at(b, ours, b.mul(first, self.integer(self.input_bytes)))
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
                prefetch(b, first)
                return pair(b, b.add(first, self.integer(2)), pair(b, first, sums))

            places = [b.add(start, self.integer(vector)) for vector in vectors]
            before = [self.load(b, row, place) for row in kept for place in places]
            sums = [b.select(new, self.all(0.0), each) for each in before]
            found = iter(self.loop(b, inputs, _TOGETHER, pairs, sums))
            for row in into:
                for place in places:
                    self.store(b, next(found), row, place)

        self.each(b, self.integer(0), self.integer(self.outputs), width, part)
        b.ret_void()
        return function

    def most_halvings(self) -> int:
        """How often what a tile of `tile_rows` prefetches can be halved: down to a line for
        each few inputs."""
        read = self._width(self.tile_rows) * self.input_bytes // self.outputs
        return (_TOGETHER * read // LINE).bit_length() - 1

    def _fetch_halved(self, b: Any, place: Any, lines: range, halvings: Any) -> None:
        """Prefetch these lines of a power of two, which is halved so often."""
        self.fetch(b, place, near=False)
        with ExitStack() as inside:
            for most in reversed(range(len(lines).bit_length() - 1)):
                enough = b.icmp_signed("<=", halvings, self.integer(most))
                inside.enter_context(b.if_then(enough))
                for line in lines[len(lines) >> most + 1 : len(lines) >> most]:
                    self.fetch(b, self.at(b, place, self.integer(line)), near=False)

    def wide_rows(self) -> Any:
        """`wide_rows(x, into, rows, inputs, x_bytes, into_bytes)`: write `inputs` numbers of each
        row of x, which are bfloat16, as float32."""
        function, b = self.begin("wide_rows", self.pointer, self.pointer, *[self.i64] * 4)
        x, into, rows, inputs, x_bytes, into_bytes = function.args
        whole = b.and_(inputs, self.integer(-self.lanes))
        four = self.ir.VectorType(self.ir.IntType(16), 4), self.ir.VectorType(self.i32, 4)
        sixteen = self.ir.Constant(four[1], [16] * 4)

        def row(number: Any) -> None:
            ours = self.at(b, x, b.mul(number, x_bytes))
            place = self.at(b, into, b.mul(number, into_bytes))

            def vector(at: Any) -> None:
                from_ = self.at(b, ours, b.mul(at, self.integer(2)))
                self.store(b, self.wide(b, from_, "bfloat16"), place, at)

            def rest(at: Any) -> None:
                """Four numbers: a vector of more could lie beyond the end of x."""
                numbers = b.load(self.at(b, ours, b.mul(at, self.integer(2))), typ=four[0], align=2)
                bits = b.shl(b.zext(numbers, four[1]), sixteen)
                b.store(bits, self.at(b, place, b.mul(at, self.integer(4))), align=4)

            self.each(b, self.integer(0), whole, self.lanes, vector)
            self.each(b, whole, inputs, 4, rest)

        self.each(b, self.integer(0), rows, 1, row)
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
        sums = (4 if self.lanes == 16 else 2) * self.tile_rows
        width = self.outputs
        while rows * width > sums * self.lanes:
            width //= 2
        return width

    def _columns(self, b: Any, start: Any, vectors: range) -> list[list[Any]]:
        """The numbers of two inputs for all outputs of a block, as vectors of floats."""
        if not self._halves:
            return [
                [
                    b.load(
                        self.at(b, start, self.integer(4 * (which * self.outputs + at))),
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
