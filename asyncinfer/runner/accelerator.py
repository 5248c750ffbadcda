"""What a runner asks of a GPU beside operators: streams, events, pinned memory, graphs.

A seam, so that everything above it runs on a fake device that keeps a GPU's rules.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F

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

    def drain(self) -> None:
        """Wait for all work."""

    def close(self) -> None:
        """Give back what torch holds and nobody uses, and leave the thread as `adopt` found it.
        All work was waited for."""


#: torch has 32 streams a device and hands them out in turn: made anew for every engine, one would
#: sooner or later be another engine's, perhaps while it records. So those of closed ones are used
#: again: main, side and recorder.
_IDLE: Final[dict[torch.device, list[tuple[Any, Any, Any]]]] = {}
#: One recording at a time in a process: torch's rule. Guards `_IDLE`, too.
_ONE_AT_A_TIME: Final = threading.Lock()


class CudaAccelerator:
    """CUDA through torch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with _ONE_AT_A_TIME:
            idle = _IDLE.setdefault(device, [])
            # Recording has a stream of its own: what `main` does goes on meanwhile.
            self._streams = idle.pop() if idle else tuple(_stream(device) for _ in range(3))
        self.main, self.side, self._recorder = self._streams
        #: The thread's device and its stream on this one, before it was adopted.
        self._before: tuple[int, Any] | None = None
        self._pool: Any = None
        self._held: torch.cuda.CUDAGraph | None = None

    def adopt(self) -> None:
        stream = torch.cuda.current_stream(self.device)
        self._before = torch.cuda.current_device(), stream
        self.main.wait_stream(stream)
        # And the device.
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
            with torch.cuda.stream(self._recorder):
                _wake_libraries(self.device)
        if hold and self._held is None:
            self._held = self._record(lambda: self._hold(hold))
        return self._record(work)

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with _ONE_AT_A_TIME, torch.cuda.stream(self._recorder):
            # Other threads of the program may use CUDA meanwhile: only this one's calls are
            # recorded, and only this one may not wait for the device. What torch makes for its
            # random numbers serves all graphs of the process, and so is no inference tensor.
            with torch.inference_mode(False):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                self._end_failed(graph)
                raise
            try:
                graph.capture_end()
            except RuntimeError:
                self._stop_allocating()
                raise
        return graph

    def _end_failed(self, graph: torch.cuda.CUDAGraph) -> None:
        """Leave recording after a fault, whose own error is the one to tell."""
        try:
            graph.capture_end()
        except RuntimeError:
            self._stop_allocating()
        else:
            graph.reset()

    def _stop_allocating(self) -> None:
        """A recording that CUDA calls off leaves torch's allocator as if it went on: it would put
        off giving back what other streams have used, for good."""
        # No public name. Where it was told already it raises.
        with suppress(AttributeError, RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)

    def _hold(self, size: int) -> None:
        """One block of the pool that later recordings are cut out of."""
        torch.empty(size, dtype=torch.uint8, device=self.device)[:1].zero_()

    def drain(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        if self._held is not None:
            self._held.reset()
            self._held = None
        if self._before is not None:
            device, stream = self._before
            if torch.cuda.current_stream(self.device) == self.main:
                torch.cuda.set_stream(stream)
                torch.cuda.set_device(device)
            self._before = None
        torch.cuda.empty_cache()
        with _ONE_AT_A_TIME:
            if self._streams not in _IDLE[self.device]:
                _IDLE[self.device].append(self._streams)


def _wake_libraries(device: torch.device) -> None:
    """Products make their libraries take what they work in, which they keep for good, for every
    stream that they are used on. Taken while recording it would be memory of the graphs' pool,
    none of whose first block, the largest, could be given back then."""
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.zeros(16, 16, dtype=dtype, device=device)
        F.linear(x, x)
        F.linear(x, x, x[0])
        torch.bmm(x[None], x[None])


def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
