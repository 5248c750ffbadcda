"""Whether Triton's kernels may be used on a device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncinfer.config import KernelTrial
from asyncinfer.kernels.dispatch import triton_is_missing
from asyncinfer.kernels.figures import KernelFigures
from asyncinfer.kernels.trial import Fault, TrialShapes, find_fault
from asyncinfer.kernels.trial_process import NoProcess, find_fault_apart
from asyncinfer.kernels.verdicts import Verdicts

__all__ = ["find_triton_fault"]


def find_triton_fault(
    shapes: TrialShapes,
    device: torch.device,
    trial: KernelTrial,
    verdicts: Verdicts | None = None,
    *,
    measured: Callable[[KernelFigures], object] | None = None,
) -> str | None:
    """What is wrong with Triton's kernels on `device` at a model's shapes, found by the `trial` of
    an engine's configuration. What a trial finds is kept in `verdicts` (None: the user's), and
    `measured` is called with each kernel that it has found right; None: no kernel is timed."""
    missing = triton_is_missing()
    if missing is not None or trial == "off":
        return missing
    verdicts = verdicts or Verdicts()
    if trial == "cached":
        kept, fault = verdicts.read(shapes, device)
        if kept:
            return None if fault is None else str(fault)
    fault = _found(shapes, device, trial, measured)
    verdicts.keep(shapes, device, fault)
    return None if fault is None else str(fault)


def _found(
    shapes: TrialShapes,
    device: torch.device,
    trial: KernelTrial,
    measured: Callable[[KernelFigures], object] | None,
) -> Fault | None:
    if trial != "inline":
        try:
            return find_fault_apart(shapes, device, measured=measured)
        except NoProcess:
            # Better tried here than not at all.
            pass
    return find_fault(shapes, device, measured=measured)
