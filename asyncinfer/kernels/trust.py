"""Decides whether Triton's and FlashInfer's kernels may be used on a device."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import torch

from asyncinfer.config import KernelTrial
from asyncinfer.kernels.dispatch import triton_is_missing
from asyncinfer.kernels.figures import KernelFigures
from asyncinfer.kernels.flashinfer import flashinfer_is_missing
from asyncinfer.kernels.trial import Fault, TrialShapes, find_fault
from asyncinfer.kernels.trial_process import NoProcess, find_fault_in_child
from asyncinfer.kernels.verdicts import Verdicts

__all__ = ["find_flashinfer_fault", "find_triton_fault"]

_FLASHINFER: Final = "asyncinfer.kernels.flashinfer"


def find_triton_fault(
    shapes: TrialShapes,
    device: torch.device,
    trial: KernelTrial,
    verdicts: Verdicts | None = None,
    *,
    measured: Callable[[KernelFigures], object] | None = None,
) -> str | None:
    """The fault of Triton's kernels on `device` at a model's shapes, found by the `trial` of an
    engine's configuration. Verdicts are kept in `verdicts` (None: the user's), and `measured` is
    called for each kernel that is right; None: no kernel is timed."""
    missing = triton_is_missing()
    if missing is not None or trial == "off":
        return missing
    return _judged(shapes, device, trial, verdicts or Verdicts(), measured)


def find_flashinfer_fault(
    shapes: TrialShapes,
    device: torch.device,
    trial: KernelTrial,
    verdicts: Verdicts | None = None,
    *,
    measured: Callable[[KernelFigures], object] | None = None,
) -> str | None:
    """As `find_triton_fault`, for FlashInfer's attention."""
    missing = flashinfer_is_missing()
    if missing is not None or trial == "off":
        return missing
    verdicts = verdicts or Verdicts(library="flashinfer-python")
    return _judged(shapes, device, trial, verdicts, measured, _FLASHINFER)


def _judged(
    shapes: TrialShapes,
    device: torch.device,
    trial: KernelTrial,
    verdicts: Verdicts,
    measured: Callable[[KernelFigures], object] | None,
    kernels: str | None = None,
) -> str | None:
    """The verdict on the module called `kernels`; None: on Triton's."""
    if trial == "cached":
        kept, fault = verdicts.read(shapes, device)
        if kept:
            return None if fault is None else str(fault)
    fault = _found(shapes, device, trial, measured, kernels)
    verdicts.keep(shapes, device, fault)
    return None if fault is None else str(fault)


def _found(
    shapes: TrialShapes,
    device: torch.device,
    trial: KernelTrial,
    measured: Callable[[KernelFigures], object] | None,
    kernels: str | None,
) -> Fault | None:
    if trial != "inline":
        try:
            options: dict[str, Any] = {} if kernels is None else {"kernels": kernels}
            return find_fault_in_child(shapes, device, measured=measured, **options)
        except NoProcess:
            # A trial in this process is better than none.
            pass
    module = None if kernels is None else import_module(kernels)
    return find_fault(shapes, device, module, measured=measured)
