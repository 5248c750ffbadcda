"""LLVM's code that looks up floats in tables of sixteen."""

from __future__ import annotations

from typing import Any

from asyncinfer.kernels.codes import TABLES
from asyncinfer.kernels.native.assembly import Assembly
from asyncinfer.kernels.native.host import Host

__all__ = ["Tables", "tables_for"]


class Tables:
    """Tables of the values of a code, times a scale, in one vector of 16 or two of 8."""

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
        """What the lowest four bits of each lane stand for; the others do not matter."""
        a = self._assembly
        if self._whole:
            return b.call(self._look_up, [tables[0], bits])
        low, high = (b.call(self._look_up, [table, bits]) for table in tables)
        eight = b.and_(bits, a.ir.Constant(a.ints, [8] * a.lanes))
        zeros = a.ir.Constant(a.ints, [0] * a.lanes)
        return b.select(b.icmp_signed("==", eight, zeros), low, high)


def tables_for(assembly: Assembly, host: Host, code: str) -> Tables | None:
    """The tables of a code of 4 bits; None where its whole numbers are computed with instead, since
    one look-up needs two tables. Raises `RuntimeError` where there is no instruction for it."""
    whole = host.tables and assembly.lanes == 16
    if not whole:
        if code == "int4":
            return None
        if not host.permutes or assembly.lanes != 8:
            raise RuntimeError(f"no instruction that looks up {code}")
    return Tables(assembly, TABLES[code], whole)
