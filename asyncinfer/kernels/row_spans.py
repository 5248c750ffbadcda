"""`RowSpans`: how the tokens of one pass belong to rows, for operators that go through each row's
tokens in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["CHUNK", "ChunkBatch", "Padding", "RowSpans"]

I64 = npt.NDArray[np.int64]

#: Tokens of a chunk at most: within one, the work grows with their square.
CHUNK: Final = 64


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """Chunks of like length of different rows, which are computed together. All but `hidden` are
    int64, and lie on the pass's device."""

    #: `[chunks]`: the row of each.
    rows: torch.Tensor
    #: `[chunks, width]`: each chunk's tokens. Behind a shorter chunk it is any token.
    tokens: torch.Tensor
    #: bool `[chunks, width]`: which of `tokens` are not the chunk's; None: all are.
    hidden: torch.Tensor | None
    #: `[n]`: the places of those that are, in `tokens` flattened; and the tokens in the same order.
    real: torch.Tensor
    real_tokens: torch.Tensor
    #: `[marked]`: the chunks that end at a mark, and which marks these are.
    marked: torch.Tensor
    marks: torch.Tensor


@dataclass(frozen=True, slots=True)
class Padding:
    """Rows with room before each for so many tokens more. All are int64 on the pass's device."""

    size: int
    #: `[tokens]`: where each token lies.
    tokens: torch.Tensor
    #: `[rows * past]`: the room, row after row.
    room: torch.Tensor
    #: `[marks, past]`: the last places up to each mark.
    before_marks: torch.Tensor


class RowSpans:
    """The tokens of one pass, row after row, and the marks: tokens after which states are wanted.

    The host knows all of it, so that no operator waits for the device. What layers need is made
    once for all of them.

    Args:
        counts: tokens of each row, one at least.
        marks: numbers of tokens of the pass, ascending.
    """

    def __init__(
        self, counts: Sequence[int], marks: Sequence[int], device: torch.device | str = "cpu"
    ) -> None:
        self.counts = list(counts)
        self.marks = list(marks)
        self.device = torch.device(device)
        self._padding: dict[int, Padding] = {}

    @property
    def rows(self) -> int:
        return len(self.counts)

    @cached_property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def single(self) -> bool:
        """Whether each row has one token."""
        return self.tokens == self.rows

    @cached_property
    def mark_tokens(self) -> torch.Tensor:
        """`marks` as int64 on the device."""
        (marks,) = _upload(self.device, np.array(self.marks, np.int64))
        return marks

    def padded(self, past: int) -> Padding:
        """Room for `past` tokens before each row."""
        if past not in self._padding:
            numbers = np.arange(self.rows, dtype=np.int64)
            row_of = np.repeat(numbers, self.counts)
            tokens = np.arange(self.tokens, dtype=np.int64) + (row_of + 1) * past
            firsts = np.cumsum([0, *self.counts[:-1]])
            room = (firsts + numbers * past)[:, None] + np.arange(past)
            marks = tokens[np.array(self.marks, np.int64)]
            back = marks[:, None] + np.arange(1 - past, 1)
            parts = _upload(self.device, tokens, room.flatten(), back)
            self._padding[past] = Padding(self.tokens + self.rows * past, *parts)
        return self._padding[past]

    @cached_property
    def chunks(self) -> list[ChunkBatch]:
        """Chunks of all rows, in lists to be computed one after another. No chunk of a list has
        twice the tokens of another. ChunkBatch end at marks."""
        kept = {mark: place for place, mark in enumerate(self.marks)}
        arrays: list[I64] = []
        widths = []
        for chunks in _divided(self.counts, kept):
            rows, first, count = np.array(chunks, np.int64).T
            width = np.arange(count.max())
            tokens = first[:, None] + width
            real = np.flatnonzero(width < count[:, None])
            ends = [kept.get(begin + tokens - 1, -1) for _, begin, tokens in chunks]
            marks = np.array(ends, np.int64)
            marked = np.flatnonzero(marks >= 0)
            # A chunk's own first token stands in for those behind it.
            inside = np.where(width < count[:, None], tokens, first[:, None])
            arrays += [rows, inside, count, real, tokens.flatten()[real], marked, marks[marked]]
            widths.append(len(real) < tokens.size)
        uploaded = iter(_upload(self.device, *arrays))
        found = []
        for short in widths:
            rows_, inside_, count_, *rest = (next(uploaded) for _ in range(7))
            hidden = None
            if short:
                width_ = torch.arange(inside_.shape[1], device=self.device)
                hidden = width_ >= count_[:, None]
            found.append(ChunkBatch(rows_, inside_, hidden, *rest))
        return found


def _divided(counts: Sequence[int], marks: dict[int, int]) -> list[list[tuple[int, int, int]]]:
    """Lists of chunks, each a `(row, first token, tokens)`."""
    ends = list(accumulate(counts))
    parts: defaultdict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    stops, begin = sorted({*marks, *(end - 1 for end in ends)}), 0
    row = turn = 0
    for stop in stops:
        while begin <= stop:
            tokens = min(stop + 1 - begin, CHUNK)
            parts[turn, tokens.bit_length()].append((row, begin, tokens))
            begin, turn = begin + tokens, turn + 1
        if begin == ends[row]:
            row, turn = row + 1, 0
    return [parts[key] for key in sorted(parts)]


def _upload(device: torch.device, *arrays: I64) -> list[torch.Tensor]:
    """Each as a tensor of its shape, in one copy."""
    packed = torch.from_numpy(np.concatenate([each.reshape(-1) for each in arrays])).to(device)
    parts = torch.split(packed, [each.size for each in arrays])
    return [part.view(each.shape) for part, each in zip(parts, arrays, strict=True)]
