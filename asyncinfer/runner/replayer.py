"""`Replayer`: makes recorded calls on the threads of a step."""

from __future__ import annotations

import functools
import threading
import time
from typing import Final

import torch

from asyncinfer.kernels.dispatch import CannotRecord
from asyncinfer.kernels.native import CallQueue, ChunkKV, RecordedCalls
from asyncinfer.kernels.threads import take_name, thread_name
from asyncinfer.models import Decoder
from asyncinfer.runner.queue_pace import MOST_QUEUED

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
        seconds: what the last replay took, of a queue's the time since the one before was done.
        away: for how long the caller did not compute, or would not have if it had made the calls:
            it had no core, or waited for the GIL or for a thread that had none.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.most_threads = torch.get_num_threads()
        self.helps = False
        self.seconds = self.away = 0.0
        self._decoder = decoder
        #: What this thread had computed when it last waited for the queue.
        self._computed = 0.0

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

    @functools.cached_property
    def _queue(self) -> CallQueue | None:
        name = thread_name(threading.get_native_id())
        try:
            return CallQueue(MOST_QUEUED, self.most_threads, functools.partial(take_name, name))
        except (CannotRecord, RuntimeError):
            # A system without such semaphores, or with no thread left.
            return None

    @property
    def can_queue(self) -> bool:
        """Whether `begin` may be called."""
        return self._queue is not None

    def begin(self, calls: RecordedCalls, longest: int, needed: object) -> None:
        """Have threads of a `CallQueue` make the calls. For `needed` see there."""
        assert self._queue is not None
        self.helps = calls.in_parts
        threads = min(torch.get_num_threads(), self.most_threads)
        self._queue.put(calls, threads, longest, needed)

    def finish(self) -> None:
        """Wait until the oldest calls are made that were begun."""
        assert self._queue is not None
        times = self._queue.finish()
        late = max(0.0, time.perf_counter() - times.ended)
        before, self._computed = self._computed, time.thread_time()
        # The threads of the queue have no core either while this one has theirs.
        lost = times.away - (self._computed - before) / self.most_threads
        self.seconds, self.away = times.seconds, late + max(0.0, lost)

    def finished(self) -> None:
        """Do what is done between layers, when what `finish` waited for is kept: it may raise."""
        if self._decoder.between_layers is not None:
            self._decoder.between_layers()

    def close(self) -> None:
        """End those threads when all calls are made that were begun."""
        queue = self.__dict__.pop("_queue", None)
        if queue is not None:
            queue.close()
