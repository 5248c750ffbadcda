"""`LogitProcessors`: changes of logits before the temperature, on the rows that ask for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.sampling.bad_words import BadWords, arrange
from asyncinfer.sampling.history import TokenHistory
from asyncinfer.sampling.options import Uses
from asyncinfer.sampling.penalties import Occurrences, penalise_repetition
from asyncinfer.sampling.token_lists import TokenLists
from asyncinfer.sampling.token_masks import TokenMasks
from asyncinfer.sampling.transfer import upload
from asyncinfer.scheduler import Join

__all__ = ["LogitProcessors"]

I64 = npt.NDArray[np.int64]


class LogitProcessors:
    """Applies logit bias, allowed tokens, bad words, grammars and `min_tokens`, then the penalties.
    Keeps token ids by slot; numbers are in the table of options."""

    def __init__(self, vocab_size: int, history: TokenHistory) -> None:
        self._vocab_size = vocab_size
        self._history = history
        self._device = history.device
        self._biases = TokenLists(self._device)
        self._allowed = TokenLists(self._device)
        self._stops = TokenLists(self._device)
        self._bad_words = BadWords(history)
        self._occurrences = Occurrences()
        self.masks = TokenMasks(vocab_size, history.device)

    def join(self, slot: int, join: Join, row: npt.NDArray[Any]) -> Uses:
        """Fill in the slot's `row` of the table; returns the options that the slot uses."""
        uses, params = Uses(0), join.params
        words = arrange(join.bad_ids, self._vocab_size)
        # The model cannot draw an id beyond its vocabulary, so there is nothing to bar.
        stops = [token for token in join.stop_ids if token < self._vocab_size]
        biases = dict(params.logit_bias)
        biases.update(dict.fromkeys(words.single, -np.inf))
        if biases:
            uses |= Uses.BIAS
            self._biases.put(slot, biases)
        if params.allowed_token_ids is not None:
            uses |= Uses.ALLOWED
            self._allowed.put_ids(slot, params.allowed_token_ids)
        if words.tables:
            uses |= Uses.BAD_WORDS
            self._bad_words.put(slot, words)
        if join.masked:
            uses |= Uses.GRAMMAR
        if params.min_tokens and stops:
            uses |= Uses.MIN_TOKENS
            row["min_tokens"] = params.min_tokens
            self._stops.put(slot, dict.fromkeys(stops, -np.inf))
        if params.repetition_penalty != 1:
            uses |= Uses.REPETITION
            row["repetition"] = params.repetition_penalty
        if params.presence_penalty or params.frequency_penalty:
            uses |= Uses.OCCURRENCE
            row["presence"] = params.presence_penalty
            row["frequency"] = params.frequency_penalty
        return uses

    def leave(self, slot: int) -> None:
        for lists in (self._biases, self._allowed, self._stops, self._bad_words):
            lists.drop(slot)

    def apply(
        self, logits: torch.Tensor, slots: I64, positions: I64, table: npt.NDArray[Any]
    ) -> None:
        """Change `logits` float32 `[n, vocab]` in place.

        Args:
            slots, positions: int64 `[n]`, as in `SamplingState.sample`.
            table: `[n]`, the slots' rows of the table of options.
        """
        uses, prompt_lens = table["uses"], table["prompt_len"]

        def using(use: Uses) -> I64:
            return np.flatnonzero(uses & use)

        if (rows := using(Uses.BIAS)).size:
            self._add(logits, self._biases, slots, rows)
        if (rows := using(Uses.ALLOWED)).size:
            at, token, _ = self._allowed.entries(slots[rows], rows)
            kept = logits[at, token]
            logits[upload(self._device, rows)[0]] = -torch.inf
            logits[at, token] = kept
        if (rows := using(Uses.BAD_WORDS)).size:
            self._bad_words.bar(logits, slots[rows], rows, prompt_lens[rows], positions[rows])
        if (rows := using(Uses.GRAMMAR)).size:
            self.masks.bar(logits, slots[rows], positions[rows], rows)
        rows = using(Uses.MIN_TOKENS)
        rows = rows[(positions - prompt_lens < table["min_tokens"])[rows]]
        if rows.size:
            self._add(logits, self._stops, slots, rows)

        if (rows := using(Uses.REPETITION)).size:
            at, penalty = upload(self._device, rows, table["repetition"][rows])
            tokens, _ = self._history.window(slots[rows], np.zeros_like(rows), positions[rows])
            penalise_repetition(logits, at, tokens, penalty)
        if (rows := using(Uses.OCCURRENCE)).size:
            at, presence, frequency = upload(
                self._device, rows, table["presence"][rows], table["frequency"][rows]
            )
            tokens, valid = self._history.window(slots[rows], prompt_lens[rows], positions[rows])
            self._occurrences.penalise(logits, at, tokens, valid, presence, frequency)

    def _add(self, logits: torch.Tensor, lists: TokenLists, slots: I64, rows: I64) -> None:
        at, token, value = lists.entries(slots[rows], rows)
        logits[at, token] = logits[at, token] + value
