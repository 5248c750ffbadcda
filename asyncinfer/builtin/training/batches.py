"""From token ids to training batches: shuffled, slightly varied, packed without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from asyncinfer.builtin.training.vocabulary import END_OF_TEXT

_LINE, _BLANK = "Ċ", "Ġ"  # newline and space in the byte-level alphabet


class Packer:
    """Turns tokenised documents into an endless row of windows, a new mixture every epoch.

    Two variations make the model better to hold in the hand than the files alone would:

    - Some files are cut before a top-level `def` or `class`, because prompts begin with one and
      files seldom do.
    - Some line ends are parted from the indentation that follows them, because a prompt may end
      between the two.
    """

    def __init__(
        self,
        documents: Sequence[Sequence[int]],
        tokenizer: Tokenizer,
        *,
        seed: int,
        cut: float = 0.3,
        split: float = 0.04,
    ) -> None:
        self._documents = [torch.tensor(ids, dtype=torch.int32) for ids in documents]
        self._random = torch.Generator().manual_seed(seed)
        self._cut = cut
        self._split = split
        vocabulary = tokenizer.get_vocab()
        self._end = torch.tensor([vocabulary[END_OF_TEXT]], dtype=torch.int32)
        self._opens = torch.zeros(len(vocabulary), dtype=torch.bool)
        self._closes = torch.zeros(len(vocabulary), dtype=torch.bool)
        self._head = torch.arange(len(vocabulary), dtype=torch.int32)
        self._tail = torch.full((len(vocabulary),), -1, dtype=torch.int32)
        for token, index in vocabulary.items():
            self._opens[index] = token in {"def", "class", "@", "async"}
            self._closes[index] = token.endswith(_LINE)
            line = token.rstrip(_BLANK)
            blanks = token[len(line) :]
            if blanks and line.endswith(_LINE) and line in vocabulary and blanks in vocabulary:
                self._head[index] = vocabulary[line]
                self._tail[index] = vocabulary[blanks]

    def windows(self, length: int) -> Iterator[Tensor]:
        """Windows of `length` token ids (int64), each epoch in a new order, cut in new places."""
        while True:
            stream = self._epoch()
            room = min(length, len(stream) - length)
            offset = int(torch.randint(max(1, room), (1,), generator=self._random))
            count = (len(stream) - offset) // length
            rows = stream[offset : offset + count * length].view(count, length)
            for index in torch.randperm(count, generator=self._random).tolist():
                yield rows[index].long()

    def batches(self, rows: int, length: int) -> Iterator[Tensor]:
        """Batches of `[rows, length]` token ids."""
        windows = self.windows(length)
        while True:
            yield torch.stack([next(windows) for _ in range(rows)])

    def _epoch(self) -> Tensor:
        order = torch.randperm(len(self._documents), generator=self._random).tolist()
        parts = [part for index in order for part in (self._end, self._documents[index])]
        return self._split_lines(self._cut_documents(torch.cat(parts).long()))

    def _cut_documents(self, stream: Tensor) -> Tensor:
        """Put an end of text before some of the top-level definitions."""
        starts = self._opens[stream]
        starts[1:] &= self._closes[stream[:-1]]
        starts[0] = False
        starts &= torch.rand(len(stream), generator=self._random) < self._cut
        counts = 1 + starts.long()
        out = stream.repeat_interleave(counts)
        out[(counts.cumsum(0) - counts)[starts]] = self._end.long()
        return out

    def _split_lines(self, stream: Tensor) -> Tensor:
        """Write some tokens of a line end with its indentation as two tokens."""
        chosen = self._tail[stream] >= 0
        chosen &= torch.rand(len(stream), generator=self._random) < self._split
        counts = 1 + chosen.long()
        out = stream.repeat_interleave(counts)
        second = (counts.cumsum(0) - 1)[chosen]
        out[second - 1] = self._head[stream[chosen]].long()
        out[second] = self._tail[stream[chosen]].long()
        return out
