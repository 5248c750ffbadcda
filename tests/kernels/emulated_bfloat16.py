"""What native code for bfloat16 numbers computes, on processors without the instructions.

Matrix units (AMX) are emulated by numpy. Their instructions are Intel's, Architecture Instruction
Set Extensions, chapter 3.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pytest

from asyncinfer.kernels.native import calls
from asyncinfer.kernels.native.assembly import Assembly
from asyncinfer.kernels.native.blocked import matrix_units
from asyncinfer.kernels.native.host import Host, compiled, host

__all__ = ["compiled_or_emulated", "emulate_bfloat16"]

#: Bytes of a row of a register, of a register, and how many registers there are.
_ROW_BYTES, _ROWS, _REGISTERS = 64, 16, 8


class _Units:
    """The registers of one thread."""

    def __init__(self) -> None:
        self._bytes = np.zeros((_REGISTERS, _ROWS, _ROW_BYTES), np.uint8)
        #: Rows and bytes of a row of each register.
        self._sizes = [(0, 0)] * _REGISTERS

    def configure(self, place: int) -> None:
        about = _memory(place, 1, _ROW_BYTES, _ROW_BYTES)[0]
        assert about[0] == 1
        widths, rows = about[16:32].view(np.uint16), about[48:56]
        self._sizes = [(int(n), int(wide)) for n, wide in zip(rows, widths, strict=True)]
        assert all(n <= _ROWS and wide <= _ROW_BYTES for n, wide in self._sizes)
        self._bytes[:] = 0

    def release(self) -> None:
        self._sizes = [(0, 0)] * _REGISTERS

    def zero(self, register: int) -> None:
        self._bytes[register] = 0

    def load(self, register: int, place: int, stride: int) -> None:
        rows, wide = self._sizes[register]
        self._bytes[register] = 0
        self._bytes[register, :rows, :wide] = _memory(place, rows, wide, stride)

    def store(self, register: int, place: int, stride: int) -> None:
        rows, wide = self._sizes[register]
        _memory(place, rows, wide, stride)[:] = self._bytes[register, :rows, :wide]

    def add(self, sums: int, left: int, right: int) -> None:
        (rows, wide), (left_rows, left_wide), (right_rows, right_wide) = (
            self._sizes[each] for each in (sums, left, right)
        )
        assert (rows, wide, left_wide) == (left_rows, right_wide, 4 * right_rows)
        # Columns are pairs of rows: `[rows, columns, 2]`.
        columns = _wide(self._bytes[right]).reshape(_ROWS, -1, 2).swapaxes(1, 2).reshape(32, -1)
        # Rows that nobody reads hold any numbers.
        with np.errstate(all="ignore"):
            self._bytes[sums].view(np.float32)[:] += _wide(self._bytes[left]) @ columns


def _memory(place: int, rows: int, wide: int, stride: int) -> Any:
    """uint8 `[rows, wide]` of the process's memory."""
    whole = (ctypes.c_char * (stride * (rows - 1) + wide)).from_address(place)
    return np.ndarray((rows, wide), np.uint8, whole, strides=(stride, 1))


def _wide(numbers: Any) -> Any:
    """bfloat16 numbers as float32, of the last axis of their bytes."""
    return (numbers.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


_of_threads: defaultdict[int, _Units] = defaultdict(_Units)


def _instruction(what: Callable[..., None], *kinds: Any) -> Any:
    """A function that native code calls in the place of an instruction."""

    def run(*given: int) -> None:
        what(_of_threads[threading.get_ident()], *given)

    return ctypes.CFUNCTYPE(None, *kinds)(run)


_NUMBER, _MEMORY = ctypes.c_uint8, (ctypes.c_void_p, ctypes.c_int64)
_INSTRUCTIONS: Final = {
    "ldtilecfg": _instruction(_Units.configure, ctypes.c_void_p),
    "tilerelease": _instruction(_Units.release),
    "tilezero": _instruction(_Units.zero, _NUMBER),
    "tileloadd64": _instruction(_Units.load, _NUMBER, *_MEMORY),
    "tilestored64": _instruction(_Units.store, _NUMBER, *_MEMORY),
    "tdpbf16ps": _instruction(_Units.add, _NUMBER, _NUMBER, _NUMBER),
}


#: The instruction for pairs of numbers (`vdpbf16ps`), and what is called in its place.
_PAIRS: Final = "llvm.x86.avx512bf16.dpbf16ps.512"
_OWN_PAIRS: Final = "emulated_pairs"


def _pairs() -> str:
    """The assembly of a function that does what the instruction does."""
    words = "<16 x i32>"
    low = f"<{', '.join(['i32 16'] * 16)}>"
    high = f"<{', '.join(['i32 -65536'] * 16)}>"
    lines = [
        f"define internal <16 x float> @{_OWN_PAIRS}"
        "(<16 x float> %sums.0, <32 x bfloat> %a, <32 x bfloat> %b) alwaysinline {",
        *(f"%{name}.bits = bitcast <32 x bfloat> %{name} to {words}" for name in "ab"),
        *(f"%{name}.0.bits = and {words} %{name}.bits, {high}" for name in "ab"),
        *(f"%{name}.1.bits = shl {words} %{name}.bits, {low}" for name in "ab"),
    ]
    for half in (0, 1):
        for name in "ab":
            half_bits = f"%{name}.{half}.bits"
            lines.append(f"%{name}.{half} = bitcast {words} {half_bits} to <16 x float>")
        given = ", ".join(f"<16 x float> %{name}.{half}" for name in ("a", "b", "sums"))
        lines.append(f"%sums.{half + 1} = call <16 x float> @llvm.fma.v16f32({given})")
    return "\n".join([*lines, "ret <16 x float> %sums.2", "}", ""])


def compiled_or_emulated(
    what: str,
    text: Callable[[], str],
    target: Host,
    names: Sequence[str],
    symbols: Mapping[str, int],
) -> tuple[int, ...]:
    """What `compiled` gives, without instructions that the processor lacks."""
    functions: dict[str, int] = {}
    replaced: dict[str, str] = {}
    if not matrix_units():
        for name, call in _INSTRUCTIONS.items():
            replaced[f"llvm.x86.{name}"] = own = f"emulated_{name}"
            functions[own] = ctypes.cast(call, ctypes.c_void_p).value or 0

    def possible() -> str:
        made = text()
        for name, own in replaced.items():
            made = made.replace(name, own)
        if _PAIRS in made and not target.rounds:
            declared = f'declare <16 x float> @"{_PAIRS}"'
            lines = [line for line in made.splitlines() if declared not in line]
            made = "\n".join([*lines, _pairs()]).replace(f'@"{_PAIRS}"', f"@{_OWN_PAIRS}")
        return made

    return compiled(
        f"{what}, emulated {sorted(replaced)}", possible, target, names, {**symbols, **functions}
    )


def emulate_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have native code do without instructions for bfloat16 that the processor lacks. Skip the test
    where it lacks the vectors that go with them."""
    here = host()
    if here is None or here.lanes < 16:
        pytest.skip("a processor without AVX-512")
    monkeypatch.setattr(calls, "compiled", compiled_or_emulated)
    if not here.rounds:
        original = Assembly.rounded

        def rounded(self: Assembly, b: Any, vector: Any, **_: bool) -> Any:
            return original(self, b, vector, at_once=False)

        monkeypatch.setattr(Assembly, "rounded", rounded)
