"""`DecodeGraphs`: CUDA graphs of whole decode steps and of other steps' layers, by size."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

from asyncinfer.runner.accelerator import Accelerator, Graph
from asyncinfer.runner.fallbacks import Fallbacks
from asyncinfer.sampling import Draws

__all__ = ["DecodeGraphs", "StepGraphs", "batch_sizes"]

#: Rows of the largest recorded batch.
_MOST_ROWS = 256


def batch_sizes(max_running: int) -> list[int]:
    """Rows of the recorded batches, ascending: 1, 2, 4, then multiples of 8 up to 256. The last is
    `max_running` where that is smaller than 256."""
    most = min(max_running, _MOST_ROWS)
    sizes = [size for size in (1, 2, 4, *range(8, _MOST_ROWS + 1, 8)) if size < most]
    return [*sizes, most]


class StepGraphs:
    """Runs functions of device memory, from recordings where possible.

    The first call of a function with some arguments runs it as it is, which loads its kernels, and
    then records it. Later ones are replayed. After a recording has failed, none is tried again:
    existing graphs are replayed, and everything else runs as it is.

    Args:
        hold: bytes reserved for the intermediate tensors of the largest.
        fallbacks: is told of a recording that failed.
    """

    def __init__(
        self, accelerator: Accelerator, *, hold: int = 0, fallbacks: Fallbacks | None = None
    ) -> None:
        self._accelerator = accelerator
        self._hold = hold
        self._fallbacks = fallbacks or Fallbacks()
        self._graphs: dict[Hashable, Graph] = {}
        self._paused = False
        #: Whether no step will be recorded any more.
        self.done = False

    @property
    def recorded(self) -> int:
        """The number of graphs."""
        return len(self._graphs)

    def has(self, step: Callable[..., None], *arguments: Hashable) -> bool:
        """Whether this call would be replayed."""
        return (step, *arguments) in self._graphs

    def call(self, step: Callable[..., None], *arguments: Hashable, what: str) -> None:
        """Compute `step(*arguments)`; `what` names it in the report of a failed recording."""
        graph = self._graphs.get((step, *arguments))
        if graph is not None:
            graph.replay()
            return
        step(*arguments)
        if not self._paused and not self.done:
            self._record(step, arguments, what)

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Records nothing inside the block."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def close(self) -> None:
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self.done = True

    def _record(
        self, step: Callable[..., None], arguments: tuple[Hashable, ...], what: str
    ) -> None:
        try:
            with _no_garbage_collection():
                graph = self._accelerator.capture(lambda: step(*arguments), hold=self._hold)
        except RuntimeError as error:  # CUDA's errors, including torch.OutOfMemoryError
            self.done = True
            self._fallbacks.add("graphs", f"recording {what} failed: {error}")
        else:
            self._graphs[step, *arguments] = graph


class DecodeGraphs(StepGraphs):
    """`StepGraphs` with those of whole decode steps.

    Args:
        step: `step(rows, draws, adapted)` computes a step from the device's state. Where `adapted`,
            some rows have an adapter; such steps have graphs of their own.
        sizes: rows of the recorded batches, from `batch_sizes`.
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
        super().__init__(accelerator, hold=hold, fallbacks=fallbacks)
        self._step = step
        self._sizes = list(sizes)

    @property
    def most_rows(self) -> int:
        return self._sizes[-1]

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
        """Compute one step of `size` rows. `adapted`: some rows have an adapter."""
        self.call(self._step, size, draws, adapted, what=f"{size} rows")


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
