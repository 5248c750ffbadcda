"""Trials in a child process: a kernel that crashes, hangs or breaks its CUDA context does not harm
the engine's process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, Final

import torch

from asyncinfer.kernels.child_process import NoProcess, answer, ask_child
from asyncinfer.kernels.figures import KernelFigures
from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.kernels.trial import Fault, TrialShapes, find_fault

__all__ = ["NoProcess", "find_fault_in_child", "shapes_as_json", "shapes_from_json"]

#: Seconds. The kernels compile in about half a minute; a longer trial hangs.
TIME_LIMIT: Final = 300.0
_TRITON: Final = "asyncinfer.kernels.triton"
#: How a line with figures begins.
_FIGURES: Final = '{"figures": '


def find_fault_in_child(
    shapes: TrialShapes,
    device: torch.device,
    *,
    kernels: str = _TRITON,
    time_limit: float = TIME_LIMIT,
    measured: Callable[[KernelFigures], object] | None = None,
) -> Fault | None:
    """`find_fault` for the module called `kernels`, in a child process that is killed after
    `time_limit` seconds. A child that dies or hangs is a fault. `measured` is called at the end,
    for each kernel that was right. Raises `NoProcess`."""
    request = {
        "shapes": shapes_as_json(shapes),
        "device": str(device),
        "kernels": kernels,
        "timed": measured is not None,
    }
    output = ask_child(__name__, request, time_limit)
    if measured is not None:
        for figures in _measured(output.lines):
            measured(figures)
    return _read(output.lines, output.end, lasting=output.lasting)


def _measured(lines: Sequence[str]) -> Iterator[KernelFigures]:
    """The figures of the kernels that are right."""
    for line in lines:
        if line.startswith(_FIGURES):
            yield KernelFigures(**json.loads(line)["figures"])


def _read(lines: Sequence[str], end: str, *, lasting: bool) -> Fault | None:
    """The verdict, which follows the names of the tried kernels. Without one, the child died: `end`
    says how."""
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
    """The JSON form that `shapes_from_json` reads."""
    return {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for name, value in dataclasses.asdict(shapes).items()
    }


def shapes_from_json(fields: dict[str, Any]) -> TrialShapes:
    """The shapes that `shapes_as_json` wrote."""
    values = {
        name: getattr(torch, value) if isinstance(value, str) else value
        for name, value in fields.items()
    }
    layouts = tuple(WeightLayout(**layout) for layout in values.pop("layouts"))
    return TrialShapes(**values, layouts=layouts)


def main() -> None:
    """Runs in the child: writes each kernel's name before its trial, and finally the verdict."""
    answer(_try)


def _try(request: dict[str, Any], device: torch.device, tell: Callable[[str], None]) -> None:
    def tell_figures(figures: KernelFigures) -> None:
        tell(json.dumps({"figures": dataclasses.asdict(figures)}))

    tell("their import")
    try:
        kernels = import_module(request["kernels"])
        measured = tell_figures if request["timed"] else None
        shapes = shapes_from_json(request["shapes"])
        fault = find_fault(shapes, device, kernels, on_kernel=tell, measured=measured)
    except ImportError as error:
        fault = Fault(f"{type(error).__name__}: {error}", lasting=False)
    tell(json.dumps({"fault": None if fault is None else dataclasses.asdict(fault)}))
