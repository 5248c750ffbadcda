"""`EagerExecutor`: a step's operators, called one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.attention import AttentionBatch, KVCache
from asyncinfer.models import Decoder
from asyncinfer.runner.input_batch import InputBatch, StepArrays
from asyncinfer.runner.pending_step import EagerResults, PendingStep
from asyncinfer.runner.step_buffers import StepBuffers
from asyncinfer.sampling import Sampled, SamplingState, TokenHistory, score_tokens, upload
from asyncinfer.scheduler import Join, Step

__all__ = ["EagerExecutor"]

I64 = npt.NDArray[np.int64]

#: Prompt positions whose logits exist at once.
_SCORED_AT_ONCE = 256


class EagerExecutor:
    """Computes steps of any kind. Called for every step in this order: `change`, `run`, and later
    the pending step's `read`.

    The methods `forward`, `logits`, `sample` and `score` are there to be overridden.

    Args:
        kv: the pages of each KV group.
        inputs: the slots' block tables, which this executor writes from now on.
        history: query tokens are read from it, and drawn tokens written to it.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: Sequence[KVCache],
        inputs: InputBatch,
        history: TokenHistory,
        sampling: SamplingState,
    ) -> None:
        self.decoder = decoder
        self.kv = kv
        self.inputs = inputs
        self.history = history
        self.sampling = sampling

    def change(self, plan: Step, joins: Sequence[Join]) -> None:
        """Take over what changes before the rows are computed: the growth of block tables, and
        `joins`, which are those of the plan or none. Takes no memory of the device."""
        for join in joins:
            self.inputs.join(join)
        self.inputs.grow(plan.groups)

    def run(self, plan: Step, buffers: StepBuffers) -> PendingStep:
        """Start the rows of a plan. Raises torch's error where the device has no memory."""
        tensors = [torch.empty(0), torch.empty(0)]
        if not plan.slots:
            results = EagerResults()
        else:
            arrays = self.inputs.build(plan)
            hidden = self.forward(arrays)
            results = EagerResults(
                draw_rows=arrays.draw_rows.tolist(), prompts=dict(plan.prompt_logprobs)
            )
            if len(arrays.draw_rows):
                tensors = results.keep(self._draw(arrays, hidden))
            if 0 in plan.samples:
                tensors.append(self._chunk_peaks(results, plan, arrays, hidden))
            for row, top in plan.prompt_logprobs.items():
                tensors += self._score_prompt(plan, row, int(arrays.first_tokens[row]), hidden, top)
        results.tensors = buffers.fetch_all(tensors)
        return PendingStep(buffers, results.read)

    def lost(self, plan: Step) -> None:
        """The plan was taken back: nobody knows how far its rows were computed."""

    def close(self) -> None:
        """Give back what was recorded. The device has no work left."""

    # -- to be overridden ----------------------------------------------------------------------

    def forward(self, arrays: StepArrays) -> torch.Tensor:
        """Hidden states of the step's query tokens, `[tokens, hidden]`."""
        places = self.history.places(arrays.token_slots, arrays.positions)
        places_there, positions, slot_mapping, block_tables, seq_lens, query_starts = upload(
            self.decoder.device,
            places,
            arrays.positions,
            arrays.slot_mapping,
            arrays.block_tables,
            arrays.seq_lens,
            arrays.query_starts,
        )
        batches = [
            AttentionBatch(
                block_tables=block_tables[group],
                seq_lens=seq_lens,
                query_starts=query_starts,
                slot_mapping=slot_mapping[group],
                starts=arrays.starts,
                counts=arrays.counts,
                block_size=kv.block_size,
                decode_rows=arrays.decode_rows,
                sequences=arrays.sequences,
            )
            for group, kv in enumerate(self.kv)
        ]
        tokens = self.history.at(places_there)
        return self.decoder.forward(tokens, positions, self.kv, batches)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 `[n, vocab]` of `hidden` `[n, hidden]`, with the padding of the vocabulary."""
        return self.decoder.logits(hidden)

    def sample(self, logits: torch.Tensor, slots: I64, positions: I64) -> Sampled:
        """See `SamplingState.sample`."""
        return self.sampling.sample(logits, slots, positions)

    def score(self, logits: torch.Tensor, tokens: torch.Tensor, top: int) -> list[torch.Tensor]:
        """See `score_tokens`."""
        return score_tokens(logits, tokens, top)

    # -- inside --------------------------------------------------------------------------------

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Padding of the model's vocabulary is cut off: no text stands for it."""
        return self.logits(hidden)[:, : self.sampling.vocab_size]

    def _draw(self, arrays: StepArrays, hidden: torch.Tensor) -> Sampled:
        if not np.array_equal(arrays.draw_tokens, np.arange(len(hidden))):
            hidden = hidden.index_select(0, *upload(hidden.device, arrays.draw_tokens))
        slots, positions = arrays.draw_slots, arrays.draw_positions
        sampled = self.sample(self._logits(hidden), slots, positions)
        tokens = sampled.tokens
        if not arrays.draw_last.all():
            # A row's earlier draws verify tokens that are known already.
            new = np.flatnonzero(arrays.draw_last)
            tokens = tokens.index_select(0, *upload(hidden.device, new))
            slots, positions = slots[new], positions[new]
        self.history.write(slots, positions, tokens)
        return sampled

    def _chunk_peaks(
        self, results: EagerResults, plan: Step, arrays: StepArrays, hidden: torch.Tensor
    ) -> torch.Tensor:
        """float32 `[chunks]`: the largest number in the last hidden state of each row that draws
        nothing. Attention carries to it whatever is not finite in the chunk."""
        rows = np.flatnonzero(np.array(plan.samples) == 0)
        results.chunks = rows.tolist()
        last = arrays.first_tokens[rows] + np.array(plan.counts)[rows] - 1
        states = hidden.index_select(0, *upload(hidden.device, last))
        return states.abs().amax(dim=-1).float()

    def _score_prompt(
        self, plan: Step, row: int, first: int, hidden: torch.Tensor, top: int
    ) -> list[torch.Tensor]:
        """`score_tokens` of the prompt tokens that follow each of the row's query tokens."""
        slot, start = plan.slots[row], plan.starts[row]
        last = int(self.inputs.prompt_lens[slot]) - 1
        count = max(0, min(plan.counts[row], last - start))
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
