"""`RowLogprobs`: logprobs of consecutive positions, as few bytes."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from struct import Struct
from typing import Final

from asyncinfer.chunk import TokenLogprob

__all__ = ["FIXED_WORDS", "RowLogprobs"]

#: Words of a position beside those of its alternatives.
FIXED_WORDS: Final = 3


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """A position is one record of 32-bit words, in the machine's byte order: token id, logprob (a
    float), rank; then the ids of its alternatives, then their logprobs. An unpacked position takes
    fifteen times as much memory, so it is unpacked only for the caller."""

    data: bytes
    #: Alternatives of each position.
    alternatives: int

    @classmethod
    def of(cls, entries: abc.Sequence[TokenLogprob]) -> RowLogprobs:
        """Pack positions, which have equally many alternatives."""
        alternatives = len(entries[0].top) if entries else 0
        record = _record(alternatives)
        packed = [
            record.pack(
                entry.token_id,
                entry.logprob,
                entry.rank,
                *(token for token, _ in entry.top),
                *(logprob for _, logprob in entry.top),
            )
            for entry in entries
        ]
        return cls(b"".join(packed), alternatives)

    @classmethod
    def join(cls, parts: Iterable[RowLogprobs]) -> RowLogprobs:
        """Join parts, one at least, which have equally many alternatives."""
        rows = list(parts)
        return cls(b"".join(row.data for row in rows), rows[0].alternatives)

    def __len__(self) -> int:
        """Positions."""
        return len(self.data) // self._width

    def __iter__(self) -> Iterator[TokenLogprob]:
        """Unpack position by position; alternatives come best first, equals by their ids."""
        stop = FIXED_WORDS + self.alternatives
        for words in _record(self.alternatives).iter_unpack(self.data):
            logprobs = words[stop:]
            top = zip(words[FIXED_WORDS:stop], logprobs, strict=True)
            # `topk` gives them best first, but equals in no fixed order.
            equals = len(set(logprobs)) < self.alternatives
            pairs = sorted(top, key=lambda pair: (-pair[1], pair[0])) if equals else top
            yield TokenLogprob(words[0], words[1], words[2], tuple(pairs))

    def best(self) -> Iterator[tuple[int, float]]:
        """Unpack the first position's alternatives one by one, in the order of `__iter__`."""
        ids = memoryview(self.data)[4 * FIXED_WORDS :].cast("i")
        logprobs = memoryview(self.data)[4 * (FIXED_WORDS + self.alternatives) :].cast("f")
        for logprob, equals in groupby(range(self.alternatives), logprobs.__getitem__):
            yield from ((token, logprob) for token in sorted(ids[at] for at in equals))

    def __getitem__(self, positions: slice) -> RowLogprobs:
        start, stop, step = positions.indices(len(self))
        assert step == 1
        width = self._width
        return RowLogprobs(self.data[start * width : stop * width], self.alternatives)

    @property
    def _width(self) -> int:
        return 4 * (FIXED_WORDS + 2 * self.alternatives)


def _record(alternatives: int) -> Struct:
    return Struct(f"=ifi{alternatives}i{alternatives}f")
