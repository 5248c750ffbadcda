"""`Assembly`: vectors of numbers in LLVM's assembly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from asyncinfer.kernels.native.tasks import Tasks

__all__ = ["Assembly"]

#: 2**x for x from -0.5 to 0.5, to a bit: the series of exp(x ln 2).
_SERIES = [math.log(2) ** power / math.factorial(power) for power in range(7)]
#: The sum of this and a number below 2**22 has the nearest integer in its lowest bits.
_MAGIC = 1.5 * 2**23


class Assembly(Tasks):
    """Builds a module of LLVM's assembly. In all methods `b` is an `IRBuilder` of llvmlite."""

    def __init__(self, name: str, lanes: int, fields: Sequence[str] = ()) -> None:
        """`lanes`: float32 numbers of a vector; `fields`: those of a task."""
        super().__init__(name, fields)
        ir = self.ir
        self.lanes = lanes
        self.half = ir.HalfType()
        self.floats = ir.VectorType(self.float, lanes)
        self.ints = ir.VectorType(self.i32, lanes)
        self._narrow = ir.VectorType(ir.IntType(16), lanes)
        self._halves = ir.VectorType(self.half, lanes)
        # llvmlite has no class of this type.
        self._bfloat = type("BFloatType", (ir.Type,), {"__str__": lambda self: "bfloat"})()
        #: bfloat16 numbers in the place of `floats`: twice as many.
        self.halves = ir.VectorType(self._bfloat, 2 * lanes)
        width = f"v{lanes}f32"
        self.fma = self.declare(f"llvm.fma.{width}", self.floats, *[self.floats] * 3)
        name = f"llvm.vector.reduce.fadd.{width}"
        self.sum = self.declare(name, self.float, self.float, self.floats)
        self.maximum = self.declare(f"llvm.maxnum.{width}", self.floats, *[self.floats] * 2)
        self._highest = self.declare(f"llvm.vector.reduce.fmax.{width}", self.float, self.floats)
        kinds = [self.pointer, self.i32, self.i32, self.i32]
        self._fetch = self.declare("llvm.prefetch.p0", self.void, *kinds)

    def load(self, b: Any, floats: Any, number: Any) -> Any:
        """A vector of float32 numbers from this one on."""
        at = self.at(b, floats, b.mul(number, self.integer(4)))
        return b.load(at, typ=self.floats, align=4)

    def store(self, b: Any, vector: Any, floats: Any, number: Any) -> None:
        """Store a vector of float32 numbers, from `number` on."""
        b.store(vector, self.at(b, floats, b.mul(number, self.integer(4))), align=4)

    def one(self, b: Any, floats: Any, number: Any) -> Any:
        """The float32 with this number in `floats`, in every lane."""
        place = self.at(b, floats, b.mul(number, self.integer(4)))
        return self.everywhere(b, b.load(place, typ=self.float, align=4))

    def wide(self, b: Any, pointer: Any, dtype: str) -> Any:
        """A vector of "float32", "bfloat16" or "float16" numbers, as float32."""
        if dtype == "float32":
            return b.load(pointer, typ=self.floats, align=4)
        if dtype == "float16":
            return b.fpext(b.load(pointer, typ=self._halves, align=2), self.floats)
        # A bfloat16 number is the higher half of a float32 number.
        bits = b.zext(b.load(pointer, typ=self._narrow, align=2), self.ints)
        return b.bitcast(b.shl(bits, self.ir.Constant(self.ints, [16] * self.lanes)), self.floats)

    def rounded(self, b: Any, vector: Any, *, at_once: bool) -> Any:
        """A vector's numbers as the bits of bfloat16 numbers, rounded to the nearest, ties to even,
        as torch rounds them. `at_once`: by the processor's instruction, which makes numbers below
        2**-126 zero."""
        if at_once:
            kind = self.ir.VectorType(self._bfloat, self.lanes)
            return b.bitcast(b.fptrunc(vector, kind), self._narrow)
        constant = self.ir.Constant
        bits = b.bitcast(vector, self.ints)
        sixteen = constant(self.ints, [16] * self.lanes)
        odd = b.and_(b.lshr(bits, sixteen), constant(self.ints, [1] * self.lanes))
        up = b.add(b.add(bits, odd), constant(self.ints, [0x7FFF] * self.lanes))
        none = constant(self.ints, [0x7FC00000] * self.lanes)
        up = b.select(b.fcmp_unordered("uno", vector, vector), none, up)
        return b.trunc(b.lshr(up, sixteen), self._narrow)

    def fetch(self, b: Any, pointer: Any, *, near: bool = True, writes: bool = False) -> None:
        """Prefetch memory into the nearest cache (`near`), or into the second-level cache, which
        can wait for more lines at a time; `writes`: to write there. Any address is allowed."""
        how = (self.ir.Constant(self.i32, value) for value in (int(writes), 2 + near, 1))
        b.call(self._fetch, [pointer, *how])

    def least(self, b: Any, one: Any, other: Any) -> Any:
        """The smaller one of two int64."""
        return b.select(b.icmp_signed("<", one, other), one, other)

    def scaled(self, b: Any, numbers: Any, scale: Any, offset: Any) -> Any:
        """`numbers * scale + offset`; `numbers * scale` where `offset` is None."""
        if offset is None:
            return b.fmul(numbers, scale)
        return b.call(self.fma, [numbers, scale, offset])

    def total(self, b: Any, vector: Any) -> Any:
        """The sum of a vector's numbers."""
        start = self.ir.Constant(self.float, -0.0)
        return b.call(self.sum, [start, vector], fastmath=["reassoc"])

    def highest(self, b: Any, vector: Any) -> Any:
        """The highest of a vector's numbers, in every lane."""
        return self.everywhere(b, b.call(self._highest, [vector]))

    def everywhere(self, b: Any, number: Any) -> Any:
        """A number in every lane."""
        kind = self.ir.VectorType(number.type, self.lanes)
        undefined = self.ir.Constant(kind, self.ir.Undefined)
        zero = self.ir.Constant(self.i32, 0)
        return self.shuffle(b, b.insert_element(undefined, number, zero), [0] * self.lanes)

    def shuffle(self, b: Any, vector: Any, lanes: Sequence[int], second: Any = None) -> Any:
        """The numbers in these lanes, which go on through the second vector."""
        mask = self.ir.Constant(self.ir.VectorType(self.i32, len(lanes)), list(lanes))
        if second is None:
            second = self.ir.Constant(vector.type, self.ir.Undefined)
        return b.shuffle_vector(vector, second, mask)

    def all(self, value: float) -> Any:
        """A constant in every lane."""
        return self.ir.Constant(self.floats, [value] * self.lanes)

    def exp2(self, b: Any, x: Any) -> Any:
        """2**x for a vector whose numbers are at most 0; 0 where the result is no normal number."""
        whole = b.fadd(x, self.all(_MAGIC))
        part = b.fsub(x, b.fsub(whole, self.all(_MAGIC)))
        power = self.all(_SERIES[-1])
        for factor in reversed(_SERIES[:-1]):
            power = b.call(self.fma, [power, part, self.all(factor)])
        shift = self.ir.Constant(self.ints, [23] * self.lanes)
        exponent = b.shl(b.bitcast(whole, self.ints), shift)
        power = b.bitcast(b.add(b.bitcast(power, self.ints), exponent), self.floats)
        # The comparison is false for NaN, which stays NaN.
        small = b.fcmp_ordered("<", x, self.all(-125.0))
        return b.select(small, self.all(0.0), power)

    def softmax_weight(self, b: Any, below: Any, scale: float) -> Any:
        """exp(`scale * below`), where `below` are a row's scores less its highest score."""
        return self.exp2(b, b.fmul(below, self.all(scale / math.log(2))))
