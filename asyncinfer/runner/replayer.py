"""`Replayer`: makes recorded calls on the threads of a step."""

from __future__ import annotations

import time
from typing import Final

import torch

from asyncinfer.kernels.native import ChunkKV, RecordedCalls
from asyncinfer.models import Decoder

__all__ = ["Replayer"]

#: Seconds of a replay above which the next one is made layer by layer, since a program may end
#: between two layers.
_LONG: Final = 0.25


class Replayer:
    """Replays a decoder's recorded calls.

    Attributes:
        most_threads: those that a replay may take.
        helps: whether threads of the last replay did what one of them left undone when it lost its
            core.
        seconds: what the last replay took.
        away: those of them in which the caller did not compute: it had no core, or waited for the
            GIL or for a thread that had none.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.most_threads = torch.get_num_threads()
        self.helps = False
        self.seconds = self.away = 0.0
        self._decoder = decoder

    @property
    def is_long(self) -> bool:
        """Whether the last replay took so long that the next one is made layer by layer."""
        return self.seconds > _LONG

    def __call__(self, calls: RecordedCalls, longest: int, kv: ChunkKV | None = None) -> None:
        """Make the calls for rows of at most `longest` tokens."""
        self.helps = calls.in_parts
        threads = min(torch.get_num_threads(), self.most_threads)
        began, computed = time.perf_counter(), time.thread_time()
        between = self._decoder.between_layers
        if not self.is_long or between is None:
            calls.replay(threads, longest, kv)
            if between is not None:
                between()
        else:
            for _ in calls.replay_layers(threads, longest, kv):
                between()
        self.seconds = time.perf_counter() - began
        self.away = self.seconds - (time.thread_time() - computed)
