"""`GraphExecutor`: replays recorded steps, on state that stays on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.adapters import AdapterPool
from asyncinfer.attention import KVCache, StateCache
from asyncinfer.kernels.dispatch import wants_triton
from asyncinfer.models import Decoder
from asyncinfer.runner.accelerator import Accelerator
from asyncinfer.runner.decode_graphs import DecodeGraphs, batch_sizes
from asyncinfer.runner.eager_executor import EagerExecutor
from asyncinfer.runner.fallbacks import Fallbacks
from asyncinfer.runner.input_batch import InputBatch, StepArrays
from asyncinfer.runner.pending_step import (
    EagerResults,
    PendingStep,
    PinnedBuffers,
    StepBuffers,
    drawn_result,
)
from asyncinfer.runner.recorded_forward import RecordedForward, row_sizes, token_sizes
from asyncinfer.runner.recorded_step import RecordedStep
from asyncinfer.runner.slot_state import SlotState, Staging
from asyncinfer.sampling import OPTION_WORDS, Draws, SamplingState, TokenHistory, option_words
from asyncinfer.scheduler import Join, RunnerSpec, Step, StepResult

__all__ = ["GraphExecutor"]

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

#: A position that no step begins at.
_UNKNOWN = -2


class GraphExecutor(EagerExecutor):
    """Replays whole steps of decode rows alone, and the layers of all other steps, whose draws are
    computed as by an `EagerExecutor`.

    A steady decode step costs the host one replayed graph and one copy of results, with an event
    before and after the copy. Where tables or options have changed it costs a copy and a scatter
    more. Steps with chunks of prompts or with drafts cost a copy of their inputs, a replayed graph
    and the operators of their draws, however many layers there are.

    Args:
        history: as `RecordedStep` needs it.
        groups: the number of each cache's group; None: each is a group, in order. Two caches of a
            group, as a head beside the model has one, are for a model with predictions only.
        hold: bytes set aside for the intermediate tensors of a recorded step.
        fallbacks: is told of a recording that failed.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        decoder: Decoder,
        kv: Sequence[KVCache | StateCache],
        spec: RunnerSpec,
        history: TokenHistory,
        sampling: SamplingState,
        adapters: AdapterPool | None = None,
        groups: Sequence[int] | None = None,
        *,
        hold: int = 0,
        fallbacks: Fallbacks | None = None,
    ) -> None:
        sizes = batch_sizes(spec.max_slots)
        count, width = len(spec.groups), spec.table_width
        self.state = SlotState(accelerator, spec.max_slots, count, width, sizes[-1], OPTION_WORDS)
        inputs = InputBatch(spec, self.state.host_tables)
        super().__init__(decoder, kv, inputs, history, sampling, adapters, groups)
        self._step = RecordedStep(
            decoder, kv, spec, self.state, history, sizes[-1], max(2, spec.overlap), adapters
        )
        self.graphs = DecodeGraphs(accelerator, self._step, sizes, hold=hold, fallbacks=fallbacks)
        #: The sizes of recorded passes.
        self._tokens = token_sizes(spec.max_step_tokens, decoder.config.hidden_size)
        self._rows = row_sizes(sizes[-1])
        self._forward = RecordedForward(
            *(accelerator, decoder, [cache for _, cache in self._paged]),
            *(spec, self.state, history),
            groups=[at for at, _ in self._paged],
            rows=self._rows[-1],
            tokens=self._tokens[-1],
            adapters=adapters,
        )
        #: Whether passes are recorded: chunked attention cuts rows on the host, by their lengths,
        #: and so do layers with a state.
        self._passes = not (decoder.config.chunked_layers or self._kept)
        #: The pinned memory of the step that is being launched.
        self._staging: Staging | None = None
        self._replaying = True
        #: Whether steps are computed eagerly for now.
        self._as_it_is = False
        self._accelerator = accelerator
        #: Where replayed steps leave their results, one after the other and round again.
        self._places = list(self._step.results)
        self.turn = 0
        #: Replayed steps whose results were not read yet.
        self._unread = 0

    @torch.inference_mode()
    def record_all(self) -> None:
        """Record every graph of rows without adapters. Call it before the first step."""
        buffers = PinnedBuffers(self._accelerator)
        self.state.send(buffers.staging)
        sizes = product(reversed(self._tokens), reversed(self._rows)) if self._passes else ()
        for tokens, rows in sizes:
            self._forward.send(None, tokens, rows, buffers.staging)
            self._pass(tokens, rows, adapted=False)
            buffers.fetch_all([])
            buffers.wait()
        if self._predictions is None:
            self.graphs.record_all()
        self._step.turn_to(0)

    def change(self, step: Step, joins: Sequence[Join]) -> list[tuple[int, I64, I64]]:
        grown = super().change(step, joins)
        for join in joins:
            for group, pages in enumerate(join.tables):
                self.state.touch_tables(group, join.slot, np.arange(len(pages)))
            self.state.set_adapter(join.slot, join.adapter)
            self.state.set_options(join.slot, option_words(join.params, join.seed))
        for group, slots, indices in grown:
            self.state.touch_tables(group, slots, indices)
        return grown

    def run(self, step: Step, buffers: StepBuffers) -> PendingStep:
        if step.slots and self._replays(step):
            return self._decode(step, buffers)
        if step.slots:
            # Changes are sent with every step, or they would pile up while none is replayed.
            self.state.send(buffers.staging)
        self._staging = buffers.staging
        return super().run(step, buffers)

    def forward(self, arrays: StepArrays) -> torch.Tensor:
        tokens, rows = self._pass_size(arrays)
        adapted = arrays.adapters is not None
        recorded = self.graphs.has(self._forward, tokens, rows, adapted)
        # A pass that will not be recorded should not be padded.
        if not tokens or not (recorded or not self.graphs.done):
            return super().forward(arrays)
        assert self._staging is not None
        self._forward.send(arrays, tokens, rows, self._staging)
        self._pass(tokens, rows, adapted)
        if self._predictions is not None:
            self._predictions.follow(*self._forward.passed(tokens, rows))
        return self._forward.hidden[: len(arrays.positions)]

    def lost(self, step: Step) -> None:
        self.state.host_positions[step.slots] = _UNKNOWN
        self._step.turn_to(self.turn)

    def unrecorded(self) -> AbstractContextManager[None]:
        return self.graphs.unrecorded()

    @contextmanager
    def unreplayed(self) -> Iterator[bool]:
        before, self._as_it_is = self._as_it_is, True
        try:
            yield self._replaying
        finally:
            self._as_it_is = before

    def stop_replaying(self) -> bool:
        self.graphs.close()
        was, self._replaying = self._replaying, False
        return was

    def close(self) -> None:
        self.graphs.close()

    def _replays(self, step: Step) -> bool:
        """Whether the step has nothing but rows of one token that draw one token, after which
        nothing is predicted."""
        if self._as_it_is or not self._replaying or self._predictions is not None:
            return False
        rows = len(step.slots)
        decodes = step.counts.count(1) == rows == step.samples.count(1)
        asks = step.prompt_logprobs or step.poolings or step.guided
        return decodes and rows <= self.graphs.most_rows and not asks

    def _pass_size(self, arrays: StepArrays) -> tuple[int, int]:
        """Tokens and rows of the recorded pass that holds a step; 0 tokens if no pass does."""
        tokens = len(arrays.positions)
        rows = max(arrays.decode_rows, len(arrays.seq_lens) - arrays.decode_rows)
        fits = tokens <= self._tokens[-1] and rows <= self._rows[-1]
        # Graphs contain Triton's kernels, also if torch's operators should compute a step.
        replays = self._replaying and not self._as_it_is
        if not (fits and self._passes and replays and wants_triton()):
            return 0, 0
        return (
            next(size for size in self._tokens if size >= tokens),
            next(size for size in self._rows if size >= rows),
        )

    def _pass(self, tokens: int, rows: int, adapted: bool) -> None:
        self.graphs.call(self._forward, tokens, rows, adapted, what=f"{tokens} tokens")

    def _decode(self, step: Step, buffers: StepBuffers) -> PendingStep:
        if self._unread == len(self._places):
            raise RuntimeError(f"more than {len(self._places)} steps in flight")
        rows = len(step.slots)
        size = self.graphs.size_for(rows)
        slots, starts = self.state.place(step.slots, step.starts, size)
        draws = Draws.serving(self.sampling.uses(slots), fused=self.sampling.fused)
        self.state.send(buffers.staging)
        self.graphs.run(size, draws, bool((self.inputs.adapters[slots] >= 0).any()))
        self.state.counted(slots)
        for _, states in self._kept:
            for slot in step.slots:
                states.drop_aside(slot)
        if draws is Draws.LOGITS:
            self._fill_masks(step)
            sampled = self.sampling.sample(self._step.logits[:rows], slots, starts + 1)
            self.history.write(slots, starts + 1, sampled.tokens)
            results = EagerResults(draw_rows=list(range(rows)))
            results.tensors = buffers.fetch_all(results.keep(sampled))
            return PendingStep(buffers, results.read)
        landing = buffers.fetch(self._places[self.turn])
        self._unread += 1
        self.turn = (self.turn + 1) % len(self._places)
        return PendingStep(buffers, partial(self._read, landing, rows))

    def _read(self, landing: I32, rows: int) -> StepResult:
        """The result of the oldest replayed step: `landing` int32 `[2, ...]` holds tokens and the
        bits of float32 peaks."""
        self._unread -= 1
        tokens, peaks = landing[:, :rows]
        return drawn_result(tokens.tolist(), peaks.view(np.float32))
