"""`ModelRunner`: a step on a real model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from asyncinfer.attention import KVCache
from asyncinfer.errors import RequestFailed
from asyncinfer.models import Decoder
from asyncinfer.runner.input_batch import InputBatch, StepInput
from asyncinfer.runner.memory import SCORED_AT_ONCE
from asyncinfer.sampling import HostCopy, Sampled, SamplingState, row_logprobs, score_tokens, upload
from asyncinfer.scheduler import Join, RunnerSpec, StepPlan, StepResult

__all__ = ["ModelRunner"]


@dataclass(slots=True)
class _Scored:
    """The scored prompt tokens of one row."""

    row: int
    alternatives: int
    parts: list[list[torch.Tensor]] = field(default_factory=list)


@dataclass(slots=True)
class _InFlight:
    """A step that was launched."""

    copy: HostCopy
    draw_rows: list[int]
    #: Of the drawn tokens, those with logprobs, each with its number of alternatives.
    scored_rows: dict[int, int]
    prompts: list[_Scored]


class ModelRunner:
    """A `StepRunner` over a `Decoder`. `launch` never waits for the device."""

    def __init__(self, decoder: Decoder, kv: KVCache, spec: RunnerSpec) -> None:
        self._spec = spec
        self._decoder: Decoder | None = decoder
        self._kv: KVCache | None = kv
        self._device = kv.storage.device
        self._inputs = InputBatch(spec, self._device)
        self._sampling = SamplingState(spec.max_slots, spec.vocab_size, self._inputs.history)
        #: Tenants whose prompts are scored.
        self._prompt_lens = [0] * spec.max_slots

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> object:
        assert self._decoder is not None and self._kv is not None, "closed"
        for slot in plan.leaves:
            self._sampling.leave(slot)
        self._inputs.apply(plan)
        for join in plan.joins:
            self._join(join)
        self._kv.copy_blocks(plan.copies)
        step = self._inputs.build(plan)
        hidden = self._decoder.forward(step.token_ids, step.positions, self._kv, step.batch)
        prompts = [self._score_prompt(plan, step, hidden, row) for row in plan.prompt_logprobs]
        sampled = self._sample(step, hidden) if len(step.draw_index) else None
        out = [] if sampled is None else [sampled.tokens, sampled.peak, *sampled.scores]
        out += [tensor for scored in prompts for part in scored.parts for tensor in part]
        return _InFlight(
            HostCopy(out, self._device),
            step.draw_rows.tolist(),
            {} if sampled is None else sampled.scored_rows,
            prompts,
        )

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, _InFlight)
        copied = iter(handle.copy.wait())
        result = StepResult([])
        if handle.draw_rows:
            result.tokens = next(copied).tolist()
            finite = torch.isfinite(next(copied))
            if not finite.all():
                result.failed = {
                    handle.draw_rows[i]: RequestFailed(
                        "no token can be drawn: the logits are NaN or infinite, or all are barred"
                    )
                    for i in torch.nonzero(~finite)[:, 0].tolist()
                }
            if handle.scored_rows:
                scores = [next(copied) for _ in range(5)]
                result.logprobs = {
                    handle.draw_rows[draw]: row_logprobs(scores, i, i + 1, top)
                    for i, (draw, top) in enumerate(handle.scored_rows.items())
                }
        result.prompt_logprobs = {
            scored.row: row_logprobs(
                [torch.cat(column) for column in zip(*parts, strict=True)],
                0,
                sum(len(part[0]) for part in parts),
                scored.alternatives,
            )
            for scored in handle.prompts
            if (parts := [[next(copied) for _ in part] for part in scored.parts])
        }
        return result

    def close(self) -> None:
        self._decoder = self._kv = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _join(self, join: Join) -> None:
        self._sampling.join(join.slot, join)
        self._prompt_lens[join.slot] = join.prompt_len

    def _sample(self, step: StepInput, hidden: torch.Tensor) -> Sampled:
        decoder = self._decoder
        assert decoder is not None
        (index,) = upload(self._device, step.draw_index)
        # A model may have more logits than the tokenizer has tokens.
        logits = decoder.logits(hidden.index_select(0, index))[:, : self._spec.vocab_size]
        sampled = self._sampling.sample(logits, step.draw_slots, step.draw_positions)
        self._inputs.history.write(step.draw_slots, step.draw_positions, sampled.tokens)
        return sampled

    def _score_prompt(
        self, plan: StepPlan, step: StepInput, hidden: torch.Tensor, row: int
    ) -> _Scored:
        """Logprobs of the prompt tokens that follow the row's query tokens, a slice of logits
        at a time."""
        decoder = self._decoder
        assert decoder is not None
        slot, start = plan.slots[row], plan.starts[row]
        scored = _Scored(row, plan.prompt_logprobs[row])
        end = min(start + plan.counts[row], self._prompt_lens[slot] - 1)
        for begin in range(start, end, SCORED_AT_ONCE):
            size = min(SCORED_AT_ONCE, end - begin)
            at = int(step.first[row]) + begin - start
            logits = decoder.logits(hidden[at : at + size])[:, : self._spec.vocab_size]
            places = np.arange(begin + 1, begin + 1 + size)
            tokens = self._inputs.history.read(np.full(size, slot), places)
            scored.parts.append(score_tokens(logits, tokens, scored.alternatives))
        return scored
