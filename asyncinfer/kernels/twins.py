"""Which of a kernel's twins runs where."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from asyncinfer.kernels import reference

__all__ = ["has_triton_twin", "twin"]


def twin(name: str, tensor: torch.Tensor, prefer_reference: bool = False) -> Callable[..., Any]:
    """The kernel for the tensor's device: Triton's on CUDA if there is one, else torch's."""
    module: ModuleType | None = reference
    if not prefer_reference and has_triton_twin(name, tensor):
        module = _triton()
    function: Callable[..., Any] = getattr(module, name)
    return function


def has_triton_twin(name: str, tensor: torch.Tensor) -> bool:
    """Whether the kernel runs in Triton for tensors on this one's device."""
    if not tensor.is_cuda:
        return False
    module = _triton()
    return module is not None and name in module.__all__


@functools.cache
def _triton() -> ModuleType | None:
    """Imported beside a GPU only: Triton is not made for every system, and takes time to import."""
    if find_spec("triton") is None:
        return None
    from asyncinfer.kernels import triton

    return triton
