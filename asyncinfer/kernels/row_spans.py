"""`RowSpans`: how the tokens of one pass belong to rows, for operators that go through each row's
tokens in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, islice
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["CHUNK", "ChunkBatch", "ChunkSection", "ChunkTurn", "Padding", "RowSpans"]

I64 = npt.NDArray[np.int64]

#: Tokens of a chunk at most: within one, the work grows with their square.
CHUNK: Final = 64
#: Tokens of a section, unless a single turn has more: all of its chunks are in memory at once.
_SECTION: Final = 256


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """Chunks of like length, turn after turn. All but `hidden` are int64, and lie on the pass's
    device."""

    #: `[chunks, width]`: each chunk's tokens. Behind a shorter chunk it is any token.
    tokens: torch.Tensor
    #: bool `[chunks, width]`: which of `tokens` are not the chunk's; None: all are.
    hidden: torch.Tensor | None
    #: `[n]`: the places of those that are, in `tokens` flattened; and the tokens in the same order.
    real: torch.Tensor
    real_tokens: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChunkTurn:
    """Chunks of a batch, each of another row, that go on from the states of the turn before."""

    #: Which batch of the section, and which of its chunks.
    batch: int
    chunks: slice
    #: int64 `[chunks]`: their rows; None: every row of the pass, in order.
    rows: torch.Tensor | None
    #: int64 `[marked]`: which of the turn's chunks end at a mark, and at which one.
    marked: torch.Tensor
    marks: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChunkSection:
    """Turns that follow each other, and the batches of their chunks."""

    batches: list[ChunkBatch]
    turns: list[ChunkTurn]


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

    def at_marks(self, states: torch.Tensor) -> torch.Tensor:
        """Of `[tokens, ...]` those at the marks."""
        if self.marks == list(range(self.tokens)):
            return states
        return states.index_select(0, self._mark_tokens)

    @cached_property
    def _mark_tokens(self) -> torch.Tensor:
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
    def sections(self) -> list[ChunkSection]:
        """All tokens in chunks, which end at marks. A turn has one chunk of each row that has so
        many, in batches of which no chunk has twice the tokens of another."""
        kept = {mark: place for place, mark in enumerate(self.marks)}
        arrays: list[I64] = []
        #: Of each section, whether a batch has shorter chunks, and its turns.
        layouts: list[tuple[list[bool], list[tuple[int, slice, bool]]]] = []
        for section in _in_sections(_divided(self.counts, kept)):
            batches: dict[int, list[_Chunk]] = {}
            turns = []
            for bits, chunks in section:
                batch = batches.setdefault(bits, [])
                places = slice(len(batch), len(batch) + len(chunks))
                batch += chunks
                every = [row for row, _, _ in chunks] == list(range(self.rows))
                turns.append(([*batches].index(bits), places, every))
            parts = [_batch_arrays(batch) for batch in batches.values()]
            arrays += chain.from_iterable(parts)
            arrays += chain.from_iterable(_turn_arrays(chunks, kept) for _, chunks in section)
            layouts.append(([len(real) < tokens.size for tokens, _, real, _ in parts], turns))
        uploaded = iter(_upload(self.device, *arrays))
        return [
            ChunkSection(
                [self._batch(*islice(uploaded, 4), short=each) for each in short],
                [
                    ChunkTurn(number, places, None if every else rows, marked, marks)
                    for number, places, every in turns
                    for rows, marked, marks in [tuple(islice(uploaded, 3))]
                ],
            )
            for short, turns in layouts
        ]

    def _batch(
        self,
        tokens: torch.Tensor,
        counts: torch.Tensor,
        real: torch.Tensor,
        real_tokens: torch.Tensor,
        *,
        short: bool,
    ) -> ChunkBatch:
        hidden = None
        if short:
            hidden = torch.arange(tokens.shape[1], device=self.device) >= counts[:, None]
        return ChunkBatch(tokens, hidden, real, real_tokens)


#: A chunk: its row, its first token, how many it has.
_Chunk = tuple[int, int, int]


def _divided(counts: Sequence[int], marks: Mapping[int, int]) -> list[tuple[int, list[_Chunk]]]:
    """Turn after turn the chunks of like length, and the bits of that length."""
    ends = list(accumulate(counts))
    parts: defaultdict[tuple[int, int], list[_Chunk]] = defaultdict(list)
    stops, begin = sorted({*marks, *(end - 1 for end in ends)}), 0
    row = turn = 0
    for stop in stops:
        while begin <= stop:
            tokens = min(stop + 1 - begin, CHUNK)
            parts[turn, tokens.bit_length()].append((row, begin, tokens))
            begin, turn = begin + tokens, turn + 1
        if begin == ends[row]:
            row, turn = row + 1, 0
    return [(bits, parts[turn, bits]) for turn, bits in sorted(parts)]


def _in_sections(
    turns: Sequence[tuple[int, list[_Chunk]]],
) -> Iterator[list[tuple[int, list[_Chunk]]]]:
    section: list[tuple[int, list[_Chunk]]] = []
    tokens = 0
    for bits, chunks in turns:
        more = sum(count for _, _, count in chunks)
        if section and tokens + more > _SECTION:
            yield section
            section, tokens = [], 0
        section.append((bits, chunks))
        tokens += more
    yield section


def _batch_arrays(chunks: Sequence[_Chunk]) -> tuple[I64, I64, I64, I64]:
    """`tokens`, how many each chunk has, `real` and `real_tokens` of a `ChunkBatch`."""
    _, first, count = np.array(chunks, np.int64).T
    width = np.arange(count.max())
    inside, tokens = width < count[:, None], first[:, None] + width
    real = np.flatnonzero(inside)
    # A chunk's own first token stands in for those behind it.
    return np.where(inside, tokens, first[:, None]), count, real, tokens.flatten()[real]


def _turn_arrays(chunks: Sequence[_Chunk], marks: Mapping[int, int]) -> tuple[I64, I64, I64]:
    """`rows`, `marked` and `marks` of a `ChunkTurn`."""
    rows, first, count = np.array(chunks, np.int64).T
    ends = np.array([marks.get(last, -1) for last in (first + count - 1).tolist()], np.int64)
    marked = np.flatnonzero(ends >= 0)
    return rows, marked, ends[marked]


def _upload(device: torch.device, *arrays: I64) -> list[torch.Tensor]:
    """Each as a tensor of its shape, in one copy."""
    packed = torch.from_numpy(np.concatenate([each.reshape(-1) for each in arrays])).to(device)
    parts = torch.split(packed, [each.size for each in arrays])
    return [part.view(each.shape) for part, each in zip(parts, arrays, strict=True)]
