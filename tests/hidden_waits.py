"""`refused_waits`: on a real GPU, what a fake device refuses in `without_syncs`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["refused_waits"]


@contextmanager
def refused_waits() -> Iterator[None]:
    """Inside, an operator for which the host has to wait for the GPU raises `RuntimeError`."""
    with warnings.catch_warnings():
        # torch says once that the mode is a prototype.
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
