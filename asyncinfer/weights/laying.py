"""`NumberLayer`: quantised matrices from files into the blocks of a CPU's kernels."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final

import torch

from asyncinfer.kernels.native import LayingKernels
from asyncinfer.kernels.threads import one_thread
from asyncinfer.quantization import BlockEnds, LaidWeight, PackedWeight, stacked
from asyncinfer.quantization.schemes import GroupEnds, StoredNumbers
from asyncinfer.weights.file_reader import FileReader
from asyncinfer.weights.memory import empty
from asyncinfer.weights.quantised import QuantisedMatrix, blaming, torch_dtype
from asyncinfer.weights.tensor_files import TensorFiles

__all__ = ["Matrix", "NumberLayer", "PreparedMatrices"]

#: Bytes that a thread reads and lays at a time: of rows, and of what is turned, where more
#: neighbours of an output come together.
_ROWS: Final = 1 << 20
_TURNED: Final = 1 << 22
#: What is turned is read in multiples of so many words, or inputs.
_STEPS: Final = {"words": 4, "awq": 32}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A quantised matrix, and what was read of it."""

    shape: tuple[int, ...]
    of: QuantisedMatrix
    #: As `MatrixFormat.kept` takes them.
    parts: dict[str, torch.Tensor] = field(default_factory=dict)

    def read(self, stored: Callable[[str], torch.Tensor], *, but: str | None = None) -> None:
        """Have `stored` read the parts that are missing, all or all but one."""
        for part, name in self.of.tensors.items():
            if part not in self.parts and part != but:
                self.parts[part] = stored(name)


@dataclass(frozen=True, slots=True)
class PreparedMatrices:
    """Matrices below each other whose scales were read."""

    matrices: Sequence[Matrix]
    #: Those of one format that are neighbours, and the scales of their blocks. None where no
    #: kernel lays the numbers.
    runs: Sequence[tuple[Sequence[tuple[Matrix, GroupEnds]], BlockEnds]] | None


@dataclass(frozen=True, slots=True)
class _Part:
    """Neighbours in a tensor along its first dimension, and the blocks they go to."""

    tensor: str
    numbers: StoredNumbers
    first: int
    shape: tuple[int, int]
    blocks: torch.Tensor
    ends: torch.Tensor


