"""`FakeDevice`: a GPU's rules on the CPU's memory, for tests of what drives one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from fakes.fake_graph import Recording, ReplayError, poison
from fakes.fake_modes import (
    CountCalls,
    WatchOperators,
    host_must_wait,
    written_by,
)
from fakes.fake_order import FakeEvent, FakeStream, Memories, StreamOrderError
from fakes.weak_storage import Place, key_of, tensors_of

from asyncinfer.attention import gathered, prefill
from asyncinfer.kernels import onednn
from asyncinfer.kernels.native import BlockedWeight, between

__all__ = ["FakeDevice", "HiddenSyncError"]

#: Numbers that the host makes a tensor of. Recording cannot copy them to the device.
_HOST_MADE = ("scalar_tensor", "lift_fresh")


class HiddenSyncError(AssertionError):
    """The host waited for the device where it must not."""


@dataclass(eq=False, slots=True)
class _Copy:
    """A copy to or from pinned memory that is under way."""

    stream: FakeStream
    time: int
    #: Not kept by the copy: whoever asked for it must see to that.
    source: Place
    content: torch.Tensor
    #: Pinned memory that it is for; None if it is from there.
    target: torch.Tensor | None


class FakeDevice:
    """An accelerator (see `asyncinfer.runner.accelerator`) whose memory is the host's.

    Used as a context, it watches every torch operator of the thread:

    - work on one stream that uses what another did, without having waited for it, raises
      `StreamOrderError`, and so does writing to memory that is still being copied from;
    - what is copied to pinned memory is poison until the host has waited for it;
    - a replayed graph does what was recorded on the memory it was recorded on, nothing else; what
      it made on the way is poison afterwards, and memory that was freed raises `ReplayError`;
    - in `without_syncs` and while recording, an operator for which the host has to wait raises
      `HiddenSyncError`; while recording, so does a number that comes from the host.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.main = FakeStream("main")
        self.side = FakeStream("side")
        #: Python-level calls of torch, and of the device, by name. Attributes are not in it, nor
        #: is which stream a thread uses.
        self.calls: Counter[str] = Counter()
        #: How many recordings are to fail from now on.
        self.failing = 0
        self.closed = False
        #: Whether it has done all work by the time that the host asks.
        self.fast = False
        self._host = FakeStream("the host")
        self._current = self.main
        self._memories = Memories()
        self._pinned: set[int] = set()
        #: Pinned memory is kept: it is not to be taken for another.
        self._buffers: list[torch.Tensor] = []
        self._copies: list[_Copy] = []
        self._recording: Recording | None = None
        self._strict = False
        self._patches = ExitStack()
        # torch's own types are missing on these.
        self._watch: Any = WatchOperators(self._operate)
        self._count: Any = CountCalls(self.calls, self._read)

    def __enter__(self) -> FakeDevice:
        # A GPU has no native code, which no mode sees.
        self._patches.enter_context(patch.object(BlockedWeight, "most_rows", 0))
        self._patches.enter_context(patch.object(onednn, "native_is_faster", lambda _: False))
        self._patches.enter_context(patch.object(between, "_kernels", lambda _: None))
        self._patches.enter_context(patch.object(gathered, "native_rows", lambda *_: None))
        self._patches.enter_context(patch.object(prefill, "native_prefill", lambda *_: None))
        self._count.__enter__()
        self._watch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._watch.__exit__(*error)
        self._count.__exit__(*error)
        self._patches.close()

    # -- the accelerator -----------------------------------------------------------------------

    def adopt(self) -> None:
        self._current = self.main

    @contextmanager
    def on_side(self) -> Iterator[None]:
        before, self._current = self._current, self.side
        try:
            yield
        finally:
            self._current = before

    def pinned(self, size: int) -> torch.Tensor:
        with self.unwatched():
            buffer = torch.zeros(max(size, 1), dtype=torch.uint8)
        self._pinned.add(key_of(buffer))
        self._buffers.append(buffer)
        return buffer[:size]

    def event(self) -> FakeEvent:
        return FakeEvent(self._host, self._arrive, self._called, lambda: self.fast)

    def capture(self, work: Callable[[], None], *, hold: int = 0) -> FakeGraph:
        self._called("capture")
        if self.failing:
            self.failing -= 1
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        recording = self._recording = Recording()
        try:
            work()
        finally:
            self._recording = None
            with self.unwatched():
                recording.undo()
        return FakeGraph(self, recording)

    def drain(self) -> None:
        self._host.learn({stream: stream.time for stream in (self.main, self.side)})
        self._arrive()

    def close(self) -> None:
        for stream in (self.main, self.side):
            if not self._host.has_waited(stream, stream.time):
                raise StreamOrderError(f"closed while {stream.name} was at work")
        self.closed = True

    # -- what tests ask ------------------------------------------------------------------------

    @contextmanager
    def without_syncs(self) -> Iterator[None]:
        """The host may not wait for the device inside, but for events."""
        self._strict = True
        try:
            yield
        finally:
            self._strict = False

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """What the thread does inside, the host does."""
        unseen = torch._C._DisableTorchDispatch()
        with torch._C.DisableTorchFunction(), unseen, torch.inference_mode():
            yield

    # -- inside --------------------------------------------------------------------------------

    def _called(self, name: str) -> None:
        self.calls[name] += 1

    def replay(self, recording: Recording) -> None:
        self._called("Graph.replay")
        if self._recording is not None:
            raise ReplayError("a graph was replayed while another was recorded")
        with self.unwatched():
            live = [
                [ref.storage() for ref in refs.values()]
                for refs in (recording.reads, recording.writes)
                if not any(ref.freed for ref in refs.values())
            ]
            if len(live) < 2:
                raise ReplayError("a graph uses memory that was freed since it was recorded")
            self._current.learn(self._host.known)
            self._memories.touch(self._current, "a replayed graph", *live)
            recording.replay()

    def _read(self, name: str, tensor: torch.Tensor) -> None:
        """The host reads a tensor's values. It may those of pinned memory: until they have come,
        they are poison."""
        if (self._strict or self._recording is not None) and not self._is_pinned(tensor):
            raise HiddenSyncError(f"{name} makes the host wait for the device")

    def _operate(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """One operator of the thread."""
        name = operator._schema.name.partition("::")[2]
        recording = self._recording
        if (self._strict or recording is not None) and host_must_wait(name, args):
            raise HiddenSyncError(f"{name} makes the host wait for the device")
        if recording is not None and name in _HOST_MADE:
            raise HiddenSyncError(f"{name} brings a number from the host while recording")
        written = written_by(operator, args, kwargs)
        if name == "copy_" and self._is_pinned(args[0]) != self._is_pinned(args[1]):
            return self._copy(args[0], args[1])
        if recording is not None:
            return recording.do(operator, args, kwargs, written)
        out = operator(*args, **kwargs)
        tensors = tensors_of((*args, *kwargs.values()))
        keys = {key_of(tensor) for tensor in tensors}
        made = [tensor for tensor in tensors_of(out) if key_of(tensor) not in keys]
        if made or written:
            self._current.learn(self._host.known)
            reads = [tensor for tensor in tensors if not any(tensor is other for other in written)]
            self._memories.touch(
                self._current,
                name,
                [tensor.untyped_storage() for tensor in reads if not self._is_pinned(tensor)],
                [
                    tensor.untyped_storage()
                    for tensor in (*written, *made)
                    if not self._is_pinned(tensor)
                ],
            )
        return out

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Between the device and pinned memory."""
        if self._recording is not None:
            raise HiddenSyncError("a copy from or to the host was recorded")
        self._current.learn(self._host.known)
        stream, content = self._current, source.clone()
        # Memory is watched as a whole; what is copied from, in parts perhaps, is compared instead.
        if self._is_pinned(target):
            self._memories.written_before(stream, "a copy", source.untyped_storage())
            stream.time += 1
            poison(target)
        else:
            self._memories.touch(stream, "a copy", [], [target.untyped_storage()])
            target.copy_(content)
        arrives = target if self._is_pinned(target) else None
        self._copies.append(_Copy(stream, stream.time, Place(source), content, arrives))
        return target

    def _arrive(self) -> None:
        """The host has waited: copies that were to be done by now are."""
        done = [copy for copy in self._copies if self._host.has_waited(copy.stream, copy.time)]
        self._copies = [copy for copy in self._copies if copy not in done]
        with self.unwatched():
            for copy in done:
                where = "pinned" if copy.target is None else "device"
                if copy.source.ref.freed:
                    raise StreamOrderError(f"{where} memory was freed while it was copied")
                before, now = (
                    tensor.contiguous().view(torch.uint8)
                    for tensor in (copy.content, copy.source.tensor())
                )
                if not torch.equal(before, now):
                    raise StreamOrderError(
                        f"{where} memory was written while a copy out of it was under way"
                    )
                if copy.target is not None:
                    copy.target.copy_(copy.content)

    def _is_pinned(self, tensor: object) -> bool:
        return isinstance(tensor, torch.Tensor) and key_of(tensor) in self._pinned


class FakeGraph:
    """A graph of a `FakeDevice`."""

    def __init__(self, device: FakeDevice, recording: Recording) -> None:
        self._device = device
        self._recording: Recording | None = recording

    def replay(self) -> None:
        if self._recording is None:
            raise ReplayError("a graph was replayed after it gave its memory back")
        self._device.replay(self._recording)

    def reset(self) -> None:
        self._recording = None
