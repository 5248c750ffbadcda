"""Triton kernels on the CPU, in this process, beside the compiler.

Triton decides when a kernel is decorated whether it is interpreted, so its `TRITON_INTERPRET=1` has
to stand before anything is imported. Here the kernels are wrapped anew for as long as a test runs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from kernels.kernel_globals import replaced
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

__all__ = ["PATCHED", "interpreted"]

#: What the interpreter changes while a kernel runs. Functions that a kernel calls are changed for
#: too, and not changed back.
PATCHED = (
    tl,
    tl.core,
    tl.math,
    tl.tensor,
    tl.dtype,
    tl.block_type,
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
    before = [dict(vars(owner)) for owner in PATCHED]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            patch.setattr(interpreter, "_convert_float", _convert)
            patch.setattr(interpreter, "_patch_lang", _patched_once())
            # Most of a program's time would go into these: they make the same again and again.
            patch.setattr(interpreter, "_get_np_dtype", _numpy_type)
            patch.setattr(tl.tensor, "__init__", _begin_tensor)
            patch.setattr(tl.block_type, "__init__", _begin_block_type)
            patch.setattr(tl.dtype, "__eq__", _same_type)
            patch.setattr(TritonSemantic, "broadcast_impl_value", _broadcast)
            # Whether integers overflow is computed for assertions, which only debugging makes.
            options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
            patch.setattr(interpreter.interpreter_builder, "options", options)
            # Infinities and NaN come silently, as on a GPU; what comes of them the test checks.
            with (
                np.errstate(all="ignore"),
                warnings.catch_warnings(),
                replaced(lambda kernel: _interpreted(kernel.fn), "triton.language"),
            ):
                # Triton 3.6 takes a loop's bounds from arrays of one element.
                warnings.filterwarnings("ignore", "Conversion of an array", DeprecationWarning)
                yield
    finally:
        for owner, old in zip(PATCHED, before, strict=True):
            now = dict(vars(owner))
            # What was inherited before is an attribute of the class's own since.
            for name in now.keys() - old.keys():
                delattr(owner, name)
            for name, value in old.items():
                if now.get(name) is not value:
                    setattr(owner, name, value)


@cache
def _interpreted(function: Callable[..., Any]) -> Any:
    """One for all tests: to make it reads the function's signature."""
    return InterpretedFunction(function)


def _patched_once() -> Callable[[Any], Any]:
    """The interpreter's own patching of the language, once for each module of kernels. It would do
    so anew at every call of a function within a kernel, which takes longer than the call."""
    patch_lang, done = interpreter._patch_lang, set[str]()

    def patched(function: Any) -> Any:
        if function.__module__ not in done:
            done.add(function.__module__)
            patch_lang(function)
        # What is changed is put back by `interpreted`, not after each kernel.
        return interpreter._LangPatchScope()

    return patched


_numpy_type_of = interpreter._get_np_dtype
_numpy_types: dict[str, np.dtype[Any]] = {}


def _numpy_type(kind: Any) -> np.dtype[Any]:
    """As `interpreter._get_np_dtype`."""
    name = kind.scalar.name
    if name not in _numpy_types:
        _numpy_types[name] = _numpy_type_of(kind)
    return _numpy_types[name]


@cache
def _sizes(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """A tensor's `shape` and `numel`, which nothing changes."""
    return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


_SCALAR = _sizes(())


def _begin_tensor(tensor: Any, handle: Any, kind: Any) -> None:
    """As `tl.tensor.__init__`."""
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    tensor.shape, tensor.numel = kind.sizes if kind.is_block() else _SCALAR


_begin_block_type_of = tl.block_type.__init__
_block_types: dict[tuple[str, tuple[int, ...]], Any] = {}


def _begin_block_type(kind: Any, element: Any, shape: Any) -> None:
    """As `tl.block_type.__init__`, with the sizes of its tensors beside."""
    key = element.name, tuple([getattr(size, "value", size) for size in shape])
    if key not in _block_types:
        _begin_block_type_of(kind, element, shape)
        _block_types[key] = {**vars(kind), "sizes": _sizes(key[1])}
    vars(kind).update(_block_types[key])


_same_type_of = tl.dtype.__eq__


def _same_type(kind: Any, other: Any) -> bool:
    """As `tl.dtype.__eq__`."""
    return kind is other or _same_type_of(kind, other)


_broadcast_of = TritonSemantic.broadcast_impl_value


def _broadcast(semantic: Any, left: Any, right: Any) -> Any:
    """As `TritonSemantic.broadcast_impl_value`, which looks long for what to change."""
    if left.shape is right.shape:
        return left, right
    return _broadcast_of(semantic, left, right)


def _convert(values: np.ndarray[Any, Any], source: Any, target: Any, _: Any) -> Any:
    """Floating-point formats into one another, rounded to even as torch and GPUs round: the
    interpreter's own conversion carries and ties wrongly. Gives the bits, as it does."""
    bits = torch.from_numpy(np.ascontiguousarray(values)).view(torch.uint8)
    plain = bits.view(_DTYPES[source]).reshape(values.shape)
    converted = plain.to(_DTYPES[target]).view(torch.uint8)
    unsigned = np.dtype(f"uint{target.primitive_bitwidth}")
    return converted.numpy().view(unsigned).reshape(values.shape)
