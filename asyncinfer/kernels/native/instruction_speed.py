"""How fast a processor's instruction for pairs of bfloat16 numbers is.

`vdpbf16ps` does two products in each lane where a fused multiply-add does one. Some processors
begin one of either in each cycle. Others begin one of the former where they begin four of the
latter, and are faster with numbers that are widened to float32.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final

from asyncinfer.kernels.native.assembly import Assembly
from asyncinfer.kernels.native.host import Host, compiled, compiled_once

__all__ = ["pairs_are_fast"]

#: Instructions in a turn of the measured loop, none of which waits for another one's result.
_INDEPENDENT: Final = 16
#: Turns of the loop, which take some tens of microseconds, and how often it is measured.
_TURNS, _TIMES = 4000, 10
#: How many multiply-adds an instruction for pairs may take as long as: it does the products of two,
#: and widened numbers take a fifth more instructions.
_WORTH: Final = 2.4


def speed_code(lanes: int) -> str:
    """The assembly of `pairs(into, turns)` and `fused(into, turns)`: so many turns of each
    instruction, whose results go to `into` float32 `[lanes]`."""
    a = Assembly("instruction_speed", lanes)
    kinds = [a.floats, a.halves, a.halves]
    pairs = a.declare(f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}", a.floats, *kinds)

    def pair(b: Any, sums: Any, numbers: Any) -> Any:
        halves = b.bitcast(numbers, a.halves)
        return b.call(pairs, [sums, halves, halves])

    def fuse(b: Any, sums: Any, numbers: Any) -> Any:
        return b.call(a.fma, [numbers, numbers, sums])

    for name, instruction in (("pairs", pair), ("fused", fuse)):
        _emit(a, name, instruction)
    return str(a.module)


def _emit(a: Assembly, name: str, instruction: Callable[[Any, Any, Any], Any]) -> None:
    function, b = a.begin(name, a.pointer, a.i64, public=True)
    into, turns = function.args
    numbers = a.load(b, into, a.integer(0))

    def turn(b: Any, _: Any, sums: Sequence[Any]) -> Sequence[Any]:
        return [instruction(b, each, numbers) for each in sums]

    result = numbers
    for each in a.loop(b, turns, 1, turn, [numbers] * _INDEPENDENT):
        result = b.fadd(result, each)
    a.store(b, result, into, a.integer(0))
    b.ret_void()


@compiled_once
def pairs_are_fast(target: Host) -> bool | None:
    """Whether products by `vdpbf16ps` are faster than those of widened numbers. The first call
    measures, which takes less than a millisecond once the code is compiled; the least time counts,
    since a disturbance only makes it longer. None where the code cannot be made."""
    lanes = target.lanes
    text = functools.partial(speed_code, lanes)
    places = compiled(f"instruction speed, {lanes}", text, target, ("pairs", "fused"), {})
    loop = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
    loops = [loop(place) for place in places]
    numbers = (ctypes.c_float * lanes)()
    least = [inf] * len(loops)
    for _ in range(_TIMES):
        for index, run in enumerate(loops):
            began = time.perf_counter()
            run(ctypes.addressof(numbers), _TURNS)
            least[index] = min(least[index], time.perf_counter() - began)
    pairs, fused = least
    return pairs <= _WORTH * fused
