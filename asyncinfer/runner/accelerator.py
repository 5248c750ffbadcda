"""What a runner needs of a GPU beside operators: streams, events, pinned memory, graphs.

Tests put a fake device in its place, which keeps a GPU's rules.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F

from asyncinfer.kernels.streams import lend_streams, return_streams

__all__ = ["Accelerator", "CudaAccelerator", "DeviceError", "Event", "Graph", "Memory"]


class DeviceError(RuntimeError):
    """A device computes no more: CUDA repeats such an error until the process ends."""

    def __init__(self, cause: object) -> None:
        lines = str(cause).strip().splitlines() or [""]
        super().__init__(
            f"the device failed: {lines[0][:200]}; only a new process can use it again. Run "
            "`asyncinfer doctor`; kernels='torch' and cuda_graphs='off' do without what it finds"
        )


class Event(Protocol):
    """A mark in a stream's order of work."""

    def record(self, stream: Any) -> None:
        """Mark the end of the work that `stream` has been given so far."""

    def wait(self, stream: Any) -> None:
        """Let later work of `stream` wait for the event; the host goes on."""

    def query(self) -> bool:
        """Whether the event is reached. Keeps the GIL."""

    def synchronize(self) -> None:
        """Block the host until the event is reached, without the GIL and without spinning."""


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Run the recorded work on the current stream, on the same memory."""

    def reset(self) -> None:
        """Free the graph's memory."""


class Memory(Protocol):
    """A device, and host memory for its copies."""

    @property
    def device(self) -> torch.device: ...

    def pinned(self, size: int) -> torch.Tensor:
        """uint8 `[size]` of pinned host memory, so that copies run asynchronously."""


class Accelerator(Memory, Protocol):
    """One GPU as the decode thread uses it. The stream `main` runs the work of steps, and `side`
    copies their results to the host."""

    @property
    def main(self) -> Any: ...
    @property
    def side(self) -> Any: ...

    def adopt(self) -> None:
        """Make `main` this thread's current stream."""

    def on_side(self) -> AbstractContextManager[object]:
        """Make `side` the current stream inside the block."""

    def event(self) -> Event: ...

    def capture(self, work: Callable[[], None], *, hold: int = 0) -> Graph:
        """Record `work` without running it. All graphs share one pool of memory; the first call
        reserves `hold` bytes of it. Raises whatever `work` or the device raises."""

    def drain(self) -> None:
        """Wait for all work of the device."""

    def close(self) -> None:
        """Free torch's unused memory, and restore the stream that `adopt` replaced. Call `drain`
        before."""


#: torch allows one recording at a time in a process.
_ONE_AT_A_TIME: Final = threading.Lock()


class CudaAccelerator:
    """CUDA through torch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Recordings have a stream of their own, so that work on `main` continues meanwhile.
        self._streams = lend_streams(device, 3)
        self.main, self.side, self._recorder = self._streams
        #: The thread's device and its stream on this one, before it was adopted.
        self._before: tuple[int, Any] | None = None
        self._pool: Any = None
        self._held: torch.cuda.CUDAGraph | None = None

    def adopt(self) -> None:
        stream = torch.cuda.current_stream(self.device)
        self._before = torch.cuda.current_device(), stream
        self.main.wait_stream(stream)
        # `set_stream` sets the current device too.
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
            self._held = self.record(lambda: self._hold(hold))
        return self.record(work)

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record what `work` launches. Raises whatever `work` or CUDA raises."""
        graph = torch.cuda.CUDAGraph()
        with _ONE_AT_A_TIME, torch.cuda.stream(self._recorder):
            # Other threads may use CUDA meanwhile: "thread_local" restricts this thread alone. The
            # state that torch makes here for random numbers serves all graphs of the process, so
            # it must not be an inference tensor.
            with torch.inference_mode(False), _copied_random_state(self.device):
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
        """End a recording whose work has raised; an error of the end itself is dropped."""
        try:
            graph.capture_end()
        except RuntimeError:
            self._stop_allocating()
        else:
            graph.reset()

    def _stop_allocating(self) -> None:
        """Tell torch's allocator that CUDA has aborted the recording. Otherwise it would never
        free memory that several streams have used."""
        # torch has no public name for it. It raises if the allocator knows already.
        with suppress(AttributeError, RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)

    def _hold(self, size: int) -> None:
        """Allocate one block of the pool; later recordings take their memory from it."""
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
        return_streams(self.device, self._streams)
        self._streams = ()


def _wake_libraries(device: torch.device) -> None:
    """Let the libraries of matrix products allocate their workspaces for the current stream.

    They keep a workspace for good. One that is allocated in a recording is part of the graphs'
    pool, whose first and largest block could then never be freed.
    """
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.zeros(16, 16, dtype=dtype, device=device)
        F.linear(x, x)
        F.linear(x, x, x[0])
        torch.bmm(x[None], x[None])


@contextmanager
def _copied_random_state(device: torch.device) -> Iterator[None]:
    """Inside, the device's default generator has a copy of its state.

    Torch that has no random state for each recording marks the generator's until the recording has
    ended well, and whoever draws from a marked state raises. So the host's own state is put back as
    soon as a recording has begun. What another thread draws within that call it may draw twice.
    """
    generator = torch.cuda.default_generators[device.index]
    own = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(own)
