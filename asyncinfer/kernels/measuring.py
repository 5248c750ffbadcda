"""Measures on a device which tiles, splits and launches are fastest there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Final, Protocol

import torch

from asyncinfer.kernels.choices import Key, with_choices
from asyncinfer.kernels.device_clock import DeviceClock
from asyncinfer.kernels.measured_cases import MeasuredCase, TuningShapes, measured_cases
from asyncinfer.kernels.trial import ALLOWED

__all__ = ["Clock", "Measured", "measure_choices"]

#: A candidate replaces the derived choice only if it is faster by this factor, since timings vary.
_WORTH: Final = 0.97


class Clock(Protocol):
    """`DeviceClock`, or a test's."""

    def seconds(self, work: Callable[[], object]) -> float:
        """How long the device takes for `work`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The candidates of one kernel at one bucket of shapes."""

    key: Key
    title: str
    #: Each with its seconds, the derived one first. A candidate that cannot be compiled or
    #: launched, or that gives other results, is left out.
    times: tuple[tuple[Any, float], ...]

    @property
    def best(self) -> Any:
        """The candidate to use."""
        derived, own = self.times[0]
        fastest, seconds = min(self.times, key=lambda each: each[1])
        return fastest if seconds < _WORTH * own else derived

    @property
    def gain(self) -> float:
        """How many times as fast the best candidate is as the derived one."""
        best: float = dict(self.times)[self.best]
        return self.times[0][1] / best


def measure_choices(
    shapes: TuningShapes,
    device: torch.device,
    kernels: ModuleType | None = None,
    *,
    clock: Clock | None = None,
    on_case: Callable[[str], object] = lambda title: None,
) -> Iterator[Measured]:
    """Time the candidates of each kernel of a model on `device`, one bucket after the other.

    `kernels`: None takes Triton's. `clock`: None takes the device's own. `on_case` is called with
    each case's title before the case runs. A case is left out if the device has no memory for it,
    or if its derived choice fails.
    """
    module = kernels or import_module("asyncinfer.kernels.triton")
    there = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with there, torch.inference_mode():
        clock = clock or DeviceClock(device)
        for case in measured_cases(shapes, device):
            on_case(case.title)
            try:
                times = tuple(_times(case, shapes.trial.dtype, module, clock))
            except torch.OutOfMemoryError:
                continue
            if times and times[0][0] == case.candidates[0]:
                yield Measured(key=case.key, title=case.title, times=times)


def _times(
    case: MeasuredCase, dtype: torch.dtype, kernels: ModuleType, clock: Clock
) -> Iterator[tuple[Any, float]]:
    run = case.make()
    right: torch.Tensor | None = None
    for candidate in case.candidates:
        with with_choices({case.key: candidate}):
            try:
                found = run(kernels).float()
                if right is None:
                    # A trial has found it right.
                    right = found
                error = float((found - right).abs().max() / right.abs().max())
                if error <= ALLOWED[dtype]:
                    yield candidate, clock.seconds(lambda: run(kernels))
            except torch.OutOfMemoryError:
                raise
            except Exception:
                # One candidate may fail in a compiler or a launch.
                continue
