"""A rehearsal runs operators on tensors without memory, and hands their Triton kernels on to be
compiled in place of launching them."""

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
    """A kernel launch that a rehearsal asked for."""

    #: Equal for launches of the same machine code.
    key: Hashable
    #: Compiles that code for the current device, on any thread.
    compile: Callable[[], object]


#: Called with every launch of a rehearsal.
Wanted = Callable[[Launch], object]


@contextmanager
def rehearsing(device: torch.device, wanted: Wanted) -> Iterator[None]:
    """Inside the block, this thread treats tensors on torch's device "meta" as on `device`, and
    passes each launch to `wanted` in place of making it."""
    before = getattr(_thread, "rehearsal", None)
    _thread.rehearsal = (device, wanted)
    try:
        yield
    finally:
        _thread.rehearsal = before


def device_of(device: torch.device) -> torch.device:
    """The device that a tensor's `device` stands for, which differs in a rehearsal alone."""
    rehearsal = getattr(_thread, "rehearsal", None)
    if rehearsal is None or device.type != "meta":
        return device
    stands_for: torch.device = rehearsal[0]
    return stands_for


def wanted() -> Wanted | None:
    """The function that takes this thread's launches; None where kernels are launched."""
    rehearsal = getattr(_thread, "rehearsal", None)
    return None if rehearsal is None else rehearsal[1]
