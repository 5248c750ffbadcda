"""`WeightLoader`: reads a checkpoint's files straight into the model's tensors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Final

import torch

from asyncinfer.weights.file_reader import FileReader
from asyncinfer.weights.memory import empty
from asyncinfer.weights.packed import STORED, Packed
from asyncinfer.weights.progress import LoadProgress, OnProgress
from asyncinfer.weights.tensor_files import TensorFiles

__all__ = ["WeightLoader"]

#: Bytes that one thread reads at a time; `progress` is called after each chunk.
CHUNK_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of a tensor of the checkpoint, and where it goes."""

    file: str
    tensor: str
    #: Bytes from the tensor's beginning.
    offset: int
    stored: torch.dtype
    #: As many elements of the model's tensor, in order.
    target: torch.Tensor

    @property
    def size(self) -> int:
        return self.target.numel() * self.stored.itemsize


class _Buffer:
    """Host memory in which a chunk waits for its copy; pinned for a GPU."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def copy(self, chunk: _Chunk) -> None:
        """Copy the chunk to its target; on a GPU in the order of the current stream."""
        source = self.memory[: chunk.size].view(chunk.stored)
        if chunk.target.dtype != chunk.stored:
            # Convert on the target's device.
            source = source.to(chunk.target.device, non_blocking=True)
        chunk.target.copy_(source, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(chunk.target.device))

    def ready(self) -> bool:
        """Whether it may be written to."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until it may be written to."""
        if self._copied is not None:
            self._copied.synchronize()


class WeightLoader:
    """A `WeightSource` that streams a checked checkpoint: several threads read its pieces in
    chunks, straight into the model's tensors. Chunks for a GPU, or for another dtype than the
    stored one, go through a few buffers, so that the host holds at most `threads + 1` times `chunk`
    bytes beside the model's tensors.

    It belongs to the thread that calls it. When `progress` raises, reading stops.
    """

    def __init__(
        self,
        checkpoint: TensorFiles[FileReader],
        table: Mapping[str, Packed],
        device: torch.device,
        dtype: torch.dtype,
        progress: OnProgress | None,
        *,
        chunk: int = CHUNK_BYTES,
    ) -> None:
        self._checkpoint = checkpoint
        self._left = dict(table)
        self._device = device
        self._dtype = dtype
        self._progress = progress
        self._chunk = chunk
        self._buffers: deque[_Buffer] = deque()
        self._made = 0
        self._done = 0
        sizes = [
            math.prod(piece.shape) * self._stored(piece.name).itemsize
            for packed in table.values()
            for piece in packed.pieces
        ]
        self._total = sum(sizes)
        self._buffer_bytes = min(chunk, max(sizes, default=0))
        self._report("")

    def __call__(self, name: str) -> torch.Tensor:
        packed = self._left.pop(name)
        target = empty(packed.shape, packed.dtype or self._dtype, self._device)
        reading: deque[tuple[_Chunk, _Buffer | None, Future[None]]] = deque()
        try:
            for chunk in self._chunks(packed, target):
                if len(reading) > self._checkpoint.reader.threads:
                    self._finish(*reading.popleft())
                reading.append(self._begin(chunk))
            while reading:
                self._finish(*reading.popleft())
        finally:
            # No thread may write to memory that is given up.
            for _, _, read in reading:
                read.cancel()
            wait([read for _, _, read in reading])
        return target

    def finish(self) -> None:
        """Assert that every tensor of the table has been asked for."""
        assert not self._left, f"the model never asked for {sorted(self._left)}"

    def _chunks(self, packed: Packed, target: torch.Tensor) -> Iterator[_Chunk]:
        flat, start = target.view(-1), 0
        for piece in packed.pieces:
            file, stored = self._checkpoint.tensors[piece.name].file, self._stored(piece.name)
            elements = math.prod(piece.shape)
            step = max(1, self._chunk // stored.itemsize)
            for first in range(0, elements, step):
                part = flat[start + first : start + min(first + step, elements)]
                yield _Chunk(file, piece.name, first * stored.itemsize, stored, part)
            start += elements

    def _begin(self, chunk: _Chunk) -> tuple[_Chunk, _Buffer | None, Future[None]]:
        direct = chunk.target.device.type == "cpu" and chunk.target.dtype == chunk.stored
        buffer = None if direct else self._buffer()
        memory = chunk.target.view(torch.uint8) if buffer is None else buffer.memory[: chunk.size]
        args = chunk.file, chunk.tensor, chunk.offset, memory.numpy().data
        reader = self._checkpoint.reader
        if chunk.size >= self._chunk // 4:
            return chunk, buffer, reader.start(reader.read, *args)
        # Waking another thread would take longer than the read.
        read: Future[None] = Future()
        reader.read(*args)
        read.set_result(None)
        return chunk, buffer, read

    def _finish(self, chunk: _Chunk, buffer: _Buffer | None, read: Future[None]) -> None:
        read.result()
        if buffer is not None:
            buffer.copy(chunk)
            self._buffers.append(buffer)
        self._done += chunk.size
        self._report(chunk.tensor)

    def _buffer(self) -> _Buffer:
        """A free buffer; waits for a copy only if there may be no further buffer."""
        full = self._made > self._checkpoint.reader.threads
        if self._buffers and (full or self._buffers[0].ready()):
            buffer = self._buffers.popleft()
            buffer.wait()
            return buffer
        self._made += 1
        return _Buffer(self._buffer_bytes, self._device)

    def _stored(self, name: str) -> torch.dtype:
        return STORED[self._checkpoint.tensors[name].dtype]

    def _report(self, tensor: str) -> None:
        if self._progress is not None:
            self._progress(LoadProgress(self._done, self._total, tensor))
