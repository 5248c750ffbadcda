"""CUDA streams that one engine uses alone while it needs them."""

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
    """Streams of `device` that nobody else uses until they are returned."""
    with _lock:
        idle = _IDLE.setdefault(device, [])
        return tuple(idle.pop() if idle else _stream(device) for _ in range(count))


def return_streams(device: torch.device, streams: Sequence[Any]) -> None:
    """Return the streams of `lend_streams`, once. Later work is queued behind theirs."""
    with _lock:
        # Reversed, so that they are lent again in the same order.
        _IDLE[device] += reversed(streams)


def _stream(device: torch.device) -> Any:
    """A stream of a priority that embedding programs do not ask for. torch hands out each
    priority's streams in turn. A program's work on a stream that records would become part of the
    recording.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
