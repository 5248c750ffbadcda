"""`launched`: `triton.jit` for the functions that the host launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from asyncinfer.kernels.rehearsal import Launch, wanted

__all__ = ["launched"]


def launched(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator with the options of `triton.jit`. In a rehearsal (`kernels/rehearsal.py`) the
    function's launches are handed on in place of being made."""

    def made(function: Callable[..., Any]) -> Any:
        kernel = triton.jit(function, **options)
        # Triton's interpreter compiles nothing, and its kernels are of another class.
        return _Kernel(function, **options) if isinstance(kernel, JITFunction) else kernel

    return made


class _Kernel(JITFunction):  # type: ignore[misc]
    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        take = wanted()
        if take is None or warmup:
            return super().run(*args, grid=grid, warmup=warmup, **options)
        given = dict(zip(self.arg_names, args, strict=False)) | options
        # Triton's warmup takes a dtype in place of a tensor. It assumes the alignment of addresses
        # that torch's allocator gives.
        own = [_without_memory(given.pop(name)) for name in self.arg_names]
        key = (self.fn.__module__, self.fn.__qualname__, *self._compiled_for(own), repr(given))
        take(Launch(key, partial(self.warmup, *own, grid=(1,), **given)))
        return None

    def _compiled_for(self, values: Sequence[Any]) -> Iterator[str]:
        """The part of each argument that the compiled code depends on."""
        for parameter, value in zip(self.params, values, strict=True):
            free = not parameter.is_constexpr
            if free and (isinstance(value, float) or parameter.do_not_specialize):
                yield type(value).__name__
            else:
                yield repr(value)


def _without_memory(value: Any) -> Any:
    return value.dtype if isinstance(value, torch.Tensor) else value
