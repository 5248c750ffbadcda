"""LLVM's code of products of bfloat16 numbers by a processor's matrix units (AMX).

A unit multiplies 16 rows of x by 16 outputs of W, 32 inputs at a time, and adds the products to
sums that stay in its registers. A block of W in oneDNN's layout, bfloat16 `[inputs / 2, outputs,
2]`, is what the units read as it lies. A row's sums depend on no other row, and are added up in the
same order wherever the row lies.

Instructions and configuration: Intel's Architecture Instruction Set Extensions, chapter 3.
"""

from __future__ import annotations

from typing import Any, Final

from asyncinfer.kernels.native.blocked_tiles_code import STREAM_AHEAD, BlockedTiles

__all__ = ["UNIT_INPUTS", "MatrixUnits"]

#: Inputs of one instruction: those of a weight are a multiple of them.
UNIT_INPUTS: Final = 32
#: Rows of x in two registers, which are multiplied together: each register of W is read once.
_UNIT_ROWS = 32
#: Rows of a register, outputs of a register of sums, and bytes of a row of any register.
_ROWS, _OUTPUTS, _ROW_BYTES = 16, 16, 64
#: The registers: sums of the first 16 rows, of the other rows, rows of x, and outputs of W.
_SUMS, _MORE_SUMS, _X, _W = (0, 1), (2, 3), (4, 5), (6, 7)
#: Where the configuration `[64]` bytes has each register's bytes of a row, 16 bits each, and its
#: rows, 8 bits each.
_ROW_BYTES_AT, _ROWS_AT = 16, 48


