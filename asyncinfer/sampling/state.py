"""`SamplingState`: the sampling options of every slot, and the chain that applies them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.sampling.changes import LogitChanges
from asyncinfer.sampling.filters import keep_likely, keep_typical
from asyncinfer.sampling.fused import draw_fused, fuses
from asyncinfer.sampling.history import TokenHistory
from asyncinfer.sampling.logprobs import score_tokens
from asyncinfer.sampling.noise import draw_race, mix_tokens, row_keys
from asyncinfer.sampling.plugin_samplers import PluginCall, PluginSamplers
from asyncinfer.sampling.plugin_step import Chain
from asyncinfer.sampling.recorded import MOST_ENTRIES, NEVER
from asyncinfer.sampling.table import Uses, options_table
from asyncinfer.sampling.transfer import upload
from asyncinfer.scheduler import Join

__all__ = ["Sampled", "SamplingState", "draw_bytes"]

I64 = npt.NDArray[np.int64]

#: A little above the weight of what cannot be drawn.
_NOTHING = math.exp(NEVER) * 1.00001


def draw_bytes(rows: int, vocab_size: int) -> int:
    """About what `SamplingState.sample` takes for so many rows, their logits included."""
    entries = rows * vocab_size
    return 4 * (entries + 5 * min(entries, MOST_ENTRIES))


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
    #: What sampler plugins did, if any row asked for one: see `PluginSamplers.failures`.
    calls: list[PluginCall] = field(default_factory=list)


class SamplingState:
    """Sampling for up to `slots` sequences at once. Not thread-safe.

    What a row gets depends on its own logits, options, seed, position and history only, never on
    which rows are sampled with it. An option that no row of a step uses costs that step nothing.

    Args:
        history: the tokens of the slots; kept up to date by the caller, up to the position that
            is drawn.
        sampler_timeout: seconds a plugin may take in a step.
        fused: draw by the one operator that there is for it, whatever it has no options for apart;
            by default where it runs as a kernel.
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
        self._changes = LogitChanges(vocab_size, history)
        self._plugins = PluginSamplers(slots, vocab_size, history, timeout=sampler_timeout)
        self._chain = Chain(self._weigh, self._race)
        (self._mixed,) = upload(self.device, mix_tokens(vocab_size))
        self.fused = fuses(self._mixed) if fused is None else fused

    def join(self, slot: int, join: Join) -> None:
        """The slot is sampled by `join.params` from now on."""
        self.leave(slot)
        row, params = self._table[slot], join.params
        uses = self._changes.join(slot, join, row)
        row["seed"] = join.seed & (2**64 - 1)
        row["prompt_len"] = join.prompt_len
        if params.logprobs is not None:
            uses |= Uses.LOGPROBS
            row["logprobs"] = params.logprobs
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
        """Forget the slot's options; nothing if it has none."""
        self._table[slot] = np.zeros((), self._table.dtype)
        self._changes.leave(slot)
        self._plugins.leave(slot)

    def keep(self) -> None:
        """The step that was sampled last goes on: it will not be taken back."""
        self._plugins.keep()

    def take_back(self) -> None:
        """What plugins have of a step that is computed again is as it was before. Nothing if that
        came to no plugin."""
        self._plugins.take_back()

    def uses(self, slots: I64) -> int:
        """What any of these slots asks for, as `Uses`."""
        return int(np.bitwise_or.reduce(self._table["uses"][slots]))

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
            self._changes.apply(logits, slots, positions, table)
        drawing = uses & Uses.DRAW
        calls: list[PluginCall] = []
        if every & Uses.PLUGIN:
            calls = self._plugins.call(self._chain, logits, slots, positions, table)
        settled = 0
        for call in calls:
            if call.tokens is not None:
                drawing[call.rows] = 0
                settled += call.rows.size
        drawn = np.flatnonzero(drawing)
        if self.fused:
            fusing = (drawing != 0) & (uses & Uses.TYPICAL == 0)
            tokens, peak = draw_fused(logits, positions, table, fusing)
            drawn = np.flatnonzero((drawing != 0) & ~fusing)
        elif drawn.size + settled == len(slots):
            # Which token is the most likely takes ten times as long to find, and none asks.
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
            tokens, peak = self._plugins.settle(calls, tokens, peak)
        sampled = Sampled(tokens, peak, calls=calls)
        if own is not None:
            tops = table["logprobs"][scored]
            sampled.scored_rows = dict(zip(scored.tolist(), tops.tolist(), strict=True))
            chosen = tokens[upload(self.device, scored)[0]]
            sampled.scores = score_tokens(own, chosen, int(tops.max()))
        return sampled

    def _draw(
        self,
        logits: torch.Tensor,
        peak: torch.Tensor,
        positions: I64,
        table: npt.NDArray[np.void],
    ) -> torch.Tensor:
        """int64 `[n]`: temperature, truncation and the draw, of rows that are not greedy."""
        rows = max(1, MOST_ENTRIES // self.vocab_size)
        if len(logits) > rows:
            parts = [slice(i, i + rows) for i in range(0, len(logits), rows)]
            return torch.cat(
                [self._draw(logits[p], peak[p], positions[p], table[p]) for p in parts]
            )
        return self._race(self._weights(logits, peak, table), positions, table)

    def _weigh(self, logits: torch.Tensor, table: npt.NDArray[Any]) -> torch.Tensor:
        """float32 `[n, vocab]`: what rows, greedy or not, are drawn from."""
        # A race never draws what has next to no weight; a plugin may look whether it has any.
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
        # Less its largest entry, a row cannot overflow at any temperature.
        scores = logits - peak[:, None]
        uses = table["uses"]
        every = int(np.bitwise_or.reduce(uses))
        if every & Uses.TEMPERATURE:
            scores /= upload(self.device, table["temperature"][:, None])[0]
        # exp is many times slower where it underflows, and nothing this small can be drawn.
        weights = scores.clamp_(min=NEVER).exp()
        for use in (Uses.LIKELY, Uses.TYPICAL):
            if every & use:
                self._truncate(use, scores, weights, table)
        return weights

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
