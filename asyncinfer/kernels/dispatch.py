"""`dispatched` makes an operator of a kernel: it checks arguments and picks an implementation.

A kernel runs in Triton on a GPU, and elsewhere in native code or in torch. The torch implementation
is in `reference/`, Triton's of the same name in `triton/`, LLVM's in `native/`, the check of the
arguments in `ops/`. `trial_cases.py` says what is tried on a user's device.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import ParamSpec, TypeVar, cast

import torch

from asyncinfer.kernels.rehearsal import device_of

__all__ = [
    "CannotRecord",
    "KernelError",
    "check",
    "dispatched",
    "distrust",
    "distrusted",
    "has_triton_kernel",
    "kernel_for",
    "triton_is_missing",
    "use_triton",
    "wants_triton",
]

P = ParamSpec("P")
R = TypeVar("R")

_thread = threading.local()


class KernelError(RuntimeError):
    """A Triton kernel could not be compiled or launched. It has changed nothing, unless the device
    has failed."""


class CannotRecord(Exception):
    """What was to be recorded does more than call native functions."""


def dispatched(
    reference: Callable[P, R],
    check: Callable[..., None],
    native: Callable[P, R | None] | None = None,
) -> Callable[P, R]:
    """The operator of a reference kernel, with the same signature.

    The operator hands its arguments to `check`, which raises `ValueError` for shapes and dtypes
    that do not fit. Then it runs the kernel for the device of the first argument. An error of a
    Triton kernel becomes a `KernelError`, unless memory has run out. On a CPU `native` is asked
    before the reference kernel, and returns None for arguments that it does not compute.
    """

    @functools.wraps(reference)
    def operator(*args: P.args, **kwargs: P.kwargs) -> R:
        check(*args, **kwargs)
        first = args[0] if args else next(iter(kwargs.values()))
        kernel = kernel_for(reference, cast("torch.Tensor", first))
        if kernel is reference:
            found = None if native is None else native(*args, **kwargs)
            return reference(*args, **kwargs) if found is None else found
        try:
            return kernel(*args, **kwargs)
        except (torch.OutOfMemoryError, MemoryError, CannotRecord):
            raise
        except Exception as error:
            # Compilers, drivers and launchers each raise errors of their own classes.
            lines = str(error).strip().splitlines() or [""]
            why = f"{reference.__name__}: {type(error).__name__}: {lines[-1][:200]}"
            raise KernelError(why) from error

    return operator


def check(right: bool, name: str, *tensors: torch.Tensor | None) -> None:
    """Raises `ValueError`, with the shapes and dtypes of `tensors`, unless they are `right` for the
    kernel `name`."""
    if not right:
        seen = ", ".join("None" if t is None else f"{tuple(t.shape)} {t.dtype}" for t in tensors)
        raise ValueError(f"kernel {name}: shapes or dtypes that do not fit: {seen}")


def kernel_for(reference: Callable[P, R], tensor: torch.Tensor) -> Callable[P, R]:
    """The Triton kernel with the name of `reference` if `tensor` is on a GPU and there is one, else
    `reference`."""
    if not has_triton_kernel(reference.__name__, tensor):
        return reference
    kernel: Callable[P, R] = getattr(_triton(), reference.__name__)
    return kernel


def has_triton_kernel(name: str, tensor: torch.Tensor) -> bool:
    """Whether the kernel runs in Triton for tensors on this one's device."""
    on_gpu = tensor.is_cuda or (tensor.is_meta and device_of(tensor.device).type == "cuda")
    if not on_gpu or not wants_triton():
        return False
    module = _triton()
    return module is not None and name in module.__all__


def triton_is_missing() -> str | None:
    """Why there are no kernels in Triton, whatever the GPU; None where there are."""
    if torch.version.hip is not None:
        # torch calls AMD's GPUs CUDA devices, too.
        return "the kernels were never compiled for AMD's GPUs"
    # Triton's package does not exist for every system.
    return "triton is not installed" if find_spec("triton") is None else None


def use_triton(wanted: bool) -> None:
    """Set whether operators that this thread calls from now on run Triton's kernels on a GPU. Other
    threads, such as another engine's, are not affected."""
    _thread.triton, _thread.fault = wanted, None


def wants_triton() -> bool:
    """Whether this thread's operators run Triton's kernels on a GPU, which `use_triton` sets."""
    wanted: bool = getattr(_thread, "triton", True)
    return wanted


def distrust(fault: str) -> None:
    """Have this thread do without Triton's kernels, because of `fault`."""
    use_triton(False)
    _thread.fault = fault


def distrusted() -> str | None:
    """Why this thread does without Triton's kernels; None where no fault of them is known."""
    fault: str | None = getattr(_thread, "fault", None)
    return fault


@functools.cache
def _triton() -> ModuleType | None:
    # Only a GPU needs Triton, which takes long to import.
    if triton_is_missing():
        return None
    from asyncinfer.kernels import triton

    return triton
