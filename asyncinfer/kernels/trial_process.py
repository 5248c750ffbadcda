"""A trial in a process of its own: a kernel that ends its process, hangs or leaves its device in an
error does nothing to the engine's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, Final

import torch

from asyncinfer.kernels.apart import NoProcess, answer, ask_apart
from asyncinfer.kernels.figures import KernelFigures
from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.kernels.trial import Fault, TrialShapes, find_fault

__all__ = ["NoProcess", "find_fault_apart", "shapes_as_json", "shapes_from_json"]

#: Seconds: the kernels compile once, in about half a minute. What takes longer hangs.
TIME_LIMIT: Final = 300.0
_TRITON: Final = "asyncinfer.kernels.triton"
#: How a line begins that tells figures.
_FIGURES: Final = '{"figures": '


def find_fault_apart(
    shapes: TrialShapes,
    device: torch.device,
    *,
    kernels: str = _TRITON,
    time_limit: float = TIME_LIMIT,
    measured: Callable[[KernelFigures], object] | None = None,
) -> Fault | None:
    """`find_fault` of the module called `kernels`, in a process that ends with it, after
    `time_limit` seconds at most. A process that dies or hangs is a fault. `measured` is called at
    its end, with the kernels that were right before. Raises `NoProcess`."""
    request = {
        "shapes": shapes_as_json(shapes),
        "device": str(device),
        "kernels": kernels,
        "timed": measured is not None,
    }
    told = ask_apart(__name__, request, time_limit)
    if measured is not None:
        for figures in _measured(told.lines):
            measured(figures)
    return _read(told.lines, told.end, lasting=told.lasting)


def _measured(lines: Sequence[str]) -> Iterator[KernelFigures]:
    """What was told of the kernels that are right."""
    for line in lines:
        if line.startswith(_FIGURES):
            yield KernelFigures(**json.loads(line)["figures"])


def _read(lines: Sequence[str], end: str, *, lasting: bool) -> Fault | None:
    """The verdict, after the names of the kernels that were tried. Where there is none, `end` is
    what became of the process."""
    lines = [line for line in lines if not line.startswith(_FIGURES)]
    if not lines:
        raise NoProcess(f"the trial's process {end} before it tried a kernel")
    try:
        answer = json.loads(lines[-1])
    except ValueError:
        return Fault(f"{lines[-1]}: its trial {end}", lasting=lasting)
    if "unavailable" in answer:
        raise NoProcess(str(answer["unavailable"]))
    found = answer["fault"]
    return None if found is None else Fault(**found)


def shapes_as_json(shapes: TrialShapes) -> dict[str, Any]:
    """As `shapes_from_json` reads it."""
    return {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for name, value in dataclasses.asdict(shapes).items()
    }


def shapes_from_json(told: dict[str, Any]) -> TrialShapes:
    """What `shapes_as_json` wrote."""
    values = {
        name: getattr(torch, value) if isinstance(value, str) else value
        for name, value in told.items()
    }
    layouts = tuple(WeightLayout(**layout) for layout in values.pop("layouts"))
    return TrialShapes(**values, layouts=layouts)


def main() -> None:
    """The other process: the name of each kernel before it is tried, and at last the verdict."""
    answer(_try)


def _try(request: dict[str, Any], device: torch.device, tell: Callable[[str], None]) -> None:
    def tell_figures(figures: KernelFigures) -> None:
        tell(json.dumps({"figures": dataclasses.asdict(figures)}))

    tell("their import")
    try:
        kernels = import_module(request["kernels"])
        measured = tell_figures if request["timed"] else None
        shapes = shapes_from_json(request["shapes"])
        fault = find_fault(shapes, device, kernels, told=tell, measured=measured)
    except ImportError as error:
        fault = Fault(f"{type(error).__name__}: {error}", lasting=False)
    tell(json.dumps({"fault": None if fault is None else dataclasses.asdict(fault)}))
