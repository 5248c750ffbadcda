"""The fastest tiles and splits of each GPU, as measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from asyncinfer.kernels.child_process import NoProcess
from asyncinfer.kernels.choice_records import ChoiceRecords, measure_in_child
from asyncinfer.kernels.dispatch import triton_is_missing
from asyncinfer.models import ModelConfig
from asyncinfer.models.layouts import scheme_layouts
from asyncinfer.runner.device import choose_dtype, trial_shapes
from asyncinfer.runner.tuning import tuning_shapes

__all__ = ["TunedKernel", "tuned_kernels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedKernel:
    """A kernel at one bucket of shapes on one GPU, with its measured candidates."""

    device: str
    kernel: str
    #: The candidate that engines use from now on, and whether it is the one derived from counts.
    best: str
    derived: bool
    #: Seconds of each right candidate, the derived one first.
    seconds: dict[str, float]
    #: How many times as fast the best is as the derived one.
    gain: float


def tuned_kernels(
    config: ModelConfig, told: Callable[[str], object] = lambda what: None
) -> Iterator[TunedKernel]:
    """Measure each GPU at the model's shapes, whatever was found before, and keep the results for
    engines that open. A GPU whose measurement fails has no results."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device in (torch.device("cuda", index) for index in range(count)):
        if triton_is_missing() is not None:
            return
        told(f"tiles and splits on {device}")
        dtype = choose_dtype("auto", config.dtype or "bfloat16", device)
        trial = trial_shapes(config, dtype, dtype, scheme_layouts(config))
        shapes = tuning_shapes(config, trial)
        try:
            measured = measure_in_child(shapes, device)
        except NoProcess:
            continue
        ChoiceRecords().keep(shapes, device, measured)
        for each in measured:
            yield TunedKernel(
                device=str(device),
                kernel=each.title,
                best=str(each.best),
                derived=each.best == each.times[0][0],
                seconds={str(choice): seconds for choice, seconds in each.times},
                gain=each.gain,
            )
