"""`DecodeGraphs`: a graph of the whole decode step for every size of batch."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from asyncinfer.runner.accelerator import Accelerator, Graph
from asyncinfer.sampling import Draws
from asyncinfer.telemetry import emit

__all__ = ["DecodeGraphs", "batch_sizes"]

#: Rows of the largest recorded batch.
_MOST_ROWS = 256


def batch_sizes(max_running: int) -> list[int]:
    """Rows of the batches that are recorded, ascending: 1, 2, 4, then by 8 to 256, none above
    `max_running` rows but the first that holds them all."""
    most = min(max_running, _MOST_ROWS)
    sizes = [size for size in (1, 2, 4, *range(8, _MOST_ROWS + 1, 8)) if size < most]
    return [*sizes, most]


class DecodeGraphs:
    """Runs decode steps, recorded where they can be.

    A batch of a new size, or that draws in a new way, is run as it is, which loads its kernels and
    is the step that was asked for; then it is recorded, and from then on replayed. When recording
    fails, it is tried no more: what was recorded is replayed, all else runs as it is.

    Args:
        step: does a step of so many rows on what the device holds, or is recorded doing it.
        sizes: as from `batch_sizes`.
        hold: bytes set aside for what a step makes on its way.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        step: Callable[[int, Draws], None],
        sizes: Sequence[int],
        *,
        hold: int = 0,
    ) -> None:
        self._accelerator = accelerator
        self._step = step
        self._sizes = list(sizes)
        self._hold = hold
        self._graphs: dict[tuple[int, Draws], Graph] = {}
        self._recording = True

    @property
    def most_rows(self) -> int:
        return self._sizes[-1]

    @property
    def recorded(self) -> int:
        """How many graphs there are."""
        return len(self._graphs)

    def size_for(self, rows: int) -> int:
        """The smallest size that holds so many rows, at most `most_rows`."""
        return next(size for size in self._sizes if size >= rows)

    def record_all(self) -> None:
        """Record every size, the largest first: the smaller ones fit where it had its memory. The
        batch must be nothing but padding."""
        for size in reversed(self._sizes):
            for draws in Draws:
                self.run(size, draws)

    def run(self, size: int, draws: Draws) -> None:
        """One step of `size` rows."""
        graph = self._graphs.get((size, draws))
        if graph is not None:
            graph.replay()
            return
        self._step(size, draws)
        if self._recording:
            self._record(size, draws)

    def close(self) -> None:
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._recording = False

    def _record(self, size: int, draws: Draws) -> None:
        try:
            with _no_garbage_collection():
                graph = self._accelerator.capture(lambda: self._step(size, draws), hold=self._hold)
        except RuntimeError as error:  # CUDA's errors, torch.OutOfMemoryError among them
            self._recording = False
            emit("graphs_failed", rows=size, error=str(error))
        else:
            self._graphs[size, draws] = graph


#: Recordings that are under way or wait for their turn; the first of them switched the collector
#: off, the last switches it on again if it was on.
_recording = 0
_collecting = False
_counting = threading.Lock()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """What a collection frees on this thread may call CUDA in a way that spoils a recording."""
    global _recording, _collecting
    with _counting:
        if not _recording:
            _collecting = gc.isenabled()
            gc.disable()
        _recording += 1
    try:
        yield
    finally:
        with _counting:
            _recording -= 1
            if not _recording and _collecting:
                gc.enable()