class MatrixUnits:
    """Emits the products of a block of W."""

    def __init__(self, code: BlockedTiles) -> None:
        self._code = code
        c = code
        self._number = c.ir.IntType(8)
        memory = c.pointer, c.i64
        intrinsic = "llvm.x86."
        self._configure = c.declare(f"{intrinsic}ldtilecfg", c.void, c.pointer)
        self._release = c.declare(f"{intrinsic}tilerelease", c.void)
        self._zero = c.declare(f"{intrinsic}tilezero", c.void, self._number)
        self._load = c.declare(f"{intrinsic}tileloadd64", c.void, self._number, *memory)
        self._store = c.declare(f"{intrinsic}tilestored64", c.void, self._number, *memory)
        self._add = c.declare(f"{intrinsic}tdpbf16ps", c.void, *[self._number] * 3)
        self._products = {
            (several, fetches): self._product(several, fetches)
            for several in (False, True)
            for fetches in (False, True)
        }

    def block(self, b: Any, weight: Any, after: Any, x: Any, kept: Any, *sizes: Any) -> None:
        """Write the sums of all inputs to `kept` float32 `[rows, outputs]`. `x` has the first row,
        `sizes` are `inputs`, bytes of a row of x, and `rows`. Meanwhile the beginning of `after`,
        the block that this thread multiplies next, is prefetched."""
        c = self._code
        inputs, x_bytes, rows = sizes

        def group(first: Any) -> None:
            some = c.least(b, c.integer(_UNIT_ROWS), b.sub(rows, first))
            places = (
                *(weight, after, c.at(b, x, b.mul(first, x_bytes))),
                c.at(b, kept, b.mul(first, c.integer(c.sum_bytes))),
            )
            several = b.icmp_signed(">", some, c.integer(_ROWS))
            fetches = b.icmp_signed("==", first, c.integer(0))
            for kind, product in self._products.items():
                are = [
                    found if wanted else b.not_(found)
                    for found, wanted in zip((several, fetches), kind, strict=True)
                ]
                with b.if_then(b.and_(*are)):
                    b.call(product, [*places, inputs, x_bytes, some])

        c.each(b, c.integer(0), rows, _UNIT_ROWS, group)

    def _product(self, several: bool, fetches: bool) -> Any:
        """`product(w, after, x, sums, inputs, x_bytes, rows)`: the sums of up to 16 rows, or of 17
        to 32 (`several`). With `fetches`, what is read next is prefetched."""
        c = self._code
        kinds = [c.pointer] * 4 + [c.i64] * 3
        function, b = c.begin(f"units_{16 << several}{'_fetch' * fetches}", *kinds)
        # A copy in each caller would take long to compile.
        function.attributes.add("noinline")
        weight, after, x, sums, inputs, x_bytes, rows = function.args
        first = c.least(b, rows, c.integer(_ROWS))
        self._configured(b, first, b.sub(rows, first), several)
        groups = ((_SUMS, _X[0]), (_MORE_SUMS, _X[1]))[: 1 + several]
        lower = [(x, sums)]
        if several:
            lower.append(
                (
                    c.at(b, x, b.mul(x_bytes, c.integer(_ROWS))),
                    c.at(b, sums, c.integer(_ROWS * c.sum_bytes)),
                )
            )
        whole = b.mul(inputs, c.integer(c.input_bytes))
        for start in range(0, c.outputs, 2 * _OUTPUTS):
            for registers, _ in groups:
                for register in registers:
                    b.call(self._zero, [self._named(register)])

            def some(at: Any, start: int = start) -> None:
                """Add the products of 32 inputs."""
                on = b.mul(at, c.integer(c.input_bytes))
                ours = c.at(b, weight, b.add(on, c.integer(4 * start)))
                if fetches and not start:
                    self._fetched(b, weight, after, on, whole)
                for index, register in enumerate(_W):
                    place = c.at(b, ours, c.integer(_ROW_BYTES * index))
                    self._loaded(b, register, place, c.integer(4 * c.outputs))
                column = b.mul(at, c.integer(2))
                for (registers, rows_of_x), (theirs, _) in zip(groups, lower, strict=True):
                    self._loaded(b, rows_of_x, c.at(b, theirs, column), x_bytes)
                    for register, outputs in zip(registers, _W, strict=True):
                        names = [self._named(each) for each in (register, rows_of_x, outputs)]
                        b.call(self._add, names)

            c.each(b, c.integer(0), inputs, UNIT_INPUTS, some)
            for (registers, _), (_, into) in zip(groups, lower, strict=True):
                for index, register in enumerate(registers):
                    place = c.at(b, into, c.integer(4 * start + _ROW_BYTES * index))
                    b.call(self._store, [self._named(register), place, c.integer(c.sum_bytes)])
        b.call(self._release, [])
        b.ret_void()
        return function

    def _configured(self, b: Any, first: Any, more: Any, several: bool) -> None:
        """Give the registers their sizes: `first` rows, and `more` in those of the other rows."""
        c = self._code
        memory = b.alloca(c.ir.ArrayType(c.byte, 64))
        # As in `BlockedCode`: llvmlite's `alloca` gives a typed pointer.
        memory = b.inttoptr(b.ptrtoint(memory, c.i64), c.pointer)
        for at in range(0, 64, 8):
            b.store(c.integer(0), c.at(b, memory, c.integer(at)), align=1)
        # The palette, of which there is one.
        b.store(c.ir.Constant(c.byte, 1), memory, align=1)
        rows = dict.fromkeys((*_SUMS, _X[0]), first) | dict.fromkeys(_W, c.integer(_ROWS))
        if several:
            rows |= dict.fromkeys((*_MORE_SUMS, _X[1]), more)
        narrow = c.ir.IntType(16)
        for register, count in rows.items():
            width = c.at(b, memory, c.integer(_ROW_BYTES_AT + 2 * register))
            b.store(c.ir.Constant(narrow, _ROW_BYTES), width, align=1)
            b.store(
                b.trunc(count, c.byte), c.at(b, memory, c.integer(_ROWS_AT + register)), align=1
            )
        b.call(self._configure, [memory])

    def _fetched(self, b: Any, weight: Any, after: Any, on: Any, whole: Any) -> None:
        """Prefetch as much as 32 inputs' weights, `STREAM_AHEAD` bytes beyond `on`: of the next
        block where this one, of `whole` bytes, ends before."""
        c = self._code
        at = b.add(on, c.integer(STREAM_AHEAD))
        inside = b.icmp_signed("<", at, whole)
        start = b.select(inside, weight, after)
        place = c.at(b, start, b.select(inside, at, b.sub(at, whole)))
        for line in range(0, UNIT_INPUTS * c.input_bytes, c.fetch_every):
            c.fetch(b, c.at(b, place, c.integer(line)))

    def _loaded(self, b: Any, register: int, place: Any, stride: Any) -> None:
        b.call(self._load, [self._named(register), place, stride])

    def _named(self, register: int) -> Any:
        return self._code.ir.Constant(self._number, register)
