"""Streams of a GPU that one engine has to itself while it needs them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

import torch

__all__ = ["lend_streams", "return_streams"]

#: Streams that were returned, kept for whoever asks next. torch has 32 streams of a priority for a
#: device and hands them out in turn, so that a new one could be a stream that is recording.
_IDLE: Final[dict[torch.device, list[Any]]] = {}
_lock: Final = threading.Lock()


def lend_streams(device: torch.device, count: int) -> tuple[Any, ...]:
    """Streams of `device` that nobody else has until they are returned."""
    with _lock:
        idle = _IDLE.setdefault(device, [])
        return tuple(idle.pop() if idle else _stream(device) for _ in range(count))


def return_streams(device: torch.device, streams: Sequence[Any]) -> None:
    """Give back what `lend_streams` gave, once. Whoever gets it next comes after the work on it."""
    with _lock:
        # In the order in which they are lent again.
        _IDLE[device] += reversed(streams)


def _stream(device: torch.device) -> Any:
    """A stream that no host gets which asks for torch's streams of default or of highest priority:
    torch shares each priority's streams out in turn, and work of a host's on a stream that records
    would become part of the recording."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
