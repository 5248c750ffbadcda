"""LLVM's code that looks up the values of 4-bit codes in tables of sixteen floats."""

from __future__ import annotations

from typing import Any

from asyncinfer.kernels.codes import TABLES
from asyncinfer.kernels.native.assembly import Assembly
from asyncinfer.kernels.native.host import Host

__all__ = ["Tables", "tables_for"]


class Tables:
    """The table of a code's 16 values, times a scale: one vector of 16 lanes, or two of 8."""

    def __init__(self, assembly: Assembly, values: tuple[float, ...], whole: bool) -> None:
        self._assembly, self._values, self._whole = assembly, values, whole
        name = "llvm.x86.avx512.permvar.sf.512" if whole else "llvm.x86.avx2.permps"
        floats, ints = assembly.floats, assembly.ints
        self._look_up = assembly.declare(name, floats, floats, ints)

    def made(self, b: Any, scale: Any, offset: Any) -> tuple[Any, ...]:
        """The tables of `value * scale + offset`."""
        a = self._assembly
        parts = [self._values[at : at + a.lanes] for at in range(0, len(self._values), a.lanes)]
        each = (a.ir.Constant(a.floats, list(part)) for part in parts)
        return tuple(a.scaled(b, part, scale, offset) for part in each)

    def values(self, b: Any, tables: tuple[Any, ...], bits: Any) -> Any:
        """The value that the lowest four bits of each lane stand for. Higher bits are ignored."""
        a = self._assembly
        if self._whole:
            return b.call(self._look_up, [tables[0], bits])
        low, high = (b.call(self._look_up, [table, bits]) for table in tables)
        eight = b.and_(bits, a.ir.Constant(a.ints, [8] * a.lanes))
        zeros = a.ir.Constant(a.ints, [0] * a.lanes)
        return b.select(b.icmp_signed("==", eight, zeros), low, high)


def tables_for(assembly: Assembly, host: Host, code: str) -> Tables | None:
    """The tables of a code of 4 bits. None for "int4" where a look-up would need two tables, since
    converting whole numbers is faster. Raises `RuntimeError` where there is no instruction for it.
    """
    whole = host.tables and assembly.lanes == 16
    if not whole:
        if code == "int4":
            return None
        if not host.permutes or assembly.lanes != 8:
            raise RuntimeError(f"no instruction that looks up {code}")
    return Tables(assembly, TABLES[code], whole)
