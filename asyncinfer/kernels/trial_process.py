"""A trial in a process of its own: a kernel that ends its process, hangs or leaves its device in an
error does nothing to the engine's."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch

from asyncinfer.kernels.figures import KernelFigures
from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.kernels.trial import Fault, TrialShapes, find_fault

__all__ = ["NoProcess", "find_fault_apart"]

#: Seconds: the kernels compile once, in about half a minute. What takes longer hangs.
TIME_LIMIT: Final = 300.0
_TRITON: Final = "asyncinfer.kernels.triton"
#: How a line begins that tells figures.
_FIGURES: Final = '{"figures": '
#: Signals that come from a user, or from a system without memory, and say nothing of a kernel.
_FROM_OUTSIDE: Final = (signal.SIGINT, signal.SIGTERM, 9)


class NoProcess(Exception):
    """No process could be started, or it had no device of its own. The kernels were not tried."""


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
    python = _interpreter()
    request = {
        "shapes": _as_json(shapes),
        "device": str(device),
        "kernels": kernels,
        "time_limit": time_limit,
        "timed": measured is not None,
    }
    # The modules of this process, from where it has them, and none of the current folder.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        process = subprocess.Popen(
            [python, "-P", "-c", f"from {__name__} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            # Compilers that the trial starts end with it.
            start_new_session=True,
        )
    except OSError as error:
        raise NoProcess(f"{python}: {error.strerror}") from error
    late = False
    with process:
        try:
            told, _ = process.communicate(json.dumps(request).encode(), time_limit)
        except subprocess.TimeoutExpired:
            late = True
            _kill(process)
            told, _ = process.communicate()
        except BaseException:
            _kill(process)
            raise
    if late:
        end = f"took longer than {time_limit:g} seconds"
    elif process.returncode < 0:
        end = f"was ended by signal {-process.returncode}"
    else:
        end = f"ended with exit status {process.returncode}"
    lines = told.decode("utf-8", "replace").splitlines()
    if measured is not None:
        for figures in _measured(lines):
            measured(figures)
    return _read(lines, end, lasting=-process.returncode not in _FROM_OUTSIDE or late)


def _interpreter() -> str:
    """The program to start. An application that embeds Python or was frozen is another one."""
    name = Path(sys.executable or "").stem.lower()
    if getattr(sys, "frozen", False) or not name.startswith(("python", "pypy")):
        raise NoProcess(f"sys.executable is {sys.executable!r}, no Python interpreter")
    return sys.executable


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End it with all that it started, if it is still there."""
    if process.poll() is not None:
        return
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


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


def _as_json(shapes: TrialShapes) -> dict[str, Any]:
    return {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for name, value in dataclasses.asdict(shapes).items()
    }


def _from_json(told: dict[str, Any]) -> TrialShapes:
    values = {
        name: getattr(torch, value) if isinstance(value, str) else value
        for name, value in told.items()
    }
    layouts = tuple(WeightLayout(**layout) for layout in values.pop("layouts"))
    return TrialShapes(**values, layouts=layouts)


def main() -> None:
    """The other process: a request on standard input; on standard output the name of each kernel
    before it is tried, and at last the verdict."""
    request = json.loads(sys.stdin.readline())
    # Also where nobody is left to end it.
    faulthandler.dump_traceback_later(request["time_limit"], exit=True)
    # What compilers print is no verdict.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(line: str) -> None:
        print(line, file=out, flush=True)

    def tell_figures(figures: KernelFigures) -> None:
        tell(json.dumps({"figures": dataclasses.asdict(figures)}))

    device = torch.device(request["device"])
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        # A GPU may take one process alone, and the engine's has it.
        tell(json.dumps({"unavailable": str(error)[:200]}))
        return
    tell("their import")
    try:
        kernels = import_module(request["kernels"])
        measured = tell_figures if request["timed"] else None
        shapes = _from_json(request["shapes"])
        fault = find_fault(shapes, device, kernels, told=tell, measured=measured)
    except ImportError as error:
        fault = Fault(f"{type(error).__name__}: {error}", lasting=False)
    tell(json.dumps({"fault": None if fault is None else dataclasses.asdict(fault)}))
