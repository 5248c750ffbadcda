"""What a runner asks of a GPU beside operators: streams, events, pinned memory, graphs.

A seam, so that everything above it runs on a fake device that keeps a GPU's rules.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

__all__ = ["Accelerator", "CudaAccelerator", "Event", "Graph"]


class Event(Protocol):
    """A mark in a stream's order of work."""

    def record(self, stream: Any) -> None:
        """Stands for all that `stream` was given so far."""

    def wait(self, stream: Any) -> None:
        """`stream` does nothing more until the event is reached; the host goes on."""

    def synchronize(self) -> None:
        """The host waits, asleep and without the GIL, until the event is reached."""


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Do it again, on the same memory, on the current stream."""

    def reset(self) -> None:
        """Give its memory back."""


class Accelerator(Protocol):
    """One GPU as the decode thread uses it. `main` and `side` are streams: a step's work, and the
    copies of its results to the host."""

    @property
    def device(self) -> torch.device: ...
    @property
    def main(self) -> Any: ...
    @property
    def side(self) -> Any: ...

    def adopt(self) -> None:
        """What this thread does from now on goes to `main`."""

    def on_side(self) -> AbstractContextManager[object]:
        """What is done inside goes to `side`."""

    def pinned(self, size: int) -> torch.Tensor:
        """uint8 `[size]` on the host that copies may read and write while the host goes on."""

    def event(self) -> Event: ...

    def capture(self, work: Callable[[], None], *, hold: int = 0) -> Graph:
        """Record what `work` does, without doing it. All graphs share one pool of memory, of which
        `hold` bytes are set aside at first. Whatever `work` or the device raises is raised."""

    def close(self) -> None:
        """Wait for all work, and give back what torch holds and nobody uses."""


class CudaAccelerator:
    """CUDA through torch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.main = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Recording has a stream of its own: what `main` does goes on meanwhile.
        self._recorder = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._held: torch.cuda.CUDAGraph | None = None

    def adopt(self) -> None:
        torch.cuda.set_device(self.device)
        self.main.wait_stream(torch.cuda.current_stream(self.device))
        torch.cuda.set_stream(self.main)

    def on_side(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = torch.cuda.stream(self.side)
        return context

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def event(self) -> Event:
        event: Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        return event

    def capture(self, work: Callable[[], None], *, hold: int = 0) -> Graph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        if hold and self._held is None:
            self._held = self._record(lambda: self._hold(hold))
        return self._record(work)

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._recorder):
            # Other threads of the program may use CUDA meanwhile: only this one's calls are
            # recorded, and only this one may not wait for the device.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                _end_failed(graph)
                raise
            graph.capture_end()
        return graph

    def _hold(self, size: int) -> None:
        """One block of the pool that later recordings are cut out of."""
        torch.empty(size, dtype=torch.uint8, device=self.device)[:1].zero_()

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        if self._held is not None:
            self._held.reset()
            self._held = None
        torch.cuda.empty_cache()


def _end_failed(graph: torch.cuda.CUDAGraph) -> None:
    """Leave recording after a fault, whose own error is the one to tell."""
    try:
        graph.capture_end()
    except RuntimeError:
        return
    graph.reset()
