"""Choices of earlier measurements on this machine, kept in the user's cache folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from asyncinfer.kernels.child_process import NoProcess, answer, ask_child
from asyncinfer.kernels.choices import Choices, Key
from asyncinfer.kernels.kept import keep, kept_path, read_kept
from asyncinfer.kernels.measured_cases import TuningShapes, measured_cases
from asyncinfer.kernels.measuring import Measured, measure_choices
from asyncinfer.kernels.trial_process import shapes_as_json, shapes_from_json
from asyncinfer.kernels.verdicts import key_of

__all__ = ["ChoiceRecords", "measure_in_child"]

#: Seconds. A model's hundred candidates compile in a minute or two; a longer measurement hangs.
TIME_LIMIT: Final = 600.0


class ChoiceRecords:
    """A record is a file named by a hash of everything that a measurement depends on: the device,
    its driver, the compiler, the kernels' own source, the shapes.

    A damaged record, and one that names anything but candidates, is ignored.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: None takes the user's cache folder."""
        self._folder = folder

    def path(self, shapes: TuningShapes, device: torch.device) -> Path:
        """The file of the choices for these shapes."""
        return kept_path("kernel-choices", key_of(shapes, device), self._folder)

    def read(self, shapes: TuningShapes, device: torch.device) -> Choices | None:
        """The kept choices; None without a valid record."""
        kept = read_kept(self.path(shapes, device), key_of(shapes, device))
        if kept is None:
            return None
        try:
            return dict(_read(kept["choices"], shapes, device))
        except (KeyError, TypeError, ValueError):
            return None

    def keep(self, shapes: TuningShapes, device: torch.device, measured: list[Measured]) -> Choices:
        """Keep the best candidates and return them. A folder that cannot be written to keeps
        nothing."""
        choices = {each.key: each.best for each in measured}
        entries = [[list(key), dataclasses.asdict(best)] for key, best in choices.items()]
        keep(self.path(shapes, device), key_of(shapes, device), choices=entries)
        return choices


def measure_in_child(shapes: TuningShapes, device: torch.device) -> list[Measured]:
    """`measure_choices` in a child process. If the child dies or hangs, its earlier measurements
    count. Raises `NoProcess`."""
    request = {
        "trial": shapes_as_json(shapes.trial),
        "products": shapes.products,
        "device": str(device),
    }
    candidates = _candidates(shapes, device)
    output = ask_child(__name__, request, TIME_LIMIT)
    found = []
    for line in output.lines:
        try:
            measured = json.loads(line)
        except ValueError:
            # The child ended while it wrote this line.
            break
        if "unavailable" in measured:
            raise NoProcess(str(measured["unavailable"]))
        key = tuple(measured["key"])
        times = ((candidates[key][number], seconds) for number, seconds in measured["times"])
        found.append(Measured(key=key, title=measured["title"], times=tuple(times)))
    if not found:
        raise NoProcess(f"the measurement's process {output.end} before it measured a kernel")
    return found


def _read(entries: Any, shapes: TuningShapes, device: torch.device) -> Iterator[tuple[Key, Any]]:
    """Raises `TypeError` or `ValueError` for an entry that no measurement can have written."""
    candidates = _candidates(shapes, device)
    for key, choice in entries:
        known = tuple(key)
        fits = [each for each in candidates.get(known, ()) if dataclasses.asdict(each) == choice]
        if not fits:
            raise ValueError(f"{choice} is no candidate of {known}")
        yield known, fits[0]


def _candidates(shapes: TuningShapes, device: torch.device) -> dict[Key, tuple[Any, ...]]:
    return {case.key: case.candidates for case in measured_cases(shapes, device)}


def main() -> None:
    """Runs in the child: writes each measurement as a line."""
    answer(_measure)


def _measure(request: dict[str, Any], device: torch.device, tell: Callable[[str], None]) -> None:
    products = tuple((outputs, inputs) for outputs, inputs in request["products"])
    shapes = TuningShapes(trial=shapes_from_json(request["trial"]), products=products)
    candidates = _candidates(shapes, device)
    for each in measure_choices(shapes, device):
        numbers = [(candidates[each.key].index(choice), seconds) for choice, seconds in each.times]
        tell(json.dumps({"key": each.key, "title": each.title, "times": numbers}))
