"""`BadWords`: token sequences that may not be completed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.sampling.history import TokenHistory
from asyncinfer.sampling.transfer import upload

__all__ = ["BadWords", "Words", "arrange"]

I64 = npt.NDArray[np.int64]

#: Matches every token: pads words on the left to the width of their table.
_ANY = -1
#: Matches no token: stands before the first token of an answer.
_NONE = -2


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a request, arranged for comparison."""

    #: Words of one token, which are always barred.
    single: tuple[int, ...]
    #: By width, a power of two: the tokens before the last one int64 `[words, width]`, and the last
    #: one int64 `[words]`. Several widths, so that one long word does not pad all others.
    tables: dict[int, tuple[I64, I64]]


# Cached since the `n` answers to a prompt share their words.
@lru_cache(maxsize=8)
def arrange(words: tuple[tuple[int, ...], ...], vocab_size: int) -> Words:
    """The words that the model can draw: all of their tokens are below `vocab_size`."""
    known = [word for word in words if word and max(word) < vocab_size]
    by_width: dict[int, list[tuple[int, ...]]] = {}
    for word in known:
        if len(word) > 1:
            by_width.setdefault(1 << (len(word) - 2).bit_length(), []).append(word)
    tables = {}
    for width, group in by_width.items():
        prefixes = np.full((len(group), width), _ANY, np.int64)
        for prefix, word in zip(prefixes, group, strict=True):
            prefix[width - len(word) + 1 :] = word[:-1]
        tables[width] = prefixes, np.array([word[-1] for word in group], np.int64)
    return Words(tuple(word[0] for word in known if len(word) == 1), tables)


class BadWords:
    """Bars the last token of a word where the answer ends with the tokens before it.

    Words of one token need no history: `LogitProcessors` bars them by a bias.
    """

    def __init__(self, history: TokenHistory) -> None:
        self._history = history
        self._words: dict[int, Words] = {}
        self._asked: tuple[bytes, bytes] | None = None
        #: By width; see `_tables`.
        self._flat: dict[int, list[torch.Tensor]] = {}

    def put(self, slot: int, words: Words) -> None:
        self._words[slot] = words
        self._asked = None

    def drop(self, slot: int) -> None:
        self._words.pop(slot, None)

    def bar(
        self, logits: torch.Tensor, slots: I64, rows: I64, prompt_lens: I64, positions: I64
    ) -> None:
        """Set the logits of tokens that would complete a word to -inf, in place.

        Args:
            logits: float32 `[n, vocab]`.
            slots, rows: int64 `[m]`: slots that have words, and their rows of `logits`.
            prompt_lens, positions: int64 `[m]`: first position of the answer, and the position to
                draw at.
        """
        tables = self._tables(slots, rows)
        widest = max(tables)
        before = positions[:, None] - widest + np.arange(widest)
        (answered,) = upload(logits.device, before >= prompt_lens[:, None])
        recent = self._history.read(np.repeat(slots, widest), np.maximum(before, 0).reshape(-1))
        recent = recent.view(before.shape).masked_fill_(~answered, _NONE)
        for width, (of, row_of, prefixes, last) in tables.items():
            ends = (recent[:, widest - width :][of] == prefixes) | (prefixes == _ANY)
            barred = torch.zeros_like(last, dtype=logits.dtype)
            barred.masked_fill_(ends.all(dim=1), -torch.inf)
            logits.index_put_((row_of, last), barred, accumulate=True)

    def _tables(self, slots: I64, rows: I64) -> dict[int, list[torch.Tensor]]:
        """By width, for each word: index into `slots`, row of the logits, prefix `[width]`, last
        token. Cached, since a steady batch asks for the same slots in every step."""
        asked = (slots.tobytes(), rows.tobytes())
        if asked != self._asked:
            each = [self._words[slot].tables for slot in slots.tolist()]
            widths = sorted({width for tables in each for width in tables})
            self._flat = {width: self._table(each, width, rows) for width in widths}
            self._asked = asked
        return self._flat

    def _table(
        self, each: Sequence[dict[int, tuple[I64, I64]]], width: int, rows: I64
    ) -> list[torch.Tensor]:
        has = [index for index, tables in enumerate(each) if width in tables]
        counts = [len(each[index][width][1]) for index in has]
        of = np.repeat(np.array(has, np.int64), counts)
        return upload(
            self._history.device,
            of,
            rows[of],
            np.concatenate([each[index][width][0] for index in has]),
            np.concatenate([each[index][width][1] for index in has]),
        )
