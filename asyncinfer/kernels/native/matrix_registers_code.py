"""LLVM's code of the registers of a processor's matrix units (AMX).

A register has up to 16 rows of 64 bytes. A unit multiplies 16 rows of a register by the 16 columns
of another one, 32 bfloat16 numbers of each, and adds the products to float32 sums that stay in a
third one. The columns are pairs of rows: `[16, columns, 2]`.

Instructions and configuration: Intel's Architecture Instruction Set Extensions, chapter 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

from asyncinfer.kernels.native.assembly import Assembly

__all__ = ["COLUMNS", "MOST_ROWS", "ROWS", "UNIT_NUMBERS", "MatrixRegisters"]

#: bfloat16 numbers of a row of a register, all of which are multiplied.
UNIT_NUMBERS: Final = 32
#: Rows of a register, columns of a register of sums, and bytes of a row of any register.
ROWS: Final = 16
COLUMNS: Final = 16
_ROW_BYTES = 64
#: The registers. Two of rows are multiplied by two of columns, so that each is read once: the first
#: sums are those of the first rows and either columns.
_SUMS = (0, 1), (2, 3)
_LEFT, _RIGHT = (4, 5), (6, 7)
#: Rows that are multiplied at once.
MOST_ROWS: Final = ROWS * len(_LEFT)
#: Where the configuration `[64]` bytes has each register's bytes of a row, 16 bits each, and its
#: rows, 8 bits each.
_ROW_BYTES_AT, _ROWS_AT = 16, 48


class MatrixRegisters:
    """Emits what the registers do."""

    def __init__(self, code: Assembly) -> None:
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

    def configure(self, b: Any, counts: Sequence[Any] = ()) -> None:
        """Give the registers their sizes. `counts`: the rows of `_LEFT`, and of their sums; without
        them all registers are whole."""
        c = self._code
        memory = b.alloca(c.ir.ArrayType(c.byte, 64))
        # llvmlite's `alloca` gives a typed pointer. The detour makes it opaque.
        memory = b.inttoptr(b.ptrtoint(memory, c.i64), c.pointer)
        for at in range(0, 64, 8):
            b.store(c.integer(0), c.at(b, memory, c.integer(at)), align=1)
        # The palette, of which there is one.
        b.store(c.ir.Constant(c.byte, 1), memory, align=1)
        counts = counts or [c.integer(ROWS)] * len(_LEFT)
        rows: dict[int, Any] = dict.fromkeys(_RIGHT, c.integer(ROWS))
        for left, sums, count in zip(_LEFT, _SUMS, counts, strict=False):
            rows |= dict.fromkeys((*sums, left), count)
        narrow = c.ir.IntType(16)
        for register, count in rows.items():
            width = c.at(b, memory, c.integer(_ROW_BYTES_AT + 2 * register))
            b.store(c.ir.Constant(narrow, _ROW_BYTES), width, align=1)
            place = c.at(b, memory, c.integer(_ROWS_AT + register))
            b.store(b.trunc(count, c.byte), place, align=1)
        b.call(self._configure, [memory])

    def release(self, b: Any) -> None:
        """Let the processor forget the registers, which a change of threads would else keep."""
        b.call(self._release, [])

    def multiply(
        self, b: Any, left: Sequence[Any], left_bytes: Any, right: Any, right_bytes: Any
    ) -> None:
        """Add to the sums the products of `UNIT_NUMBERS` numbers of the rows at `left`, a place for
        each register, and of the columns at `right`. Rows are `left_bytes` and `right_bytes`
        apart."""
        for index, register in enumerate(_RIGHT):
            place = self._code.at(b, right, self._code.integer(_ROW_BYTES * index))
            b.call(self._load, [self._named(register), place, right_bytes])
        for rows, place, sums in zip(_LEFT, left, _SUMS, strict=False):
            b.call(self._load, [self._named(rows), place, left_bytes])
            for total, columns in zip(sums, _RIGHT, strict=True):
                b.call(self._add, [self._named(each) for each in (total, rows, columns)])

    def clear(self, b: Any, groups: int = len(_LEFT)) -> None:
        """Make the sums of the first `groups` registers of rows zero."""
        for register in itertools.chain(*_SUMS[:groups]):
            b.call(self._zero, [self._named(register)])

    def read(self, b: Any, places: Sequence[Any], stride: Any) -> None:
        """Read the sums of the rows at these places, one for each register of rows."""
        self._each(b, self._load, places, stride)

    def write(self, b: Any, places: Sequence[Any], stride: Any) -> None:
        """Write the sums to these places."""
        self._each(b, self._store, places, stride)

    def _each(self, b: Any, what: Any, places: Sequence[Any], stride: Any) -> None:
        for place, sums in zip(places, _SUMS, strict=False):
            for index, register in enumerate(sums):
                into = self._code.at(b, place, self._code.integer(_ROW_BYTES * index))
                b.call(what, [self._named(register), into, stride])

    def _named(self, register: int) -> Any:
        return self._code.ir.Constant(self._number, register)
