"""Triton kernels on the CPU, in this process, beside the compiler.

Triton decides when a kernel is decorated whether it is interpreted, so its `TRITON_INTERPRET=1` has
to stand before anything is imported. Here the kernels are wrapped anew for as long as a test runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from kernels.kernel_globals import replaced
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

__all__ = ["interpreted"]

#: What the interpreter changes while a kernel runs. Functions that a kernel calls are changed for
#: too, and not changed back.
_PATCHED = (
    tl,
    tl.core,
    tl.math,
    tl.tensor,
    tl.dtype,
    tl.core.tensor_descriptor_base,
)

_DTYPES = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}


@contextmanager
def interpreted() -> Iterator[None]:
    """Within, calls of `asyncinfer.kernels.triton` run in Triton's interpreter, on CPU tensors.

    float32 and float16 only: its `tl.dot` of bfloat16 is wrong. A kernel must call the language's
    own functions as `tl.sum(x)`, not as `x.sum()`: methods are out of reach.
    """
    before = [dict(vars(owner)) for owner in _PATCHED]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            patch.setattr(interpreter, "_convert_float", _convert)
            # Infinities and NaN come silently, as on a GPU; what comes of them the test checks.
            with (
                np.errstate(all="ignore"),
                warnings.catch_warnings(),
                replaced(lambda function: InterpretedFunction(function.fn), "triton.language"),
            ):
                # Triton 3.6 takes a loop's bounds from arrays of one element.
                warnings.filterwarnings("ignore", "Conversion of an array", DeprecationWarning)
                yield
    finally:
        for owner, old in zip(_PATCHED, before, strict=True):
            for name, value in old.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)


def _convert(values: np.ndarray[Any, Any], source: Any, target: Any, _: Any) -> Any:
    """Floating-point formats into one another, rounded to even as torch and GPUs round: the
    interpreter's own conversion carries and ties wrongly. Gives the bits, as it does."""
    bits = torch.from_numpy(np.ascontiguousarray(values)).view(torch.uint8)
    plain = bits.view(_DTYPES[source]).reshape(values.shape)
    converted = plain.to(_DTYPES[target]).view(torch.uint8)
    unsigned = np.dtype(f"uint{target.primitive_bitwidth}")
    return converted.numpy().view(unsigned).reshape(values.shape)
