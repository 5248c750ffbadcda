"""LLVM's code of products with a weight in oneDNN's layout.

The layout has blocks of outputs, which are read by tiles, see `BlockedTiles`. The weights of a few
inputs are multiplied with all rows while a near cache holds them. Sums of rows lie side by side
until they are whole: in the result they may be so many bytes apart that a cache has the same few
places for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncinfer.kernels.native.blocked_tiles_code import (
    LINE,
    STREAM_AHEAD,
    BlockedTiles,
    Method,
    tile_rows,
)
from asyncinfer.kernels.native.matrix_registers_code import MOST_ROWS
from asyncinfer.kernels.native.matrix_units_code import MatrixUnits
from asyncinfer.kernels.native.team_code import CLAIMED, READY, STORING
from asyncinfer.kernels.native.turns_code import Turns
from asyncinfer.kernels.native.work_parts_code import WorkParts, part_state

__all__ = ["FIELDS", "blocked_code", "turns_of"]

#: The arguments of a call, 64 bits each: addresses, sizes, and the counter that threads share.
FIELDS = (
    *("weight", "x", "y", "outputs", "inputs", "block", "rows"),
    *("threads", "states", "next"),
)
#: Inputs after which sums go to memory, a multiple of 4; twice as many where one instruction
#: multiplies two, which takes as long, and where caches are large.
_DEPTH = 64


def turns_of(method: Method, lanes: int, cache_bytes: int) -> Turns:
    """The turns in which rows are multiplied. `cache_bytes`: of a second-level cache."""
    step = MOST_ROWS if method == "units" else tile_rows(method, lanes)
    return Turns(step, 4 if method == "floats" else 2, cache_bytes)


def blocked_code(
    dtype: str,
    lanes: int,
    outputs: int,
    *,
    method: Method = "floats",
    streams: bool = False,
    rounds: bool = True,
    cache_bytes: int = 0,
) -> str:
    """The assembly of `product(task)`, where `task` points to `FIELDS`, as int64.

    It writes `x W^T` to `y` float32 `[rows, outputs]` for `x` float32 `[rows, inputs]`. W is of
    `dtype`, in blocks of `block` bytes: float32 `[inputs, outputs]`, bfloat16
    `[inputs / 2, outputs, 2]`, with the `outputs` of this function. The task's are a multiple of
    them, its `inputs` one of 4. `next` is 0.

    `states` is 0, or the address of an int64 for each block of each of the turns that `turns_of`
    says, which are `FREE`. Several threads may then compute one part of the work, of which one
    stores it, so that nobody waits for a thread that is not running.

    `method`: see there; x and y are bfloat16 but for "floats", and for "units" `inputs` is a
    multiple of `UNIT_NUMBERS`. `streams`: see `BlockedTiles`; `rounds`: see `Host`;
    `cache_bytes`: of a second-level cache."""
    turns = turns_of(method, lanes, cache_bytes)
    about = dtype, lanes, outputs, turns
    return _BlockedCode(*about, method=method, streams=streams, rounds=rounds).text()


class _BlockedCode(BlockedTiles):
    def __init__(
        self,
        dtype: str,
        lanes: int,
        outputs: int,
        turns: Turns,
        *,
        method: Method,
        streams: bool,
        rounds: bool,
    ) -> None:
        super().__init__(dtype, lanes, outputs, FIELDS, method=method, streams=streams)
        self._method, self._turns, self._rounds = method, turns, rounds
        self._units = MatrixUnits(self) if method == "units" else None
        #: Bytes of a number of x and of y.
        self._x_bytes = 4 if method == "floats" else 2
        depths = {"floats": turns.depth(_DEPTH), "pairs": 2 * _DEPTH}
        self._depth = depths.get(method, _DEPTH)
        self._ahead = STREAM_AHEAD if streams else self._depth * self.input_bytes

    def text(self) -> str:
        sizes = () if self._units else range(1, self.tile_rows + 1)
        tiles = [self.tile(rows) for rows in sizes]
        block = self._block(tiles)
        parts = WorkParts(self, self._parts, self._room, block, self._store())
        self.on_task("product", parts.work())
        return str(self.module)

    def _parts(self, b: Any, task: Any) -> Any:
        """How many parts there are: each is a block of W for a turn's rows of x."""
        outputs, rows = (self.field(b, task, name) for name in ("outputs", "rows"))
        turn = self._turn(b, task)
        turns = b.sdiv(b.sub(b.add(rows, turn), self.integer(1)), turn)
        return b.mul(b.sdiv(outputs, self.integer(self.outputs)), turns)

    def _turn(self, b: Any, task: Any) -> Any:
        """Rows of x that a thread takes at a time."""
        rows, inputs = (self.field(b, task, name) for name in ("rows", "inputs"))
        return self._turns.rows(self, b, rows, inputs)

    def _room(self, b: Any) -> Any:
        """Room for a thread's sums of the most rows that it takes at a time, `[rows, outputs]`;
        behind them, where x is widened, for a few inputs of it `[rows, _DEPTH]`."""
        row_bytes = self.sum_bytes + (4 * _DEPTH if self._method == "widened" else 0)
        kept = b.alloca(self.ir.ArrayType(self.byte, self._turns.most * row_bytes))
        kept.align = LINE
        # llvmlite's `alloca` gives a typed pointer. The detour makes it opaque.
        return b.inttoptr(b.ptrtoint(kept, self.i64), self.pointer)

    def _place_of(self, b: Any, task: Any, index: Any) -> tuple[Any, Any, Any, Any]:
        """Of a part: the number of its block of W, its first row of x, how many rows it has, and
        where its results begin."""
        outputs, rows = (self.field(b, task, name) for name in ("outputs", "rows"))
        blocks = b.sdiv(outputs, self.integer(self.outputs))
        column, turn = b.srem(index, blocks), b.sdiv(index, blocks)
        most = self._turn(b, task)
        first = b.mul(turn, most)
        count = self.least(b, most, b.sub(rows, first))
        y = self.address(b, task, "y")
        into = self.at(b, y, b.mul(column, self.integer(self.outputs * self._x_bytes)))
        return column, first, count, into

    def _stores_sums(self, b: Any, task: Any) -> Any:
        """Whether sums stay in a thread's own memory until all of them are whole: those that become
        bfloat16 by vectors, and those of a part that another thread may compute as well."""
        if self._x_bytes == 2 and self._units is None:
            return self.ir.Constant(self.bit, 1)
        return b.icmp_signed("!=", self.field(b, task, "states"), self.integer(0))

    def _store(self) -> Any:
        """`store(task, index, kept)`: write the sums of a part to y, unless they are there. With
        states, one thread does."""
        function, b = self.begin("store", self.pointer, self.i64, self.pointer)
        task, index, kept = function.args
        states = self.field(b, task, "states")
        several = b.icmp_signed("!=", states, self.integer(0))
        state = part_state(self, b, b.inttoptr(states, self.pointer), index)
        with b.if_then(several):
            late, ours = b.append_basic_block(), b.append_basic_block()
            b.cbranch(self.takes(b, state, CLAIMED, STORING), ours, late)
            b.position_at_end(late)
            b.ret_void()
            b.position_at_end(ours)
        _, first, count, into = self._place_of(b, task, index)
        y_bytes = b.mul(self.field(b, task, "outputs"), self.integer(self._x_bytes))

        def row(number: Any) -> None:
            sums = self.at(b, kept, b.mul(number, self.integer(self.sum_bytes)))
            place = self.at(b, into, b.mul(b.add(first, number), y_bytes))
            # Matrix units leave bfloat16 numbers, two of them in the place of a sum.
            are_rounded = self._units is not None
            for at in range(0, self.outputs // (1 + are_rounded), self.lanes):
                part = self.load(b, sums, self.integer(at))
                if self._x_bytes == 4 or are_rounded:
                    self.store(b, part, place, self.integer(at))
                else:
                    halves = self.rounded(b, part, at_once=self._rounds)
                    b.store(halves, self.at(b, place, self.integer(2 * at)), align=2)

        with b.if_then(self._stores_sums(b, task)):
            self.each(b, self.integer(0), count, 1, row)
        with b.if_then(several):
            self.tell(b, state, READY)
        b.ret_void()
        return function

    def _block(self, tiles: Sequence[Any]) -> Any:
        """`block(task, index, after, kept)`: multiply a part, and prefetch the part `after`."""
        widen = self.wide_rows() if self._method == "widened" else None
        function, b = self.begin("block", self.pointer, self.i64, self.i64, self.pointer)
        task, index, after, kept = function.args
        weight, x = (self.address(b, task, name) for name in ("weight", "x"))
        outputs, inputs, block = (
            self.field(b, task, name) for name in ("outputs", "inputs", "block")
        )
        column, first, count, into = self._place_of(b, task, index)
        next_column, *_ = self._place_of(b, task, after)
        own, coming = (self.at(b, weight, b.mul(each, block)) for each in (column, next_column))
        x_bytes = b.mul(inputs, self.integer(self._x_bytes))
        y_bytes = b.mul(outputs, self.integer(self._x_bytes))
        kept_sums = self._stores_sums(b, task)
        ours = self.at(b, x, b.mul(first, x_bytes))
        halvings = self.integer(0)
        for halved in range(1, self.most_halvings() + 1):
            # Tiles that prefetch so little are this many at least.
            enough = b.icmp_signed(">", count, self.integer(self.tile_rows * ((1 << halved) - 1)))
            halvings = b.select(enough, self.integer(halved), halvings)
        others = b.sub(b.shl(self.integer(1), halvings), self.integer(1))
        # As few tiles as can be, with about as many rows each.
        most = self.integer(self.tile_rows)
        groups = b.udiv(b.add(count, self.integer(self.tile_rows - 1)), most)
        tile = b.udiv(b.add(count, b.sub(groups, self.integer(1))), groups)

        def some(start: Any) -> None:
            """Add the products of `self._depth` inputs."""
            depth = self.least(b, self.integer(self._depth), b.sub(inputs, start))
            numbers = self.at(b, own, b.mul(start, self.integer(self.input_bytes)))
            more = b.icmp_signed("<", b.add(start, self.integer(self._depth)), inputs)
            chunk = self.integer(self._depth * self.input_bytes)
            alone = b.icmp_signed("==", halvings, self.integer(0))
            on = b.select(alone, self.integer(self._ahead), chunk)
            ahead = b.select(more, self.at(b, numbers, on), coming)
            columns = self.at(b, ours, b.mul(start, self.integer(self._x_bytes)))
            stride = x_bytes
            if widen is not None:
                stride, halves = self.integer(4 * self._depth), columns
                columns = self.at(b, kept, self.integer(self._turns.most * self.sum_bytes))
                b.call(widen, [halves, columns, count, depth, x_bytes, stride])
            again = b.or_(more, kept_sums)
            bytes_of = b.select(again, self.integer(self.sum_bytes), y_bytes)

            def group(index: Any) -> None:
                row = b.mul(index, tile)
                left = b.sub(count, row)
                number = b.add(first, row)
                old = self.at(b, kept, b.mul(row, self.integer(self.sum_bytes)))
                places = (
                    self.at(b, columns, b.mul(row, stride)),
                    old,
                    b.select(again, old, self.at(b, into, b.mul(number, y_bytes))),
                )
                several = self.least(b, tile, left)
                # Of the next weights each tile prefetches others.
                share = b.and_(index, others)
                fetched = self.at(b, ahead, b.mul(share, b.lshr(chunk, halvings)))
                sizes = depth, stride, bytes_of, start, halvings
                for size, product in enumerate(tiles, 1):
                    with b.if_then(b.icmp_signed("==", several, self.integer(size))):
                        b.call(product, [numbers, fetched, *places, *sizes])

            self.each(b, self.integer(0), groups, 1, group)

        if self._units is None:
            self.each(b, self.integer(0), inputs, self._depth, some)
        else:
            results = self.at(b, into, b.mul(first, y_bytes))
            results = b.select(kept_sums, kept, results)
            into_bytes = b.select(kept_sums, self.integer(self.sum_bytes), y_bytes)
            sizes = inputs, x_bytes, into_bytes, count
            self._units.block(b, (own, coming), (ours, kept, results), *sizes)
        b.ret_void()
        return function
