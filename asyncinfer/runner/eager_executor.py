"""`EagerExecutor`: a step's operators, called one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import assert_never

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.adapters import AdapterPool
from asyncinfer.attention import KVCache, StateCache, StatePass, StateRows
from asyncinfer.layers import LoraRows
from asyncinfer.models import Decoder
from asyncinfer.runner.input_batch import InputBatch, StepArrays, integers, spread
from asyncinfer.runner.pending_step import EagerResults, PendingStep, StepBuffers
from asyncinfer.runner.predictions import Predictions
from asyncinfer.runner.prompt_states import chunk_peaks, pooled
from asyncinfer.sampling import Sampled, SamplingState, TokenHistory, guide, score_tokens, upload
from asyncinfer.scheduler import Join, Step

__all__ = ["EagerExecutor"]

I64 = npt.NDArray[np.int64]

#: Prompt positions whose logits exist at once.
_SCORED_AT_ONCE = 256
#: What a step without draws has drawn, and the peaks of that.
_NOTHING = torch.empty(0, dtype=torch.float32)


class EagerExecutor:
    """Computes steps of any kind. For each step call, in this order: `settle`, `change`, `run`, and
    later the pending step's `read`.

    Subclasses may override every public method.

    Args:
        kv: the caches of the KV groups.
        inputs: the slots' block tables, which this executor writes from now on.
        history: query tokens are read from it, and drawn tokens written to it.
        adapters: the LoRA adapters that rows may have; None for none.
        groups: for each cache of `kv`, the number of its KV group; None: each is one, in order.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: Sequence[KVCache | StateCache],
        inputs: InputBatch,
        history: TokenHistory,
        sampling: SamplingState,
        adapters: AdapterPool | None = None,
        groups: Sequence[int] | None = None,
    ) -> None:
        self.decoder = decoder
        #: The caches of pages and the caches of states, each with its group's number.
        self._paged: list[tuple[int, KVCache]] = []
        self._kept: list[tuple[int, StateCache]] = []
        for at, cache in zip(groups or range(len(kv)), kv, strict=True):
            if isinstance(cache, KVCache):
                self._paged.append((at, cache))
            elif isinstance(cache, StateCache):
                self._kept.append((at, cache))
            else:
                assert_never(cache)
        self.inputs = inputs
        self.history = history
        self.sampling = sampling
        self.adapters = adapters
        self._predictions: Predictions | None = None
        if decoder.predictor is not None:
            self._predictions = Predictions(decoder, inputs, history, sampling, self._paged)
        #: Whether a NaN may not reach the last token, since some layers have a window or a state.
        self._local = bool(decoder.config.state_layers or decoder.config.windowed_layers)
        #: The states of the step that is being computed; None where no layer has one.
        self._states: StatePass | None = None

    @property
    def helps(self) -> bool:
        """Whether threads of the last step did what one of them left undone when it lost its
        core."""
        return False

    def change(self, step: Step, joins: Sequence[Join]) -> list[tuple[int, I64, I64]]:
        """Apply the changes before the rows are computed: `joins` (the step's; none if the step is
        retracted for want of memory), the growth of block tables, the rewinding of states.
        Allocates nothing on the device. Returns what `InputBatch.grow` returns."""
        self._states = None
        for join in joins:
            self.inputs.join(join)
        grown = self.inputs.grow(step.groups)
        for number, states in self._kept:
            self._rewind(step, number, states)
        return grown

    def run(self, step: Step, buffers: StepBuffers) -> PendingStep:
        """Start the rows of a step, and the copy of their results into `buffers`. Raises torch's
        error where the device has no memory."""
        tensors = [_NOTHING, _NOTHING]
        if not step.slots:
            results = EagerResults()
        else:
            arrays = self.inputs.build(step)
            if (queued := self.queue(step, arrays, buffers)) is not None:
                return queued
            hidden = self.forward(arrays)
            self._fill_masks(step)
            results = EagerResults(
                draw_rows=arrays.draw_rows.tolist(),
                prompts=dict(step.prompt_logprobs),
                pooled=list(step.poolings),
                drafts=step.drafts,
            )
            if len(arrays.draw_rows):
                tensors = results.keep(self._draw(step, arrays, hidden))
            if 0 in step.samples or (self._local and len(hidden) > len(arrays.draw_rows)):
                tensors.append(chunk_peaks(results, step, arrays, hidden, every=self._local))
            for row, top in step.prompt_logprobs.items():
                tensors += self._score_prompt(step, row, int(arrays.first_tokens[row]), hidden, top)
            for row, pooling in step.poolings.items():
                first = int(arrays.first_tokens[row])
                left = int(self.inputs.prompt_lens[step.slots[row]]) - step.starts[row]
                end = first + min(step.counts[row], left)
                tensors.append(pooled(self.decoder, hidden[first:end], pooling))
            if self._predictions is not None:
                results.predicted, further = self._predictions.of(step, arrays, hidden, tensors[0])
                tensors += further
        results.tensors = buffers.fetch_all(tensors)
        if self._states is not None:
            # Nothing can fail any more.
            self._states.commit()
            self._states = None
        return PendingStep(buffers, results.read)

    def settle(self, step: Step) -> None:
        """Wait for the steps that are queued, if `step` cannot be queued behind them. Called before
        the step's changes are applied."""

    def queue(self, step: Step, arrays: StepArrays, buffers: StepBuffers) -> PendingStep | None:
        """Have other threads compute the step, behind those that are queued; None where it is to be
        computed now."""
        return None

    def lost(self, step: Step) -> None:
        """The step was retracted: how far its rows were computed is unknown."""

    def unrecorded(self) -> AbstractContextManager[None]:
        """Records no step inside the block."""
        return nullcontext()

    def unreplayed(self) -> AbstractContextManager[bool]:
        """Computes every step eagerly inside the block, and records none. Yields whether any step
        would have been replayed."""
        return nullcontext(False)

    def stop_replaying(self) -> bool:
        """Compute every step eagerly from now on; call it when the device is idle. Returns whether
        any step would have been replayed."""
        return False

    def close(self) -> None:
        """Free what was recorded, when the device has no work left."""

    def forward(self, arrays: StepArrays) -> torch.Tensor:
        """Hidden states of the step's query tokens, `[tokens, hidden]` in the model's dtype."""
        places = self.history.places(arrays.token_slots, arrays.positions)
        positions, batches, (there,) = arrays.upload(self.decoder.device, self._paged, places)
        # At most one: `ModelConfig` allows one kind of layers that keep a state.
        for number, states in self._kept:
            self._states = self._begin_states(arrays, number, states)
        tokens, kv = self.history.at(there), [kv for _, kv in self._paged]
        adapters = self._lora_rows(arrays.adapters)
        forward = (self._predictions or self.decoder).forward
        return forward(tokens, positions, kv, batches, adapters, self._states)

    def drawn(self, hidden: torch.Tensor, tokens: I64) -> torch.Tensor:
        """The hidden states of the query tokens `[n]` that tokens are drawn after."""
        if np.array_equal(tokens, np.arange(len(hidden))):
            return hidden
        return hidden.index_select(0, *upload(hidden.device, tokens))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 `[n, vocab]` of `hidden` `[n, hidden]`, padding of the vocabulary included."""
        return self.decoder.logits(hidden)

    def greedy(self, hidden: torch.Tensor) -> Sampled | None:
        """Each row's likeliest token, where it is known without `logits`."""
        return None

    def sample(self, logits: torch.Tensor, slots: I64, positions: I64) -> Sampled:
        """See `SamplingState.sample`."""
        return self.sampling.sample(logits, slots, positions)

    def score(self, logits: torch.Tensor, tokens: torch.Tensor, top: int) -> list[torch.Tensor]:
        """See `score_tokens`."""
        return score_tokens(logits, tokens, top)

    def _lora_rows(self, slots: I64 | None) -> LoraRows | None:
        """The adapters of query tokens, by the slot of each."""
        if slots is None or self.adapters is None:
            return None
        if self.decoder.device.type == "cpu":
            return self.adapters.rows(slots)
        return self.adapters.rows_on_device(*upload(self.decoder.device, slots.astype(np.int32)))

    def _rewind(self, step: Step, number: int, states: StateCache) -> None:
        """Have the states of a group go back to before what was wrong in drafts, and forget those
        of slots that are left."""
        if step.groups:
            for slot, tokens in step.groups[number].rewound:
                block = (tokens - 1) // states.block_size
                states.rewind(slot, tokens, self.inputs.page(number, slot, block))
        for slot in step.leaves:
            states.drop_aside(slot)

    def _begin_states(self, arrays: StepArrays, number: int, states: StateCache) -> StatePass:
        """The states of a group that the rows of a step find and leave."""
        slots = arrays.slots
        drafted = {row: (slots[row], draft) for row, draft in arrays.drafted.items()}
        tables = arrays.block_tables[number]
        rows = StateRows.of(
            *(arrays.starts, arrays.counts, tables, states.block_size, drafted, states.device)
        )
        return StatePass(states, rows, slots)

    def _fill_masks(self, step: Step) -> None:
        """Make the masks of the step's draws, while the device computes the logits."""
        if step.matchers:
            rows = list(step.matchers)
            self.sampling.masks.fill(
                [step.slots[row] for row in rows],
                [step.first_draw(row) for row in rows],
                list(step.matchers.values()),
                [step.drafts.get(row, ()) for row in rows],
            )

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`logits` without the padding of the vocabulary, whose ids stand for no text."""
        return self.logits(hidden)[:, : self.sampling.vocab_size]

    def _draw(self, step: Step, arrays: StepArrays, hidden: torch.Tensor) -> Sampled:
        hidden = self.drawn(hidden, arrays.draw_tokens)
        slots, positions = arrays.draw_slots, arrays.draw_positions
        if step.guided:
            sampled = self._draw_guided(step, arrays, hidden)
        else:
            greedy = None if self.sampling.uses(slots) else self.greedy(hidden)
            sampled = greedy or self.sample(self._logits(hidden), slots, positions)
        # Draws overwrite the drafted tokens too: one that was right has been drawn again.
        self.history.write(slots, positions, sampled.tokens)
        return sampled

    def _draw_guided(self, step: Step, arrays: StepArrays, hidden: torch.Tensor) -> Sampled:
        """Draws of which some rows share one with their guide."""
        logits, guided = self._logits(hidden), step.guided
        # Both rows of a pair draw at as many positions.
        draws = integers([step.samples[row] for row in guided])
        starts = np.searchsorted(arrays.draw_rows, [*guided])
        starts_beside = np.searchsorted(arrays.draw_rows, [row for row, _ in guided.values()])
        first, beside = spread(starts, draws), spread(starts_beside, draws)
        guide(logits, first, beside, np.repeat([scale for _, scale in guided.values()], draws))
        sampled = self.sample(logits, arrays.draw_slots, arrays.draw_positions)
        at, after = upload(hidden.device, first, beside)
        sampled.tokens.index_copy_(0, after, sampled.tokens.index_select(0, at))
        return sampled

    def _score_prompt(
        self, step: Step, row: int, first: int, hidden: torch.Tensor, top: int
    ) -> list[torch.Tensor]:
        """`score_tokens` of the prompt tokens that follow each of the row's query tokens."""
        slot, start = step.slots[row], step.starts[row]
        last = int(self.inputs.prompt_lens[slot]) - 1
        count = max(0, min(step.counts[row], last - start))
        positions = np.arange(start + 1, start + count + 1)
        tokens = self.history.read(np.full(count, slot), positions)
        parts = [
            self.score(
                self._logits(hidden[first + i : first + min(i + _SCORED_AT_ONCE, count)]),
                tokens[i : i + _SCORED_AT_ONCE],
                top,
            )
            for i in range(0, max(count, 1), _SCORED_AT_ONCE)
        ]
        return [torch.cat(column) for column in zip(*parts, strict=True)]
