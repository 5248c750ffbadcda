"""Which implementation of a kernel runs: Triton's on a GPU, torch's elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import ParamSpec, TypeVar, cast

import torch

__all__ = ["dispatched", "has_triton_kernel", "kernel_for"]

P = ParamSpec("P")
R = TypeVar("R")


def dispatched(reference: Callable[P, R], check: Callable[..., None]) -> Callable[P, R]:
    """The operator of a reference kernel, with its signature: hands the arguments to `check`, which
    raises `ValueError` for shapes and dtypes that do not fit, then runs the kernel for the device
    of the first one."""

    @functools.wraps(reference)
    def operator(*args: P.args, **kwargs: P.kwargs) -> R:
        check(*args, **kwargs)
        first = args[0] if args else next(iter(kwargs.values()))
        return kernel_for(reference, cast("torch.Tensor", first))(*args, **kwargs)

    return operator


def kernel_for(reference: Callable[P, R], tensor: torch.Tensor) -> Callable[P, R]:
    """The Triton kernel of the same name if `tensor` is on a GPU and there is one, else
    `reference`."""
    if not has_triton_kernel(reference.__name__, tensor):
        return reference
    kernel: Callable[P, R] = getattr(_triton(), reference.__name__)
    return kernel


def has_triton_kernel(name: str, tensor: torch.Tensor) -> bool:
    """Whether the kernel runs in Triton for tensors on this one's device."""
    if not tensor.is_cuda:
        return False
    module = _triton()
    return module is not None and name in module.__all__


@functools.cache
def _triton() -> ModuleType | None:
    # Only a GPU needs Triton, which is not made for every system and takes long to import.
    if find_spec("triton") is None:
        return None
    from asyncinfer.kernels import triton

    return triton
