"""`DecodeGraphs`: a graph of the whole decode step for each batch size."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from asyncinfer.runner.accelerator import Accelerator, Graph
from asyncinfer.runner.fallbacks import Fallbacks
from asyncinfer.sampling import Draws

__all__ = ["DecodeGraphs", "batch_sizes"]

#: Rows of the largest recorded batch.
_MOST_ROWS = 256


def batch_sizes(max_running: int) -> list[int]:
    """Rows of the recorded batches, ascending: 1, 2, 4, then multiples of 8 up to 256. The last is
    `max_running` where that is smaller than 256."""
    most = min(max_running, _MOST_ROWS)
    sizes = [size for size in (1, 2, 4, *range(8, _MOST_ROWS + 1, 8)) if size < most]
    return [*sizes, most]


class DecodeGraphs:
    """Runs decode steps, from recordings where possible.

    The first batch of a size and kind of draw runs eagerly, which loads its kernels, and is then
    recorded. Later ones are replayed. After a recording has failed, none is tried again: existing
    graphs are replayed, and all other steps run eagerly.

    Args:
        step: the function to record: `step(rows, draws, adapted)` computes a step from the device's
            state. Where `adapted`, some rows have an adapter; such steps have graphs of their own.
        sizes: rows of the recorded batches, from `batch_sizes`.
        hold: bytes reserved for the intermediate tensors of a step.
        fallbacks: is told of a recording that failed.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        step: Callable[[int, Draws, bool], None],
        sizes: Sequence[int],
        *,
        hold: int = 0,
        fallbacks: Fallbacks | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._step = step
        self._sizes = list(sizes)
        self._hold = hold
        self._fallbacks = fallbacks or Fallbacks()
        self._graphs: dict[tuple[int, Draws, bool], Graph] = {}
        self._recording, self._closed = True, False

    @property
    def most_rows(self) -> int:
        return self._sizes[-1]

    @property
    def recorded(self) -> int:
        """The number of graphs."""
        return len(self._graphs)

    def size_for(self, rows: int) -> int:
        """The smallest size that holds so many rows, at most `most_rows`."""
        return next(size for size in self._sizes if size >= rows)

    def record_all(self) -> None:
        """Record every size, the largest first: smaller ones then fit into its memory. Every row of
        the batch must be padding."""
        for size in reversed(self._sizes):
            for draws in Draws:
                self.run(size, draws)

    def run(self, size: int, draws: Draws, adapted: bool = False) -> None:
        """Compute one step of `size` rows, some of which have an adapter if it is `adapted`."""
        graph = self._graphs.get((size, draws, adapted))
        if graph is not None:
            graph.replay()
            return
        self._step(size, draws, adapted)
        if self._recording:
            self._record(size, draws, adapted)

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Inside, no step is recorded."""
        before, self._recording = self._recording, False
        try:
            yield
        finally:
            # It may have been closed meanwhile.
            self._recording = before and not self._closed

    def close(self) -> None:
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._recording, self._closed = False, True

    def _record(self, size: int, draws: Draws, adapted: bool) -> None:
        try:
            with _no_garbage_collection():
                graph = self._accelerator.capture(
                    lambda: self._step(size, draws, adapted), hold=self._hold
                )
        except RuntimeError as error:  # CUDA's errors, torch.OutOfMemoryError among them
            self._recording = False
            self._fallbacks.add("graphs", f"recording {size} rows failed: {error}")
        else:
            self._graphs[size, draws, adapted] = graph


#: How many recordings run or wait for their turn. The first one switches the garbage collector off;
#: the last one switches it on again, if it was on.
_recording = 0
_collecting = False
_counting = threading.Lock()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """No garbage collection inside: freeing a CUDA object on this thread may spoil a recording."""
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
