"""A rehearsal: operators on tensors without memory, whose Triton kernels are handed on, to be
compiled, and not launched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["Launch", "Wanted", "device_of", "rehearsing", "wanted"]

_thread = threading.local()


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch that did not take place."""

    #: Equal for launches of the same machine code.
    key: Hashable
    #: Compiles that code for the current device, on any thread.
    compile: Callable[[], object]


#: Is told of every launch of a rehearsal.
Wanted = Callable[[Launch], object]


@contextmanager
def rehearsing(device: torch.device, wanted: Wanted) -> Iterator[None]:
    """Inside, tensors on torch's device "meta" are for this thread as on `device`, and each launch
    is handed to `wanted` in place of being made."""
    before = getattr(_thread, "rehearsal", None)
    _thread.rehearsal = (device, wanted)
    try:
        yield
    finally:
        _thread.rehearsal = before


def device_of(device: torch.device) -> torch.device:
    """The device that a tensor's `device` stands for: another one in a rehearsal alone."""
    rehearsal = getattr(_thread, "rehearsal", None)
    if rehearsal is None or device.type != "meta":
        return device
    stands_for: torch.device = rehearsal[0]
    return stands_for


def wanted() -> Wanted | None:
    """Who is told of this thread's launches; None: they are made."""
    rehearsal = getattr(_thread, "rehearsal", None)
    return None if rehearsal is None else rehearsal[1]
