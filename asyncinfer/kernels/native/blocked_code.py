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
    TILE_ROWS,
    BlockedTiles,
)
from asyncinfer.kernels.native.matrix_units_code import MatrixUnits
from asyncinfer.kernels.native.team_code import CLAIMED, FREE, READY, STORING

__all__ = ["FIELDS", "TILE_ROWS", "blocked_code", "parts_of"]

#: The arguments of a call, 64 bits each: addresses, sizes, and the counter that threads share.
FIELDS = (
    *("weight", "x", "y", "outputs", "inputs", "block", "rows"),
    *("threads", "states", "next"),
)
#: Rows of x that a thread takes at a time: a multiple of a tile's, and few enough that threads end
#: at about the same time.
_TURN = 96
#: Inputs after which sums go to memory, a multiple of 4; twice as many where one instruction
#: multiplies two, which takes as long.
_DEPTH = 64
#: How many times as long as this thread another one may take for a part of the work.
_PATIENCE = 2


def parts_of(blocks: int, rows: int) -> int:
    """Parts of a product's work."""
    return blocks * -(-rows // _TURN)


def blocked_code(
    dtype: str, lanes: int, outputs: int, *, pairs: bool, units: bool = False, streams: bool = False
) -> str:
    """The assembly of `product(task)`, where `task` points to `FIELDS`, as int64.

    It writes `x W^T` to `y` float32 `[rows, outputs]` for `x` float32 `[rows, inputs]`. W is of
    `dtype`, in blocks of `block` bytes: float32 `[inputs, outputs]`, bfloat16
    `[inputs / 2, outputs, 2]`, with the `outputs` of this function. The task's are a multiple of
    them, its `inputs` one of 4. `next` is 0.

    `states` is 0, or the address of as many int64 as `parts_of` says, which are `FREE`. Several
    threads may then compute one part of the work, of which one stores it, so that nobody waits for
    a thread that is not running.

    With `pairs`, all of them are bfloat16, and one instruction multiplies two inputs (`vdpbf16ps`).
    With `units`, matrix units do, and `inputs` is a multiple of `UNIT_INPUTS`. `streams`: see
    `BlockedTiles`."""
    return _BlockedCode(dtype, lanes, outputs, pairs=pairs, streams=streams).text(units=units)


class _BlockedCode(BlockedTiles):
    def __init__(self, dtype: str, lanes: int, outputs: int, *, pairs: bool, streams: bool) -> None:
        super().__init__(dtype, lanes, outputs, FIELDS, pairs=pairs, streams=streams)
        #: Bytes of a number of x and of y.
        self._x_bytes = 2 if pairs else 4
        self._depth = 2 * _DEPTH if pairs else _DEPTH
        self._ahead = STREAM_AHEAD if streams else self._depth * self.input_bytes

    def text(self, *, units: bool) -> str:
        if units:
            block = self._block((), MatrixUnits(self))
        else:
            block = self._block([self.tile(rows) for rows in range(1, TILE_ROWS + 1)])
        store = self._store()
        self.on_task("product", self._work(block, store, self._finish(block, store)))
        return str(self.module)

    def _work(self, block: Any, store: Any, finish: Any) -> Any:
        """`work(task)`: multiply a part of the work, then the next, until none is left. With
        states, the function comes back when all parts are ready."""
        function, b = self.begin("work", self.pointer)
        (task,) = function.args
        kept, states = self._kept(b), self.field(b, task, "states")
        parts, several = self._parts(b, task), b.icmp_signed("!=", states, self.integer(0))
        states = b.inttoptr(states, self.pointer)
        started = self.counted(b, task, "next")
        before = b.block
        fetch, run, free, end = (b.append_basic_block() for _ in range(4))
        b.branch(fetch)
        b.position_at_end(fetch)
        index, longest = b.phi(self.i64), b.phi(self.i64)
        index.add_incoming(started, before)
        longest.add_incoming(self.integer(0), before)
        b.cbranch(b.icmp_signed("<", index, parts), run, end)
        b.position_at_end(run)
        # The next part is chosen now, so that it can be prefetched.
        following = self.counted(b, task, "next")
        last = b.icmp_signed(">=", following, parts)
        after = b.select(last, index, following)
        with b.if_then(several):
            taken = self.takes(b, self._state(b, states, index), FREE, CLAIMED)
            left = b.append_basic_block()
            go_on = b.append_basic_block()
            b.cbranch(taken, go_on, left)
            b.position_at_end(left)
            index.add_incoming(following, left)
            longest.add_incoming(longest, left)
            b.branch(fetch)
            b.position_at_end(go_on)
        b.branch(free)
        b.position_at_end(free)
        began = self.ticks(b)
        b.call(block, [task, index, after, kept])
        b.call(store, [task, index, kept])
        index.add_incoming(following, b.block)
        took = b.sub(self.ticks(b), began)
        longest.add_incoming(b.select(b.icmp_signed(">", took, longest), took, longest), b.block)
        b.branch(fetch)
        b.position_at_end(end)
        with b.if_then(several):
            b.call(finish, [task, kept, longest])
        b.ret_void()
        return function

    def _finish(self, block: Any, store: Any) -> Any:
        """`finish(task, kept, ticks)`: multiply what other threads have left, and come back when
        all parts are ready. `ticks` is how long this thread's longest part took, or 0 if it had
        none. A thread that takes `_PATIENCE` times as long is not running, and its part is
        multiplied here as well."""
        function, b = self.begin("finish", self.pointer, self.pointer, self.i64)
        task, kept, ticks = function.args
        parts, states = self._parts(b, task), self.address(b, task, "states")
        longest = b.alloca(self.i64)
        b.store(ticks, longest)

        def made(b: Any, index: Any) -> None:
            b.call(block, [task, index, index, kept])
            b.call(store, [task, index, kept])

        def free(index: Any) -> None:
            state = self._state(b, states, index)
            is_free = b.icmp_signed("==", self.seen(b, state), self.integer(FREE))
            with b.if_then(is_free), b.if_then(self.takes(b, state, FREE, CLAIMED)):
                began = self.ticks(b)
                made(b, index)
                b.store(b.sub(self.ticks(b), began), longest)

        self.each(b, self.integer(0), parts, 1, free)
        ticks = b.load(longest)
        patience = b.mul(ticks, self.integer(_PATIENCE))
        began = self.ticks(b)

        def late(index: Any) -> None:
            state = self._state(b, states, index)

            def ready(b: Any) -> Any:
                found = self.seen(b, state)
                waited = b.icmp_signed(">", b.sub(self.ticks(b), began), patience)
                over = b.and_(waited, b.icmp_signed(">", ticks, self.integer(0)))
                claimed = b.icmp_signed("==", found, self.integer(CLAIMED))
                with b.if_then(b.and_(over, claimed)):
                    made(b, index)
                return b.icmp_signed("==", self.seen(b, state), self.integer(READY))

            self.until(b, ready)

        self.each(b, self.integer(0), parts, 1, late)
        b.ret_void()
        return function

    def _kept(self, b: Any) -> Any:
        """Room for a thread's sums `[_TURN, outputs]`."""
        kept = b.alloca(self.ir.ArrayType(self.byte, _TURN * self.sum_bytes))
        kept.align = LINE
        # llvmlite's `alloca` gives a typed pointer. The detour makes it opaque.
        return b.inttoptr(b.ptrtoint(kept, self.i64), self.pointer)

    def _state(self, b: Any, states: Any, index: Any) -> Any:
        return self.at(b, states, b.mul(index, self.integer(8)))

    def _parts(self, b: Any, task: Any) -> Any:
        """Parts of the work: each is a block of W for `_TURN` rows of x."""
        outputs, rows = (self.field(b, task, name) for name in ("outputs", "rows"))
        return b.mul(b.sdiv(outputs, self.integer(self.outputs)), self._turns(b, rows))

    def _turns(self, b: Any, rows: Any) -> Any:
        return b.sdiv(b.add(rows, self.integer(_TURN - 1)), self.integer(_TURN))

    def _place_of(self, b: Any, task: Any, index: Any) -> tuple[Any, Any, Any, Any]:
        """Of a part: the number of its block of W, its first row of x, how many rows it has, and
        where its results begin."""
        outputs, rows = (self.field(b, task, name) for name in ("outputs", "rows"))
        blocks = b.sdiv(outputs, self.integer(self.outputs))
        column, turn = b.srem(index, blocks), b.sdiv(index, blocks)
        first = b.mul(turn, self.integer(_TURN))
        count = self.least(b, self.integer(_TURN), b.sub(rows, first))
        y = self.address(b, task, "y")
        into = self.at(b, y, b.mul(column, self.integer(self.outputs * self._x_bytes)))
        return column, first, count, into

    def _stores_sums(self, b: Any, task: Any) -> Any:
        """Whether sums stay in a thread's own memory until all of them are whole: those that become
        bfloat16, and those of a part that another thread may compute as well."""
        if self.pairs:
            return self.ir.Constant(self.bit, 1)
        return b.icmp_signed("!=", self.field(b, task, "states"), self.integer(0))

    def _store(self) -> Any:
        """`store(task, index, kept)`: write the sums of a part to y, unless they are there. With
        states, one thread does."""
        function, b = self.begin("store", self.pointer, self.i64, self.pointer)
        task, index, kept = function.args
        states = self.field(b, task, "states")
        several = b.icmp_signed("!=", states, self.integer(0))
        state = self._state(b, b.inttoptr(states, self.pointer), index)
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
            for at in range(0, self.outputs, self.lanes):
                part = self.load(b, sums, self.integer(at))
                if self.pairs:
                    halves = self.rounded(b, part, at_once=True)
                    b.store(halves, self.at(b, place, self.integer(2 * at)), align=2)
                else:
                    self.store(b, part, place, self.integer(at))

        with b.if_then(self._stores_sums(b, task)):
            self.each(b, self.integer(0), count, 1, row)
        with b.if_then(several):
            self.tell(b, state, READY)
        b.ret_void()
        return function

    def _block(self, tiles: Sequence[Any], units: MatrixUnits | None = None) -> Any:
        """`block(task, index, after, kept)`: multiply a part, and prefetch the part `after`."""
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

        def some(start: Any) -> None:
            """Add the products of `self._depth` inputs."""
            depth = self.least(b, self.integer(self._depth), b.sub(inputs, start))
            numbers = self.at(b, own, b.mul(start, self.integer(self.input_bytes)))
            more = b.icmp_signed("<", b.add(start, self.integer(self._depth)), inputs)
            on = self.at(b, numbers, self.integer(self._ahead))
            ahead = b.select(more, on, coming)
            columns = self.at(b, x, b.mul(start, self.integer(self._x_bytes)))
            again = b.or_(more, kept_sums)
            bytes_of = b.select(again, self.integer(self.sum_bytes), y_bytes)

            def group(row: Any) -> None:
                left = b.sub(count, row)
                number = b.add(first, row)
                old = self.at(b, kept, b.mul(row, self.integer(self.sum_bytes)))
                places = (
                    self.at(b, columns, b.mul(number, x_bytes)),
                    old,
                    b.select(again, old, self.at(b, into, b.mul(number, y_bytes))),
                )
                several = self.least(b, self.integer(TILE_ROWS), left)
                for size, tile in enumerate(tiles, 1):
                    with b.if_then(b.icmp_signed("==", several, self.integer(size))):
                        b.call(tile, [numbers, ahead, *places, depth, x_bytes, bytes_of, start])

            self.each(b, self.integer(0), count, TILE_ROWS, group)

        if units is None:
            self.each(b, self.integer(0), inputs, self._depth, some)
        else:
            rows = self.at(b, x, b.mul(first, x_bytes))
            units.block(b, own, coming, rows, kept, inputs, x_bytes, count)
        b.ret_void()
        return function
