"""Triton kernels on the CPU, in this process, beside the compiler.

Triton decides when a kernel is decorated whether it is interpreted, so its `TRITON_INTERPRET=1` has
to stand before anything is imported. Here the kernels are wrapped anew for as long as a test runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import triton.language as tl
from kernels.kernel_globals import replaced
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


@contextmanager
def interpreted() -> Iterator[None]:
    """Within, calls of `asyncinfer.kernels.triton` run in Triton's interpreter, on CPU tensors.

    float32 and float16 only: its `tl.dot` of bfloat16 is wrong. A kernel must call the language's
    own functions as `tl.sum(x)`, not as `x.sum()`: methods are out of reach.
    """
    before = [dict(vars(owner)) for owner in _PATCHED]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        # Infinities and NaN come silently, as on a GPU; what comes of them is the test's to check.
        with (
            np.errstate(all="ignore"),
            replaced(lambda function: InterpretedFunction(function.fn), "triton.language"),
        ):
            yield
    for owner, old in zip(_PATCHED, before, strict=True):
        for name, value in old.items():
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)
