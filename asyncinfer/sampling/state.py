"""`SamplingState`: the sampling options of every slot, and the chain that applies them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.kernels.noise import draw_race, mix_tokens, row_keys
from asyncinfer.sampling.filters import keep_likely, keep_typical
from asyncinfer.sampling.fused import draw_fused, fuses
from asyncinfer.sampling.history import TokenHistory
from asyncinfer.sampling.logit_processors import LogitProcessors
from asyncinfer.sampling.logprobs import score_given, score_processed, score_tokens
from asyncinfer.sampling.options import Uses, options_table
from asyncinfer.sampling.plugin_call import PluginCall, merge_calls
from asyncinfer.sampling.plugin_samplers import PluginSamplers
from asyncinfer.sampling.plugin_step import Chain
from asyncinfer.sampling.recorded import MOST_ENTRIES, NEVER
from asyncinfer.sampling.transfer import upload
from asyncinfer.scheduler import Join

__all__ = ["Sampled", "SamplingState", "draw_bytes"]

I64 = npt.NDArray[np.int64]

#: Just above the weight of a token that cannot win a draw's race: see `kernels/noise.py`.
_NOTHING = math.exp(NEVER) * 1.00001
# Made once: taking flags apart and together takes microseconds.
_FILTERS = tuple(Uses.FILTERS)
_UNFUSED = int(Uses.FILTERS & ~Uses.FUSED)


def draw_bytes(rows: int, vocab_size: int) -> int:
    """About the bytes that `SamplingState.sample` takes for `rows` rows, with their logits."""
    entries = rows * vocab_size
    return 4 * (entries + 5 * min(entries, MOST_ENTRIES))


@dataclass(slots=True)
class Sampled:
    """What was drawn, one entry per row of the logits."""

    #: int64 `[n]`, each in `[0, vocab)`; means nothing where `peak` is not finite.
    tokens: torch.Tensor
    #: float32 `[n]`: the largest logit before temperature. A row fails if it is not finite: NaN or
    #: inf come from the model, and -inf says that every token is barred.
    peak: torch.Tensor
    #: Rows that asked for logprobs, each with its number of alternatives.
    scored_rows: dict[int, int] = field(default_factory=dict)
    #: `score_tokens` of those rows, in that order.
    scores: list[torch.Tensor] = field(default_factory=list)
    #: The calls of sampler plugins; see `PluginCall.failures`.
    calls: list[PluginCall] = field(default_factory=list)


class SamplingState:
    """Sampling for up to `slots` sequences at once. Not thread-safe.

    What a row gets depends only on its own logits, options, seed, position and history, not on the
    rows that are sampled with it. An option that no row of a step uses costs that step nothing.

    Args:
        history: the slots' tokens. The caller keeps it current up to the position to draw.
        sampler_timeout: seconds that a call of a sampler plugin may take.
        fused: draw by one operator (`ops.sample`), except for rows with options outside of
            `Uses.FUSED`; None does so where that operator is a kernel.
    """

    def __init__(
        self,
        slots: int,
        vocab_size: int,
        history: TokenHistory,
        *,
        sampler_timeout: float = 0.25,
        fused: bool | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = history.device
        self._table = options_table(slots)
        self._processors = LogitProcessors(vocab_size, history)
        #: The masks of the next step; see `TokenMasks.fill`.
        self.masks = self._processors.masks
        self._plugins = PluginSamplers(slots, vocab_size, history, timeout=sampler_timeout)
        self._chain = Chain(self._plugin_weights, self._race)
        #: By slot: int64 `[k]`, the tokens of `logprob_token_ids`.
        self._scored_ids: dict[int, torch.Tensor] = {}
        #: Slots whose alternatives are the likeliest tokens that are not barred.
        self._beams: set[int] = set()
        self._mixed = mix_tokens(vocab_size, self.device)
        self.fused = fuses(self._mixed) if fused is None else fused

    def join(self, slot: int, join: Join) -> None:
        """Sample the slot by `join.params` from now on."""
        self.leave(slot)
        row, params = self._table[slot], join.params
        uses = self._processors.join(slot, join, row)
        row["seed"] = join.seed & (2**64 - 1)
        row["prompt_len"] = join.prompt_len
        if params.alternatives is not None:
            uses |= Uses.LOGPROBS
            row["logprobs"] = params.alternatives
        if join.candidates:
            uses |= Uses.LOGPROBS
            row["logprobs"] = join.candidates
            self._beams.add(slot)
        if params.logprob_token_ids is not None:
            ids = np.array(params.logprob_token_ids, np.int64)
            self._scored_ids[slot] = upload(self.device, ids)[0]
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
        if join.samplers:
            uses |= Uses.PLUGIN
            row["plugin"] = self._plugins.join(slot, join.samplers)
        row["uses"] = uses

    def leave(self, slot: int) -> None:
        """Forget the slot's options. A slot that has none may leave too."""
        self._table[slot] = np.zeros((), self._table.dtype)
        self._scored_ids.pop(slot, None)
        self._beams.discard(slot)
        self._processors.leave(slot)
        self._plugins.leave(slot)

    def commit(self) -> None:
        """The last step stands, so `roll_back` can no longer undo it."""
        self._plugins.before.clear()

    def roll_back(self) -> None:
        """Undo what the last step changed in plugins, since it will be computed again."""
        self._plugins.roll_back()

    def calls_plugins(self, slots: I64) -> bool:
        """Whether a plugin is given the logits of any of these slots."""
        return bool((self._table["uses"][slots] & Uses.PLUGIN).any())

    def uses(self, slots: I64) -> int:
        """The options that any of these slots uses, as `Uses`."""
        return int(np.bitwise_or.reduce(self._table["uses"][slots]))

    def sample(self, logits: torch.Tensor, slots: I64, positions: I64) -> Sampled:
        """Draw one token per row. Does not wait for the device. A slot may have several rows, at
        positions one after the other: then its history holds the tokens between them.

        Args:
            logits: float32 `[n, vocab_size]`, n >= 1; changed in place.
            slots: int64 `[n]`.
            positions: int64 `[n]`: the position of the token to draw in its sequence.
        """
        table = self._table[slots]
        uses = table["uses"]
        all_uses = int(np.bitwise_or.reduce(uses))
        scored = np.flatnonzero(uses & Uses.LOGPROBS)
        model_logits = logits[upload(self.device, scored)[0]] if scored.size else None
        if all_uses & Uses.LOGITS:
            self._processors.apply(logits, slots, positions, table)
        processed = None
        if model_logits is not None and not self._beams.isdisjoint(slots.tolist()):
            processed = logits[upload(self.device, scored)[0]]
        drawing = uses & Uses.DRAW
        calls: list[PluginCall] = []
        if all_uses & Uses.PLUGIN:
            calls = self._plugins.call(self._chain, logits, slots, positions, table)
        drawn_by_plugins = 0
        for call in calls:
            if call.tokens is not None:
                drawing[call.rows] = 0
                drawn_by_plugins += call.rows.size
        drawn = np.flatnonzero(drawing)
        if self.fused:
            fusing = (drawing != 0) & (uses & _UNFUSED == 0)
            tokens, peak = draw_fused(logits, positions, table, fusing)
            drawn = np.flatnonzero((drawing != 0) & ~fusing)
        elif drawn.size + drawn_by_plugins == len(slots):
            # No row is greedy: the largest logit will do. To find its token takes far longer.
            peak = logits.amax(dim=-1)
            tokens = torch.zeros(len(slots), dtype=torch.int64, device=self.device)
        else:
            peak, tokens = logits.max(dim=-1)
        if drawn.size == len(slots):
            tokens = self._draw(logits, peak, positions, table)
        elif drawn.size:
            (at,) = upload(self.device, drawn)
            some = self._draw(logits[at], peak[at], positions[drawn], table[drawn])
            tokens.index_copy_(0, at, some)
        if calls:
            tokens, peak = merge_calls(calls, tokens, peak)
        sampled = Sampled(tokens, peak, calls=calls)
        if model_logits is not None:
            tops = table["logprobs"][scored]
            sampled.scored_rows = dict(zip(scored.tolist(), tops.tolist(), strict=True))
            chosen = tokens[upload(self.device, scored)[0]]
            sampled.scores = score_tokens(model_logits, chosen, int(tops.max()))
            special = self._scored_ids or processed is not None
            for row, slot in enumerate(slots[scored].tolist() if special else ()):
                if slot in self._scored_ids:
                    score_given(sampled.scores, row, model_logits[row], self._scored_ids[slot])
                elif processed is not None and slot in self._beams:
                    score_processed(sampled.scores, row, model_logits[row], processed[row])
        return sampled

    def guess(self, logits: torch.Tensor, slots: I64, positions: I64) -> torch.Tensor:
        """int64 `[n]`: a token for each row, by its temperature, filters and random numbers alone.
        Arguments as for `sample`; no state changes."""
        table = self._table[slots]
        peak, tokens = logits.max(dim=-1)
        drawn = np.flatnonzero(table["uses"] & Uses.DRAW)
        if drawn.size:
            (at,) = upload(self.device, drawn)
            some = self._draw(logits[at], peak[at], positions[drawn], table[drawn])
            tokens.index_copy_(0, at, some)
        return tokens

    def _draw(
        self,
        logits: torch.Tensor,
        peak: torch.Tensor,
        positions: I64,
        table: npt.NDArray[np.void],
    ) -> torch.Tensor:
        """int64 `[n]`: temperature, truncation and the draw, for rows that are not greedy."""
        rows = max(1, MOST_ENTRIES // self.vocab_size)
        if len(logits) > rows:
            parts = [slice(i, i + rows) for i in range(0, len(logits), rows)]
            return torch.cat(
                [self._draw(logits[p], peak[p], positions[p], table[p]) for p in parts]
            )
        return self._race(self._weights(logits, peak, table), positions, table)

    def _plugin_weights(self, logits: torch.Tensor, table: npt.NDArray[Any]) -> torch.Tensor:
        """float32 `[n, vocab]`: the weights that a plugin sees. A greedy row has one, at its most
        likely token."""
        # The race never draws a token of so little weight, which a plugin sees as 0.
        weights = self._weights(logits, logits.amax(dim=-1), table)
        torch.threshold_(weights, _NOTHING, 0.0)
        greedy = np.flatnonzero(~table["uses"] & Uses.DRAW)
        if greedy.size:
            (at,) = upload(self.device, greedy)
            best = logits.index_select(0, at).argmax(dim=-1)
            weights.index_fill_(0, at, 0.0)
            weights[at, best] = 1.0
        return weights

    def _race(self, weights: torch.Tensor, positions: I64, table: npt.NDArray[Any]) -> torch.Tensor:
        (keys,) = upload(self.device, row_keys(table["seed"], positions))
        return draw_race(weights, self._mixed, keys)

    def _weights(
        self, logits: torch.Tensor, peak: torch.Tensor, table: npt.NDArray[Any]
    ) -> torch.Tensor:
        """float32 `[n, vocab]`: temperature and truncation."""
        # Relative to its largest entry, a row cannot overflow at any temperature.
        scores = logits - peak[:, None]
        uses = table["uses"]
        all_uses = int(np.bitwise_or.reduce(uses))
        if all_uses & Uses.TEMPERATURE:
            scores /= upload(self.device, table["temperature"][:, None])[0]
        # exp is many times slower where it underflows, and no token below NEVER can be drawn.
        weights = scores.clamp_(min=NEVER).exp()
        for use in _FILTERS:
            if all_uses & use:
                self._truncate(use, scores, weights, table)
        return weights

    def _truncate(
        self,
        use: Uses,
        scores: torch.Tensor,
        weights: torch.Tensor,
        table: npt.NDArray[np.void],
    ) -> None:
        """Set the weights that the filters of `use` cut to 0, in the rows that use them."""
        rows = np.flatnonzero(table["uses"] & use)
        whole = rows.size == len(scores)
        if not whole:
            (at,) = upload(self.device, rows)
            options, scores, kept = table[rows], scores[at], weights[at]
        else:
            options, kept = table, weights
        if use is Uses.LIKELY:
            keep_likely(scores, kept, options["top_k"], options["top_p"], options["min_p"])
        else:
            assert use is Uses.TYPICAL
            keep_typical(scores, kept, options["typical_p"])
        if not whole:
            weights[at] = kept
