"""`SamplingState`: the sampling options of every slot, and the chain that applies them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.sampling.bad_words import BadWords
from asyncinfer.sampling.filters import keep_likely, keep_typical
from asyncinfer.sampling.history import TokenHistory
from asyncinfer.sampling.logprobs import score_tokens
from asyncinfer.sampling.noise import draw_race, mix_tokens, row_keys
from asyncinfer.sampling.penalties import Occurrences, penalise_repetition
from asyncinfer.sampling.table import Uses, options_table
from asyncinfer.sampling.token_lists import TokenLists
from asyncinfer.sampling.transfer import upload
from asyncinfer.scheduler.plan import Join

__all__ = ["Sampled", "SamplingState", "draw_bytes"]

I64 = npt.NDArray[np.int64]

#: Entries of one intermediate `[rows, vocab]` tensor; a larger batch is drawn in parts.
_MOST_ENTRIES = 2**24
#: A score (a logit less the largest, over temperature) that cannot win a draw: the variables of
#: the race differ by a factor of e^26 at most.
_NEVER = -80.0


def draw_bytes(rows: int, vocab_size: int) -> int:
    """About what `SamplingState.sample` takes for so many rows, their logits included."""
    entries = rows * vocab_size
    return 4 * (entries + 5 * min(entries, _MOST_ENTRIES))


@dataclass(slots=True)
class Sampled:
    """What was drawn, one entry per row of the logits."""

    #: int64 `[n]`, each in `[0, vocab)`, meaningless where `peak` is not finite.
    tokens: torch.Tensor
    #: float32 `[n]`: the largest logit before temperature. Not finite: the row failed, by what
    #: the model computed (NaN, inf) or because every token is barred (-inf).
    peak: torch.Tensor
    #: Rows that asked for logprobs, each with its number of alternatives.
    scored_rows: dict[int, int] = field(default_factory=dict)
    #: `score_tokens` of those rows, in that order.
    scores: list[torch.Tensor] = field(default_factory=list)


class SamplingState:
    """Sampling for up to `slots` sequences at once. Not thread-safe.

    What a row gets depends on its own logits, options, seed, position and history only, never on
    which rows are sampled with it. An option that no row of a step uses costs that step nothing.

    Args:
        history: the tokens of the slots; kept up to date by the caller, up to the position that
            is drawn.
    """

    def __init__(self, slots: int, vocab_size: int, history: TokenHistory) -> None:
        self.vocab_size = vocab_size
        self.device = history.device
        self._history = history
        self._table = options_table(slots)
        self._biases = TokenLists(self.device)
        self._allowed = TokenLists(self.device)
        self._stops = TokenLists(self.device)
        self._bad_words = BadWords(history)
        self._occurrences = Occurrences()
        (self._mixed,) = upload(self.device, mix_tokens(vocab_size))

    def join(self, slot: int, join: Join) -> None:
        """The slot is sampled by `join.params` from now on."""
        self.leave(slot)
        row, params = self._table[slot], join.params
        uses = Uses(0)
        row["seed"] = join.seed & (2**64 - 1)
        row["prompt_len"] = join.prompt_len
        if params.logprobs is not None:
            uses |= Uses.LOGPROBS
            row["logprobs"] = params.logprobs

        words = [word for word in join.bad_ids if max(word) < self.vocab_size]
        biases = dict(params.logit_bias)
        biases.update({word[0]: -np.inf for word in words if len(word) == 1})
        if biases:
            uses |= Uses.BIAS
            self._biases.put(slot, biases)
        if params.allowed_token_ids is not None:
            uses |= Uses.ALLOWED
            self._allowed.put(slot, dict.fromkeys(params.allowed_token_ids, 0.0))
        if any(len(word) > 1 for word in words):
            uses |= Uses.BAD_WORDS
            self._bad_words.put(slot, [word for word in words if len(word) > 1])
        stops = [token for token in join.stop_ids if token < self.vocab_size]
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

        if not params.greedy:
            uses |= Uses.DRAW
            row["temperature"] = params.temperature
            if params.temperature != 1:
                uses |= Uses.TEMPERATURE
            row["top_k"], row["top_p"], row["min_p"] = params.top_k, params.top_p, params.min_p
            if params.top_k or params.top_p < 1 or params.min_p:
                uses |= Uses.LIKELY
            row["typical_p"] = params.typical_p
            if params.typical_p < 1:
                uses |= Uses.TYPICAL
        row["uses"] = uses

    def leave(self, slot: int) -> None:
        """Forget the slot's options; nothing if it has none."""
        self._table[slot] = np.zeros((), self._table.dtype)
        for lists in (self._biases, self._allowed, self._stops, self._bad_words):
            lists.drop(slot)

    def sample(self, logits: torch.Tensor, slots: I64, positions: I64) -> Sampled:
        """Draw one token per row. Does not wait for the device.

        Args:
            logits: float32 `[n, vocab_size]`, n >= 1; changed in place.
            slots: int64 `[n]`.
            positions: int64 `[n]`: where in its sequence the token to draw will stand.
        """
        table = self._table[slots]
        uses = table["uses"]
        every = int(np.bitwise_or.reduce(uses))
        scored = np.flatnonzero(uses & Uses.LOGPROBS)
        own = logits[upload(self.device, scored)[0]] if scored.size else None
        if every & Uses.LOGITS:
            self._change(logits, slots, positions, table)
        drawn = np.flatnonzero(uses & Uses.DRAW)
        if drawn.size == len(slots):
            peak = logits.amax(dim=-1)
            tokens = self._draw(logits, peak, positions, table)
        else:
            peak, tokens = logits.max(dim=-1)
            if drawn.size:
                (at,) = upload(self.device, drawn)
                some = self._draw(logits[at], peak[at], positions[drawn], table[drawn])
                tokens.index_copy_(0, at, some)
        sampled = Sampled(tokens, peak)
        if own is not None:
            tops = table["logprobs"][scored]
            sampled.scored_rows = dict(zip(scored.tolist(), tops.tolist(), strict=True))
            chosen = tokens[upload(self.device, scored)[0]]
            sampled.scores = score_tokens(own, chosen, int(tops.max()))
        return sampled

    def _change(
        self, logits: torch.Tensor, slots: I64, positions: I64, table: npt.NDArray[np.void]
    ) -> None:
        """Biases and bars, then penalties, in place, on the rows that use them."""
        uses, prompt_lens = table["uses"], table["prompt_len"]

        def using(use: Uses) -> I64:
            return np.flatnonzero(uses & use)

        if (rows := using(Uses.BIAS)).size:
            at, token, value = self._biases.entries(slots[rows], rows)
            logits[at, token] = logits[at, token] + value
        if (rows := using(Uses.ALLOWED)).size:
            at, token, value = self._allowed.entries(slots[rows], rows)
            kept = logits[at, token]
            logits[upload(self.device, rows)[0]] = -torch.inf
            logits[at, token] = kept
        if (rows := using(Uses.BAD_WORDS)).size:
            self._bad_words.bar(logits, slots[rows], rows, prompt_lens[rows], positions[rows])
        # A grammar's mask belongs here.
        rows = using(Uses.MIN_TOKENS)
        rows = rows[(positions - prompt_lens < table["min_tokens"])[rows]]
        if rows.size:
            at, token, value = self._stops.entries(slots[rows], rows)
            logits[at, token] = logits[at, token] + value

        if (rows := using(Uses.REPETITION)).size:
            at, penalty = upload(self.device, rows, table["repetition"][rows])
            tokens, _ = self._history.window(slots[rows], np.zeros_like(rows), positions[rows])
            penalise_repetition(logits, at, tokens, penalty)
        if (rows := using(Uses.OCCURRENCE)).size:
            at, presence, frequency = upload(
                self.device, rows, table["presence"][rows], table["frequency"][rows]
            )
            tokens, valid = self._history.window(slots[rows], prompt_lens[rows], positions[rows])
            self._occurrences.penalise(logits, at, tokens, valid, presence, frequency)

    def _draw(
        self,
        logits: torch.Tensor,
        peak: torch.Tensor,
        positions: I64,
        table: npt.NDArray[np.void],
    ) -> torch.Tensor:
        """int64 `[n]`: temperature, truncation and the draw, of rows that are not greedy."""
        rows = max(1, _MOST_ENTRIES // self.vocab_size)
        if len(logits) > rows:
            parts = [slice(i, i + rows) for i in range(0, len(logits), rows)]
            return torch.cat(
                [self._draw(logits[p], peak[p], positions[p], table[p]) for p in parts]
            )
        # Less its largest entry, a row cannot overflow at any temperature.
        scores = logits - peak[:, None]
        uses = table["uses"]
        every = int(np.bitwise_or.reduce(uses))
        if every & Uses.TEMPERATURE:
            scores /= upload(self.device, table["temperature"][:, None])[0]
        # exp is many times slower where it underflows, and nothing this small can be drawn.
        weights = scores.clamp_(min=_NEVER).exp()
        for use in (Uses.LIKELY, Uses.TYPICAL):
            if every & use:
                self._truncate(use, scores, weights, table)
        (keys,) = upload(self.device, row_keys(table["seed"], positions))
        return draw_race(weights, self._mixed, keys)

    def _truncate(
        self,
        use: Uses,
        scores: torch.Tensor,
        weights: torch.Tensor,
        table: npt.NDArray[np.void],
    ) -> None:
        """Set the weights of what these filters cut to 0, in the rows that use them."""
        rows = np.flatnonzero(table["uses"] & use)
        whole = rows.size == len(scores)
        if not whole:
            (at,) = upload(self.device, rows)
            its, scores, kept = table[rows], scores[at], weights[at]
        else:
            its, kept = table, weights
        if use is Uses.LIKELY:
            keep_likely(scores, kept, its["top_k"], its["top_p"], its["min_p"])
        else:
            keep_typical(scores, kept, its["typical_p"])
        if not whole:
            weights[at] = kept
