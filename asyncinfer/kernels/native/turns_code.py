"""How many rows of x a thread multiplies at a time by a block of W.

A weight is read once for each such turn, so a turn has as many rows as a core's second-level cache
holds beside all else. Turns of a product are about as long as each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from asyncinfer.kernels.native.assembly import Assembly

__all__ = ["Turns"]

#: The fewest rows of a turn where there are more, and the most.
_LEAST, _MOST = 96, 256
#: Bytes of x that a turn has at most beyond the fewest rows, and the second-level cache that it
#: takes for them. Smaller caches were not measured.
_BYTES: Final = 1 << 20
_CACHE_BYTES: Final = 2 << 20


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of products with `number_bytes` bytes of a number of x. A turn's rows are a
    multiple of `step`. `cache_bytes`: of a core's second-level cache."""

    step: int
    number_bytes: int
    cache_bytes: int

    @property
    def most(self) -> int:
        """The most rows of a turn."""
        return (_MOST if self._numbers else _LEAST) // self.step * self.step

    def depth(self, least: int) -> int:
        """Inputs whose weights are multiplied with all rows of a turn before the next ones: twice
        as many as the `least` with a second-level cache of `_CACHE_BYTES`."""
        return 2 * least if self._numbers else least

    def count(self, rows: int, inputs: int) -> int:
        """Turns of a product with so many rows of x."""
        most = max(_LEAST, min(self.most, self._numbers // inputs)) if self._numbers else self.most
        return -(-rows // (most // self.step * self.step))

    def rows(self, a: Assembly, b: Any, rows: Any, inputs: Any) -> Any:
        """Emit how many rows a turn has, of so many rows of x."""
        step, one = a.integer(self.step), a.integer(1)
        most = a.integer(self.most)
        if self._numbers:
            least = a.integer(_LEAST)
            fitting = a.least(b, b.udiv(a.integer(self._numbers), inputs), most)
            most = b.select(b.icmp_signed("<", fitting, least), least, fitting)
            most = b.mul(b.udiv(most, step), step)
        turns = b.udiv(b.sub(b.add(rows, most), one), most)
        each = b.udiv(b.sub(b.add(rows, turns), one), turns)
        return b.mul(b.udiv(b.add(each, a.integer(self.step - 1)), step), step)

    @property
    def _numbers(self) -> int:
        """Numbers of x that the cache holds; 0 where that is not known."""
        return _BYTES // self.number_bytes if self.cache_bytes >= _CACHE_BYTES else 0
