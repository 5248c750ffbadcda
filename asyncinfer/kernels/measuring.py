"""Measures on a device what only it can tell: which tiles, which split, and how to launch."""

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

#: What is not faster than the derived choice by so much is not taken in its place: a timing varies.
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
    #: Each with its seconds, the derived one first. One that cannot be compiled or launched there,
    #: or gives other results, is left out.
    times: tuple[tuple[Any, float], ...]

    @property
    def best(self) -> Any:
        """What to take."""
        derived, own = self.times[0]
        fastest, seconds = min(self.times, key=lambda each: each[1])
        return fastest if seconds < _WORTH * own else derived

    @property
    def gain(self) -> float:
        """How many times as fast the best is as the derived one."""
        best: float = dict(self.times)[self.best]
        return self.times[0][1] / best


def measure_choices(
    shapes: TuningShapes,
    device: torch.device,
    kernels: ModuleType | None = None,
    *,
    clock: Clock | None = None,
    told: Callable[[str], object] = lambda title: None,
) -> Iterator[Measured]:
    """Time the candidates of each kernel of a model on `device`, one bucket after the other.

    `kernels`: None takes Triton's. `clock`: None takes the device's own. `told` is called with the
    title of each case before it runs. A case that the device has no memory for is left out, and so
    is one whose derived choice fails.
    """
    module = kernels or import_module("asyncinfer.kernels.triton")
    there = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with there, torch.inference_mode():
        clock = clock or DeviceClock(device)
        for case in measured_cases(shapes, device):
            told(case.title)
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
                # Whatever a compiler or a launcher raises of one candidate.
                continue