class NumberLayer:
    """Reads numbers a piece at a time and writes each to its place, on the reader's threads: no
    copy of a matrix is ever whole beside its blocks. Belongs to the thread that calls it."""

    def __init__(
        self,
        checkpoint: TensorFiles[FileReader],
        kernels: LayingKernels,
        stored: Callable[[str], torch.Tensor],
        counted: Callable[[int, str], None],
        limit: int,
    ) -> None:
        """`stored` reads a tensor, `counted` is told of bytes that were read of one. `limit`: bytes
        that a thread reads at a time, at most."""
        self._checkpoint = checkpoint
        self._kernels = kernels
        self._stored = stored
        self._counted = counted
        self._limit = limit
        self._memory: deque[torch.Tensor] = deque()

    def prepare(self, matrices: Sequence[Matrix]) -> PreparedMatrices:
        """Read what scales the numbers, and bring it into the order of the blocks."""
        if any(matrix.of.format.numbers(matrix.shape) is None for matrix in matrices):
            return PreparedMatrices(matrices, None)
        found = []
        for matrix in matrices:
            matrix.read(self._stored, but=_numbers(matrix).part)
            with blaming(self._checkpoint, matrix.of), one_thread():
                ends = matrix.of.format.ends(matrix.parts, matrix.shape)
            if ends is None:
                return PreparedMatrices(matrices, None)
            found.append((matrix, ends))
        runs = [list(run) for _, run in groupby(found, _format)]
        with one_thread():
            return PreparedMatrices(matrices, [(run, _ends(run)) for run in runs])

    def __call__(
        self, prepared: PreparedMatrices, dtype: torch.dtype, beside: Callable[[], None]
    ) -> PackedWeight | None:
        """The matrices, for a model of this dtype. None where a kernel cannot lay them and where a
        number is NaN; their `parts` have then what was read. `beside` is called while threads lay
        the numbers."""
        if prepared.runs is None:
            return None
        weights, parts = [], []
        for run, ends in prepared.runs:
            shape = (*ends.ends.shape[:2], ends.layout.block)
            blocks = empty(shape, torch.uint8, torch.device("cpu"))
            weights.append(LaidWeight(blocks, ends.layout, ends.factor, dtype))
            rows = 0
            for matrix, own in run:
                count = own.outputs.numel()
                found = self._parts(
                    matrix, blocks[rows : rows + count], ends.ends[rows : rows + count]
                )
                if found is None:
                    return None
                parts += found
                rows += count
        if not self._read(parts, beside):
            return None
        leading = prepared.runs[0][0][0][1].outputs
        if len(leading) == 1:
            return stacked(weights)
        experts = stacked(weights).view(-1, *leading[1:])
        assert isinstance(experts, PackedWeight)
        return experts

    def _parts(
        self, matrix: Matrix, blocks: torch.Tensor, ends: torch.Tensor
    ) -> list[_Part] | None:
        """The pieces of a matrix with these blocks and ends; None where no kernel takes it."""
        numbers = _numbers(matrix)
        name = matrix.of.tensors[numbers.part]
        stored = self._checkpoint.tensors[name]
        outputs, groups, size = blocks.shape
        size -= ends.shape[-1]
        row = groups * size
        nbytes = torch.Size(stored.shape).numel() * torch_dtype(stored.dtype).itemsize
        if nbytes != outputs * row or not self._kernels.takes(numbers.order, outputs, size):
            return None
        if numbers.order.kind == "rows":
            step = max(1, min(self._limit, _ROWS) // row)
            return [
                _Part(
                    name,
                    numbers,
                    start,
                    (min(step, outputs - start), row),
                    blocks[start : start + step],
                    ends[start : start + step],
                )
                for start in range(0, outputs, step)
            ]
        count, words = stored.shape
        least = _STEPS[numbers.order.kind]
        if count % least:
            return None
        step = max(1, min(self._limit, _TURNED) // (4 * words * least)) * least
        return [
            _Part(name, numbers, start, (min(step, count - start), words), blocks, ends)
            for start in range(0, count, step)
        ]

    def _read(self, parts: Sequence[_Part], beside: Callable[[], None]) -> bool:
        """Lay all parts, and call `beside` meanwhile; False where a number is NaN."""
        reader, valid, read = self._checkpoint.reader, True, []
        futures = [reader.start(self._lay, part) for part in parts]
        try:
            beside()
            for part, future in zip(parts, futures, strict=True):
                valid &= future.result()
                read.append(part)
                self._counted(_bytes(part), part.tensor)
        finally:
            # Before the memory is freed, no thread may write to it any more.
            for future in futures:
                future.cancel()
            wait(futures)
        if not valid:
            # They are read again.
            for part in read:
                self._counted(-_bytes(part), part.tensor)
        return valid

    def _lay(self, part: _Part) -> bool:
        """Read one part and lay it, on a thread of the reader."""
        size = _bytes(part)
        try:
            memory = self._memory.pop()
        except IndexError:
            # Other threads take from it, too.
            memory = empty((0,), torch.uint8, torch.device("cpu"))
        if len(memory) < size:
            memory = empty((max(size, _ROWS),), torch.uint8, torch.device("cpu"))
        try:
            kind = torch.uint8 if part.numbers.order.kind == "rows" else torch.int32
            file, given = self._checkpoint.tensors[part.tensor].file, memory[:size]
            offset = part.first * part.shape[1] * kind.itemsize
            self._checkpoint.reader.read(file, part.tensor, offset, given.numpy().data)
            stored = given.view(kind).view(part.shape)
            return (
                self._kernels.lay(part.blocks, part.ends, part.numbers.order, stored, part.first)
                or part.numbers.code != "e4m3"
            )
        finally:
            self._memory.append(memory)


def _bytes(part: _Part) -> int:
    return part.shape[0] * part.shape[1] * (1 if part.numbers.order.kind == "rows" else 4)


def _numbers(matrix: Matrix) -> StoredNumbers:
    found = matrix.of.format.numbers(matrix.shape)
    assert found is not None
    return found


def _format(found: tuple[Matrix, GroupEnds]) -> tuple[str, int]:
    """What neighbours in one weight have in common."""
    matrix, ends = found
    return _numbers(matrix).code, ends.scales.shape[-1]


def _ends(matrices: Sequence[tuple[Matrix, GroupEnds]]) -> BlockEnds:
    """The scales and offsets of these below each other."""
    code = _numbers(matrices[0][0]).code
    scales = [ends.scales.flatten(0, -2) for _, ends in matrices]
    some = any(ends.offsets is not None for _, ends in matrices)
    offsets = [
        torch.zeros_like(scale) if ends.offsets is None else ends.offsets.flatten(0, -2)
        for scale, (_, ends) in zip(scales, matrices, strict=True)
        if some
    ]
    # Of experts' matrices, too, the second dimension is that of the inputs.
    group = matrices[0][0].shape[1] // scales[0].shape[1]
    found = BlockEnds.of(code, group, _below(scales), _below(offsets) if some else None)
    if all(ends.of_outputs is None for _, ends in matrices):
        return found
    rows, first = [], 0
    for scale, (_, ends) in zip(scales, matrices, strict=True):
        own = torch.arange(len(scale)) if ends.of_outputs is None else ends.of_outputs
        rows.append(own + first)
        first += len(scale)
    return replace(found, ends=found.ends.index_select(0, torch.cat(rows)))


def _below(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts below each other; of one no copy is made."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
