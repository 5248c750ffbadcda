"""Where Triton functions are looked up when a kernel runs, and how a test puts others there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from triton.runtime.jit import JITFunction

import asyncinfer.kernels.triton

__all__ = ["replaced"]

_PACKAGE = asyncinfer.kernels.triton.__name__


@contextmanager
def replaced(make: Callable[[JITFunction[Any]], object], *packages: str) -> Iterator[None]:
    """Within, `make(function)` stands for each jitted function of the package's kernels, and of
    what else `packages` name: under every name that the modules there have for it."""
    made: dict[int, object] = {}
    with pytest.MonkeyPatch.context() as patch:
        roots = tuple(f"{root}." for root in (_PACKAGE, *packages))
        for name, module in list(sys.modules.items()):
            if not f"{name}.".startswith(roots):
                continue
            for attribute, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    if id(value) not in made:
                        made[id(value)] = make(value)
                    patch.setattr(module, attribute, made[id(value)])
        yield
