"""`BadWords`: token sequences that may not be completed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.sampling.history import TokenHistory
from asyncinfer.sampling.transfer import upload

__all__ = ["BadWords"]

I64 = npt.NDArray[np.int64]

#: Matches every token: words shorter than the longest are padded with it on the left.
_ANY = -1
#: Matches no token: where the answer is shorter than the longest word.
_NONE = -2


class BadWords:
    """Bars the last token of a sequence where the answer ends with the tokens before it.

    Sequences of one token need no history and are not kept here.
    """

    def __init__(self, history: TokenHistory) -> None:
        self._history = history
        self._words: dict[int, list[tuple[int, ...]]] = {}
        self._asked: tuple[bytes, bytes] | None = None
        self._flat: list[torch.Tensor] = []

    def put(self, slot: int, words: Sequence[tuple[int, ...]]) -> None:
        self._words[slot] = list(words)
        self._asked = None

    def drop(self, slot: int) -> None:
        if self._words.pop(slot, None) is not None:
            self._asked = None

    def bar(
        self, logits: torch.Tensor, slots: I64, rows: I64, prompt_lens: I64, positions: I64
    ) -> None:
        """Set the logits of tokens that would complete a word to -inf, in place.

        Args:
            logits: float32 `[n, vocab]`.
            slots, rows: int64 `[m]`: slots that have words and their rows of `logits`.
            prompt_lens, positions: int64 `[m]`: first position of the answer, and the one drawn.
        """
        of, row_of, prefixes, last = self._table(slots, rows)
        width = prefixes.shape[1]
        before = positions[:, None] - width + np.arange(width)
        (answered,) = upload(logits.device, before >= prompt_lens[:, None])
        recent = self._history.read(np.repeat(slots, width), np.maximum(before, 0).reshape(-1))
        recent = recent.view(before.shape).masked_fill_(~answered, _NONE)
        ends = (recent[of] == prefixes) | (prefixes == _ANY)
        barred = torch.zeros_like(last, dtype=logits.dtype)
        barred.masked_fill_(ends.all(dim=1), -torch.inf)
        logits.index_put_((row_of, last), barred, accumulate=True)

    def _table(self, slots: I64, rows: I64) -> list[torch.Tensor]:
        """Per word: index into `slots`, row of the logits, prefix `[width]`, last token."""
        asked = (slots.tobytes(), rows.tobytes())
        if asked != self._asked:
            each = [self._words[slot] for slot in slots.tolist()]
            words = [word for of_slot in each for word in of_slot]
            counts = [len(of_slot) for of_slot in each]
            width = max(map(len, words)) - 1
            prefixes = np.full((len(words), width), _ANY, np.int64)
            for prefix, word in zip(prefixes, words, strict=True):
                prefix[width - len(word) + 1 :] = word[:-1]
            self._flat = upload(
                self._history.device,
                np.repeat(np.arange(len(slots)), counts),
                np.repeat(rows, counts),
                prefixes,
                np.array([word[-1] for word in words], np.int64),
            )
            self._asked = asked
        return self._flat
