"""`WeightLoader`: reads a checkpoint's files straight into the model's tensors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from itertools import groupby
from types import MappingProxyType
from typing import Final

import torch

from asyncinfer.kernels.block_types import BLOCK_TYPES
from asyncinfer.kernels.native import laying_kernels
from asyncinfer.quantization import BlockWeight, PackedWeight, as_tensor, stacked
from asyncinfer.stats import LoadProgress
from asyncinfer.weights.file_reader import FileReader
from asyncinfer.weights.host_buffer import FilePart, HostBuffer
from asyncinfer.weights.laying import Matrix, NumberLayer, PreparedMatrices
from asyncinfer.weights.memory import empty
from asyncinfer.weights.packed import Packed, Piece
from asyncinfer.weights.quantised import QuantisedMatrix, blaming, fill_rows, torch_dtype
from asyncinfer.weights.tensor_files import TensorFiles

__all__ = ["LoadProgress", "OnProgress", "WeightLoader"]

#: Is told how far a model has been loaded.
OnProgress = Callable[[LoadProgress], None]

#: Bytes that one thread reads at a time; `progress` is called after each chunk.
CHUNK_BYTES: Final = 8 << 20
#: Numbers that are dequantised at a time: 1 MiB of float32, which fits a core's cache.
_TILE: Final = 1 << 18


class WeightLoader:
    """A `WeightSource` that streams a checked checkpoint: several threads read its pieces in
    chunks, straight into the model's tensors. Chunks for a GPU, or for another dtype than the
    stored one, go through a few buffers, so that the host holds at most `threads + 1` times `chunk`
    bytes beside the model's tensors. A matrix in `quantised` is read as it is stored, brought to
    the device and dequantised there, rows at a time, so that one such matrix is held beside them.
    With `keep_packed` a matrix stays quantised if all of its pieces are.

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
        quantised: Mapping[str, QuantisedMatrix] = MappingProxyType({}),
        keep_packed: bool = False,
        beside: Iterable[str] = (),
        chunk: int = CHUNK_BYTES,
        reads: bool = True,
    ) -> None:
        """`beside` names the tensors that `as_stored` will be asked for. Unless it `reads`, tensors
        are what they would be, of any numbers."""
        self._checkpoint = checkpoint
        self._left = dict(table)
        self._device = device
        self._dtype = dtype
        self._progress = progress
        self._quantised = quantised
        self._keep_packed = keep_packed
        self._chunk = chunk
        self._reads = reads
        self.buffers: deque[HostBuffer] = deque()
        self._made = 0
        self._done = 0
        on_host = keep_packed and reads and device.type == "cpu"
        kernels = laying_kernels() if on_host and quantised else None
        self._layer: NumberLayer | None = None
        if kernels is not None:
            self._layer = NumberLayer(checkpoint, kernels, self.as_stored, self._count, chunk)
        self._prepared: dict[str, PreparedMatrices] = {}
        plain, self._total = [], 0
        for packed in table.values():
            if self._stays_packed(packed):
                self._total += sum(map(self._packed_bytes, packed.pieces))
            else:
                plain += [piece.name for piece in packed.pieces if piece.name not in quantised]
        sizes = [self._size(name) for name in plain]
        parts = [name for matrix in quantised.values() for name in matrix.tensors.values()]
        parts += beside
        self._total += sum(sizes) + sum(map(self._size, parts))
        self._buffer_bytes = min(chunk, max(sizes, default=0))
        self._report("")

    def __call__(self, name: str) -> torch.Tensor | PackedWeight:
        packed = self._left.pop(name)
        if self._stays_packed(packed):
            return self._blocks(packed)
        if self._keeps_numbers(packed):
            return self._kept(name, packed)
        target = empty(packed.shape, packed.held_in(self._dtype), self._device)
        self._read(self._plain(packed, target))
        start = 0
        for piece in packed.pieces:
            size = math.prod(piece.shape)
            if piece.name in self._quantised:
                matrix = self._quantised[piece.name]
                parts = {part: self.as_stored(name) for part, name in matrix.tensors.items()}
                part = target.view(-1)[start : start + size].view(piece.shape)
                self._fill(part, matrix, parts)
            start += size
        return target

    def as_stored(self, name: str) -> torch.Tensor:
        """A tensor of the checkpoint as it is, on the device."""
        stored = self._checkpoint.tensors[name]
        dtype = torch_dtype(stored.dtype)
        part = empty(stored.shape, dtype, torch.device("cpu"))
        self._read(self._chunks(name, torch.uint8, part.view(-1).view(torch.uint8)))
        return part.to(self._device)

    def finish(self) -> None:
        """Assert that every tensor of the table has been asked for."""
        assert not self._left, f"the model never asked for {sorted(self._left)}"

    def _read(self, chunks: Iterable[FilePart]) -> None:
        """Fill the chunks' targets, which are tensors of the model or parts of them."""
        if not self._reads:
            return
        reading: deque[tuple[FilePart, HostBuffer | None, Future[None]]] = deque()
        try:
            for chunk in chunks:
                if len(reading) > self._checkpoint.reader.threads:
                    self._finish(*reading.popleft())
                reading.append(self._begin(chunk))
            while reading:
                self._finish(*reading.popleft())
        finally:
            # Before the memory is freed, no thread may write to it any more.
            for _, _, read in reading:
                read.cancel()
            wait([read for _, _, read in reading])

    def _stays_packed(self, packed: Packed) -> bool:
        return (
            self._keep_packed
            and packed.dtype is None
            and all(self._block_type(piece) is not None for piece in packed.pieces)
        )

    def _keeps_numbers(self, packed: Packed) -> bool:
        """Whether all pieces of a tensor have formats that may keep their numbers."""
        return (
            self._keep_packed
            and packed.dtype is None
            and all(
                piece.name in self._quantised
                and self._quantised[piece.name].format.keeps(piece.shape)
                for piece in packed.pieces
            )
        )

    def _kept(self, name: str, packed: Packed) -> torch.Tensor | PackedWeight:
        """The pieces with their numbers as they are; as floats if one of them cannot be so."""
        matrices = self._prepare(name, packed)
        if self._layer is not None:
            laid = self._layer(matrices, self._dtype, self._prepare_next)
            if laid is not None:
                return laid
        weights = [self._whole(matrix) for matrix in matrices.matrices]
        numbers = [weight for weight in weights if isinstance(weight, PackedWeight)]
        if len(numbers) == len(weights):
            return stacked(numbers)
        return torch.cat([as_tensor(weight) for weight in weights])

    def _prepare(self, name: str, packed: Packed) -> PreparedMatrices:
        if name in self._prepared:
            return self._prepared.pop(name)
        matrices = [Matrix(piece.shape, self._quantised[piece.name]) for piece in packed.pieces]
        return (
            PreparedMatrices(matrices, None)
            if self._layer is None
            else self._layer.prepare(matrices)
        )

    def _prepare_next(self) -> None:
        """Prepare the matrices that the model is going to ask for next, by the table's order."""
        kept = (name for name, packed in self._left.items() if self._keeps_numbers(packed))
        name = next(kept, None)
        if name is not None:
            self._prepared[name] = self._prepare(name, self._left[name])

    def _whole(self, matrix: Matrix) -> torch.Tensor | PackedWeight:
        matrix.read(self.as_stored)
        with blaming(self._checkpoint, matrix.of):
            kept = matrix.of.format.kept(matrix.parts, matrix.shape, self._dtype)
        if kept is not None:
            return kept
        target = empty(matrix.shape, self._dtype, self._device)
        self._fill(target, matrix.of, matrix.parts)
        return target

    def _block_type(self, piece: Piece) -> str | None:
        return self._checkpoint.block_type(piece.name)

    def _packed_bytes(self, piece: Piece) -> int:
        """Bytes of a piece that is stored in blocks."""
        kind = BLOCK_TYPES[self._block_type(piece) or ""]
        return math.prod(piece.shape) // kind.numbers * kind.size

    def _blocks(self, packed: Packed) -> PackedWeight:
        """The pieces byte for byte, those of one type that are neighbours in one matrix."""
        weights = []
        for code, run in groupby(packed.pieces, self._block_type):
            pieces = list(run)
            rows = sum(piece.shape[0] for piece in pieces)
            sizes = [self._packed_bytes(piece) for piece in pieces]
            blocks = empty((rows, sum(sizes) // rows), torch.uint8, torch.device("cpu"))
            parts = zip(pieces, torch.split(blocks.view(-1), sizes), strict=True)
            self._read(
                chunk
                for piece, part in parts
                for chunk in self._chunks(piece.name, torch.uint8, part)
            )
            weights.append(BlockWeight(blocks.to(self._device), code or "", self._dtype))
        return stacked(weights)

    def _plain(self, packed: Packed, target: torch.Tensor) -> Iterator[FilePart]:
        """The chunks of the pieces that are not quantised."""
        flat, start = target.view(-1), 0
        for piece in packed.pieces:
            elements = math.prod(piece.shape)
            if piece.name not in self._quantised:
                part = flat[start : start + elements]
                yield from self._chunks(piece.name, self._stored(piece.name), part)
            start += elements

    def _chunks(self, name: str, stored: torch.dtype, flat: torch.Tensor) -> Iterator[FilePart]:
        file, step = self._checkpoint.tensors[name].file, max(1, self._chunk // stored.itemsize)
        for first in range(0, len(flat), step):
            yield FilePart(file, name, first * stored.itemsize, stored, flat[first : first + step])

    def _fill(
        self, target: torch.Tensor, matrix: QuantisedMatrix, parts: Mapping[str, torch.Tensor]
    ) -> None:
        if not self._reads:
            return
        step = max(1, _TILE // math.prod(target.shape[1:]))
        with blaming(self._checkpoint, matrix):
            rows = matrix.format.rows(parts, tuple(target.shape))
        fill_rows(target, rows, step)

    def _begin(self, chunk: FilePart) -> tuple[FilePart, HostBuffer | None, Future[None]]:
        direct = chunk.target.device.type == "cpu" and chunk.target.dtype == chunk.stored
        buffer = None if direct else self._buffer()
        memory = chunk.target.view(torch.uint8) if buffer is None else buffer.memory[: chunk.size]
        args = chunk.file, chunk.tensor, chunk.offset, memory.numpy().data
        reader = self._checkpoint.reader
        function = reader.read_raw if chunk.stored is torch.uint8 else reader.read
        if chunk.size >= self._chunk // 4:
            return chunk, buffer, reader.start(function, *args)
        # A small read: waking another thread would take longer.
        read: Future[None] = Future()
        function(*args)
        read.set_result(None)
        return chunk, buffer, read

    def _finish(self, chunk: FilePart, buffer: HostBuffer | None, read: Future[None]) -> None:
        read.result()
        if buffer is not None:
            buffer.copy(chunk)
            self.buffers.append(buffer)
        self._count(chunk.size, chunk.tensor)

    def _buffer(self) -> HostBuffer:
        """A free buffer; waits for a copy only if there may be no further buffer."""
        full = self._made > self._checkpoint.reader.threads
        if self.buffers and (full or self.buffers[0].ready()):
            buffer = self.buffers.popleft()
            buffer.wait()
            return buffer
        self._made += 1
        return HostBuffer(self._buffer_bytes, self._device)

    def _stored(self, name: str) -> torch.dtype:
        return torch_dtype(self._checkpoint.tensors[name].dtype)

    def _size(self, name: str) -> int:
        """Bytes of a tensor of the checkpoint."""
        stored = self._checkpoint.tensors[name]
        return math.prod(stored.shape) * torch_dtype(stored.dtype).itemsize

    def _count(self, size: int, tensor: str) -> None:
        self._done += size
        self._report(tensor)

    def _report(self, tensor: str) -> None:
        if self._progress is not None:
            self._progress(LoadProgress(self._done, self._total, tensor))
