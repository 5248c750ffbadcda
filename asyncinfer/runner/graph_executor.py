"""`GraphExecutor`: steps of nothing but decode rows, on state that stays on the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.attention import KVCache
from asyncinfer.models import Decoder
from asyncinfer.runner.accelerator import Accelerator
from asyncinfer.runner.decode_graphs import DecodeGraphs, batch_sizes
from asyncinfer.runner.eager_executor import EagerExecutor
from asyncinfer.runner.input_batch import InputBatch
from asyncinfer.runner.pending_step import EagerResults, PendingStep, drawn_result
from asyncinfer.runner.recorded_step import RecordedStep
from asyncinfer.runner.slot_state import SlotState
from asyncinfer.runner.step_buffers import PinnedBuffers, StepBuffers
from asyncinfer.sampling import OPTION_WORDS, Draws, SamplingState, TokenHistory, option_words
from asyncinfer.scheduler import Join, RunnerSpec, Step, StepResult

__all__ = ["GraphExecutor"]

I32 = npt.NDArray[np.int32]

#: A position that no step begins at.
_UNKNOWN = -2


class GraphExecutor(EagerExecutor):
    """Replays decode steps, and computes every other step as an `EagerExecutor` does.

    A steady decode step costs the host one replayed graph and one copy of results, with an event
    before and after the copy. Where tables or options have changed it costs a copy and a scatter
    more.

    Args:
        history: as `RecordedStep` needs it.
        hold: bytes set aside for what a recorded step makes on its way.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        decoder: Decoder,
        kv: Sequence[KVCache],
        spec: RunnerSpec,
        history: TokenHistory,
        sampling: SamplingState,
        *,
        hold: int = 0,
    ) -> None:
        sizes = batch_sizes(spec.max_slots)
        groups, width = len(spec.groups), spec.table_width
        self.state = SlotState(accelerator, spec.max_slots, groups, width, sizes[-1], OPTION_WORDS)
        super().__init__(decoder, kv, InputBatch(spec, self.state.host_tables), history, sampling)
        self._step = RecordedStep(
            decoder, kv, spec, self.state, history, sizes[-1], max(2, spec.overlap)
        )
        self.graphs = DecodeGraphs(accelerator, self._step, sizes, hold=hold)
        self._accelerator = accelerator
        #: Where replayed steps leave their results, in turns.
        self._places = list(self._step.results)
        self._turn = 0
        #: Replayed steps whose results were not read yet.
        self._unread = 0

    @torch.inference_mode()
    def record_all(self) -> None:
        """Record every graph there can be. To be called before the first step."""
        buffers = PinnedBuffers(self._accelerator)
        self.state.send(buffers.staging)
        self.graphs.record_all()
        self._step.turn_to(0)
        buffers.fetch_all([])
        buffers.wait()

    def change(self, plan: Step, joins: Sequence[Join]) -> None:
        super().change(plan, joins)
        for join in joins:
            for group, pages in enumerate(join.tables):
                self.state.touch_tables(group, join.slot, np.arange(len(pages)))
            self.state.set_options(join.slot, option_words(join.params, join.seed))
        for group, changes in enumerate(plan.groups):
            if changes.grown:
                slots, indices, _ = np.array(changes.grown).T
                self.state.touch_tables(group, slots, indices)

    def run(self, plan: Step, buffers: StepBuffers) -> PendingStep:
        if plan.slots and self._replays(plan):
            return self._decode(plan, buffers)
        if plan.slots:
            # Sent now, what has changed does not pile up while no step is replayed.
            self.state.send(buffers.staging)
        return super().run(plan, buffers)

    def lost(self, plan: Step) -> None:
        self.state.host_positions[plan.slots] = _UNKNOWN
        self._step.turn_to(self._turn)

    def close(self) -> None:
        self.graphs.close()

    def _replays(self, plan: Step) -> bool:
        """Whether the plan has nothing but rows of one token that draw one."""
        rows = len(plan.slots)
        decodes = plan.counts.count(1) == rows == plan.samples.count(1)
        return decodes and rows <= self.graphs.most_rows and not plan.prompt_logprobs

    def _decode(self, plan: Step, buffers: StepBuffers) -> PendingStep:
        if self._unread == len(self._places):
            raise RuntimeError(f"more than {len(self._places)} steps in flight")
        rows = len(plan.slots)
        size = self.graphs.size_for(rows)
        slots, starts = self.state.place(plan.slots, plan.starts, size)
        draws = Draws.serving(self.sampling.uses(slots), fused=self.sampling.fused)
        self.state.send(buffers.staging)
        self.graphs.run(size, draws)
        self.state.counted(slots)
        if draws is Draws.LOGITS:
            sampled = self.sampling.sample(self._step.logits[:rows], slots, starts + 1)
            self.history.write(slots, starts + 1, sampled.tokens)
            results = EagerResults(draw_rows=list(range(rows)))
            results.tensors = buffers.fetch_all(results.keep(sampled))
            return PendingStep(buffers, results.read)
        landing = buffers.fetch(self._places[self._turn])
        self._unread += 1
        self._turn = (self._turn + 1) % len(self._places)
        return PendingStep(buffers, partial(self._read, landing, rows))

    def _read(self, landing: I32, rows: int) -> StepResult:
        """The result of the oldest replayed step: `landing` int32 `[2, ...]` holds tokens and the
        bits of float32 peaks."""
        self._unread -= 1
        tokens, peaks = landing[:, :rows]
        return drawn_result(tokens.tolist(), peaks.view(np.float32))
