"""A trial of Triton's kernels on a device, before a model's weights are loaded there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Final

import torch

from asyncinfer.kernels import reference
from asyncinfer.kernels.figures import KernelFigures, Stopwatch
from asyncinfer.kernels.trial_cases import Case, TrialShapes, cases

__all__ = ["ALLOWED", "Fault", "TrialShapes", "find_fault"]

#: Largest error beside the reference in float32, as a share of the largest number.
ALLOWED: Final = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault of a kernel."""

    reason: str
    #: Whether the next trial would find it again. A kernel that cannot be compiled today may
    #: compile once somebody has installed a compiler.
    lasting: bool

    def __str__(self) -> str:
        return self.reason


def find_fault(
    shapes: TrialShapes,
    device: torch.device,
    kernels: ModuleType | None = None,
    *,
    on_kernel: Callable[[str], object] = lambda kernel: None,
    measured: Callable[[KernelFigures], object] | None = None,
) -> Fault | None:
    """The fault of the first of `kernels` (None: Triton's) that cannot be run on `device`, differs
    from the reference kernel in float32, or differs from itself when it is run again. None: a trial
    finds no fault.

    Kernels that are missing in the module's `__all__` are not tried. `on_kernel` is called with the
    name of each kernel before it runs, and `measured` with the figures of each that is right. None:
    no kernel is timed.
    """
    tried = "Triton"
    try:
        module = kernels or import_module("asyncinfer.kernels.triton")
        # Triton launches on the thread's current device, wherever the tensors are.
        there = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with there, torch.inference_mode():
            watch = None if measured is None else _stopwatch(module, device)
            listed = getattr(module, "__all__", None)
            for tried, case in cases(shapes, device):
                if listed is not None and tried.split()[0] not in listed:
                    continue
                on_kernel(tried)
                found = _judged(tried, case, shapes.dtype, module)
                if isinstance(found, str):
                    return Fault(found, lasting=True)
                if measured is not None:
                    measured(_figures(tried, found, case, shapes.dtype, watch))
    except Exception as error:
        # A compiler, a driver or a device may raise anything.
        lines = str(error).strip().splitlines() or [""]
        return Fault(f"{tried}: {type(error).__name__}: {lines[-1][:200]}", lasting=False)
    return None


def _judged(name: str, case: Case, dtype: torch.dtype, kernels: ModuleType) -> str | float:
    """The fault of a kernel, or else its largest error."""
    largest = 0.0
    found, again = case(kernels, dtype), case(kernels, dtype)
    for one, other, right in zip(found, again, case(reference, torch.float32), strict=True):
        if not torch.equal(one, other):
            return f"{name} gives other numbers when it is run again"
        if not right.is_floating_point():
            if not torch.equal(one, right):
                return f"{name} is wrong"
            continue
        error = float((one.float() - right).abs().max() / right.abs().max())
        # Written so that NaN is a fault, too.
        if not error <= ALLOWED[dtype]:
            return f"{name} is wrong by {error:.1e} of its largest number"
        largest = max(largest, error)
    return largest


def _stopwatch(kernels: ModuleType, device: torch.device) -> Stopwatch | None:
    try:
        return Stopwatch(kernels, device)
    except torch.OutOfMemoryError:
        # A kernel that cannot be timed may still be right.
        return None


def _figures(
    name: str, error: float, case: Case, dtype: torch.dtype, watch: Stopwatch | None
) -> KernelFigures:
    seconds = floor = None
    if watch is not None:
        case(watch, dtype)
        seconds, floor = watch.seconds, watch.floor
    return KernelFigures(
        kernel=name, error=error, allowed=ALLOWED[dtype], seconds=seconds, floor=floor
    )
