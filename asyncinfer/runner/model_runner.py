"""`ModelRunner`: a step's plan through the model and the sampler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from asyncinfer.attention import AttentionBatch, KVCache
from asyncinfer.errors import RequestFailed
from asyncinfer.models import Decoder
from asyncinfer.runner.input_batch import InputBatch, StepArrays
from asyncinfer.sampling import (
    HostCopy,
    PluginCall,
    PluginSamplers,
    Sampled,
    SamplingState,
    TokenHistory,
    row_logprobs,
    score_tokens,
    upload,
)
from asyncinfer.scheduler.plan import RunnerSpec, StepPlan, StepResult

__all__ = ["ModelRunner"]

#: Prompt positions whose logits exist at once.
_SCORED_AT_ONCE = 256
#: Tensors of `score_tokens`.
_SCORES = 5


@dataclass(slots=True)
class _Flight:
    """A launched step: what `collect` needs to know of it."""

    #: Row of the plan of each draw.
    draw_rows: list[int]
    #: Draws that asked for logprobs, with the number of alternatives.
    scored: dict[int, int]
    #: Rows that asked for prompt logprobs, with the number of alternatives.
    prompts: dict[int, int]
    #: Drawn tokens and peaks; the draws' scores, if any; the scores of each of `prompts`.
    copies: HostCopy
    #: What sampler plugins did; the verdicts on them come before the scores.
    calls: list[PluginCall] = field(default_factory=list)


class ModelRunner:
    """Computes steps with a decoder; see `StepRunner` for the order of calls.

    Drawn tokens stay on the device, in the history that the next step reads its inputs from, so
    that a step can be launched before the one that draws its tokens is collected. `launch` does
    not wait for the device.
    """

    def __init__(
        self, decoder: Decoder, kv: KVCache, spec: RunnerSpec, *, sampler_timeout: float = 0.25
    ) -> None:
        self._spec = spec
        self._device = decoder.device
        self._decoder = decoder
        self._kv = kv
        self._inputs = InputBatch(spec)
        self._history = TokenHistory(spec.max_slots, self._device)
        self._sampling = SamplingState(
            spec.max_slots, spec.vocab_size, self._history, sampler_timeout=sampler_timeout
        )

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> object:
        """Start a step; the handle is for `collect`."""
        for slot in plan.leaves:
            self._sampling.leave(slot)
        for join in plan.joins:
            self._inputs.join(join)
            self._history.join(join.slot, join.token_ids)
            self._sampling.join(join.slot, join)
        self._inputs.grow(plan.grown)
        self._kv.copy_blocks(plan.copies)
        if not plan.slots:
            return _Flight([], {}, {}, HostCopy([torch.empty(0), torch.empty(0)], self._device))

        arrays = self._inputs.build(plan)
        hidden = self._forward(arrays)
        results: list[torch.Tensor] = [torch.empty(0), torch.empty(0)]
        scored: dict[int, int] = {}
        calls: list[PluginCall] = []
        if len(arrays.draw_rows):
            sampled = self._draw(arrays, hidden)
            scored, calls = sampled.scored_rows, sampled.calls
            verdicts = [call.verdict for call in calls if call.verdict is not None]
            results = [sampled.tokens, sampled.peak, *verdicts, *sampled.scores]
        for row, top in plan.prompt_logprobs.items():
            results += self._score_prompt(plan, row, int(arrays.first_tokens[row]), hidden, top)
        return _Flight(
            arrays.draw_rows.tolist(),
            scored,
            dict(plan.prompt_logprobs),
            HostCopy(results, self._device),
            calls,
        )

    def collect(self, handle: object) -> StepResult:
        """Wait for a step and give its result."""
        assert isinstance(handle, _Flight)
        tokens, peaks, *scores = handle.copies.wait()
        failed = {
            handle.draw_rows[draw]: _failure(peaks[draw].item())
            for draw in (~peaks.isfinite()).nonzero()[:, 0].tolist()
        }
        for call in handle.calls:
            verdict = None if call.verdict is None else scores.pop(0)
            for draw, error in PluginSamplers.failures(call, verdict).items():
                failed.setdefault(handle.draw_rows[draw], error)
        parts = [
            [part.tolist() for part in scores[i : i + _SCORES]]
            for i in range(0, len(scores), _SCORES)
        ]
        logprobs = {}
        if handle.scored:
            its = parts.pop(0)
            for row, start, stop, top in _by_row(handle):
                if row not in failed:
                    logprobs[row] = row_logprobs(its, start, stop, top)
        prompt_logprobs = {
            row: row_logprobs(its, 0, len(its[0]), top)
            for (row, top), its in zip(handle.prompts.items(), parts, strict=True)
        }
        return StepResult(tokens.tolist(), logprobs, prompt_logprobs, failed)

    def close(self) -> None:
        """Drop everything that lives on the device and give its memory back."""
        del self._decoder, self._kv, self._history, self._sampling
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _forward(self, arrays: StepArrays) -> torch.Tensor:
        """Hidden states of the step's query tokens, `[tokens, hidden]`."""
        positions, slot_mapping, block_tables, seq_lens, query_starts = upload(
            self._device,
            arrays.positions,
            arrays.slot_mapping,
            arrays.block_tables,
            arrays.seq_lens,
            arrays.query_starts,
        )
        batch = AttentionBatch(
            block_tables=block_tables,
            seq_lens=seq_lens,
            query_starts=query_starts,
            slot_mapping=slot_mapping,
            starts=arrays.starts,
            counts=arrays.counts,
            block_size=self._spec.block_size,
            decode_rows=arrays.decode_rows,
        )
        tokens = self._history.read(arrays.token_slots, arrays.positions)
        return self._decoder.forward(tokens, positions, self._kv, batch)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Padding of the model's vocabulary is cut off: no text stands for it."""
        return self._decoder.logits(hidden)[:, : self._spec.vocab_size]

    def _draw(self, arrays: StepArrays, hidden: torch.Tensor) -> Sampled:
        if not np.array_equal(arrays.draw_tokens, np.arange(len(hidden))):
            hidden = hidden.index_select(0, *upload(self._device, arrays.draw_tokens))
        sampled = self._sampling.sample(
            self._logits(hidden), arrays.draw_slots, arrays.draw_positions
        )
        tokens, slots, positions = sampled.tokens, arrays.draw_slots, arrays.draw_positions
        if not arrays.draw_last.all():
            # Positions before a row's last are known already: those draws only verify them.
            new = np.flatnonzero(arrays.draw_last)
            tokens = tokens.index_select(0, *upload(self._device, new))
            slots, positions = slots[new], positions[new]
        self._history.write(slots, positions, tokens)
        return sampled

    def _score_prompt(
        self, plan: StepPlan, row: int, first: int, hidden: torch.Tensor, top: int
    ) -> list[torch.Tensor]:
        """`score_tokens` of the prompt tokens that follow each of the row's query tokens."""
        slot, start = plan.slots[row], plan.starts[row]
        last = int(self._inputs.prompt_lens[slot]) - 1
        count = max(0, min(plan.counts[row], last - start))
        positions = np.arange(start + 1, start + count + 1)
        tokens = self._history.read(np.full(count, slot), positions)
        parts = [
            score_tokens(
                self._logits(hidden[first + i : first + min(i + _SCORED_AT_ONCE, count)]),
                tokens[i : i + _SCORED_AT_ONCE],
                top,
            )
            for i in range(0, max(count, 1), _SCORED_AT_ONCE)
        ]
        return [torch.cat(column) for column in zip(*parts, strict=True)]


def _by_row(flight: _Flight) -> Iterator[tuple[int, int, int, int]]:
    """Each row that asked for logprobs: its first and last scored draw, and how many
    alternatives."""
    rows = [(flight.draw_rows[draw], top) for draw, top in flight.scored.items()]
    start = 0
    for stop in range(1, len(rows) + 1):
        if stop == len(rows) or rows[stop][0] != rows[start][0]:
            yield rows[start][0], start, stop, rows[start][1]
            start = stop


def _failure(peak: float) -> RequestFailed:
    if peak == -float("inf"):
        return RequestFailed("no token can be drawn: every one is barred")
    return RequestFailed(f"the model's logits are not finite ({peak})")
