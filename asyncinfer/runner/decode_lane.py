"""`DecodeLane`: steps of nothing but decode rows, on state that stays on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.attention import KVCache
from asyncinfer.models import Decoder
from asyncinfer.runner.accelerator import Accelerator
from asyncinfer.runner.decode_graphs import DecodeGraphs, batch_sizes
from asyncinfer.runner.downloads import Berth
from asyncinfer.runner.input_batch import table_width
from asyncinfer.runner.recorded_step import RecordedStep
from asyncinfer.runner.slot_state import SlotState
from asyncinfer.sampling import OPTION_WORDS, Draws, SamplingState, TokenHistory, option_words
from asyncinfer.scheduler.plan import Join, RunnerSpec, StepPlan

__all__ = ["DecodeLane", "Drawn", "LaneStep"]

I64 = npt.NDArray[np.int64]

#: A position that no step begins at.
_UNKNOWN = -2


@dataclass(slots=True)
class Drawn:
    """Results of a recorded step on their way to the host."""

    #: int32 `[2, rows]`: tokens and the bits of float32 peaks.
    landing: npt.NDArray[np.int32]
    rows: int

    def read(self) -> tuple[list[int], npt.NDArray[np.float32]]:
        """Tokens and peaks, once they have arrived."""
        tokens, peaks = self.landing[:, : self.rows]
        return tokens.tolist(), peaks.view(np.float32)


@dataclass(slots=True)
class LaneStep:
    """A step that ran as far as the lane takes it: to its results, or to the logits float32
    `[rows, vocab_size]` that something has to be drawn from, for these slots at these positions."""

    slots: I64
    positions: I64
    drawn: Drawn | None = None
    logits: torch.Tensor | None = None


class DecodeLane:
    """What a steady decode step costs the host: what changed, in one copy and one scatter (nothing
    if nothing did), a replayed graph, and the copy of its results, with an event before and after.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        decoder: Decoder,
        kv: KVCache,
        spec: RunnerSpec,
        history: TokenHistory,
        *,
        hold: int = 0,
    ) -> None:
        sizes = batch_sizes(spec.max_slots)
        width = table_width(spec)
        #: Where tables of window pages begin.
        self._pages_at = -(-spec.max_context // spec.block_size)
        self.state = SlotState(accelerator, spec.max_slots, width, sizes[-1], OPTION_WORDS)
        self._step = RecordedStep(
            decoder, kv, spec, self.state, history, sizes[-1], max(2, spec.overlap)
        )
        self.graphs = DecodeGraphs(accelerator, self._step, sizes, hold=hold)
        self._places = list(self._step.results)
        self._turn = 0
        #: Recorded steps whose results are still to be read.
        self._unread = 0

    def record_all(self, berth: Berth) -> None:
        """Record every graph there can be, before the first step."""
        self.state.send(berth.staging)
        self.graphs.record_all()
        self._step.turn_to(0)

    def join(self, join: Join) -> None:
        """The slot's table on the host is that of a new tenant."""
        self.state.touch_table(join.slot, len(join.blocks))
        if join.pages:
            pages = self._pages_at + np.arange(len(join.pages))
            self.state.touch_entries(np.array([join.slot]), pages)
        self.state.set_options(join.slot, option_words(join.params, join.seed))

    def grow(self, grown: list[tuple[int, int, int]]) -> None:
        """Tables on the host have grown."""
        if grown:
            slots, indices, _ = np.array(grown).T
            self.state.touch_entries(slots, indices)

    def grow_pages(self, grown: list[tuple[int, int, int]]) -> None:
        """Tables of window pages on the host have grown."""
        if grown:
            slots, indices, _ = np.array(grown).T
            self.state.touch_entries(slots, self._pages_at + indices)

    def takes(self, plan: StepPlan) -> bool:
        """Whether the plan has nothing but rows of one token that draw one."""
        rows = len(plan.slots)
        decodes = plan.counts.count(1) == rows == plan.samples.count(1)
        return decodes and rows <= self.graphs.most_rows and not plan.prompt_logprobs

    def launch(self, plan: StepPlan, sampling: SamplingState, berth: Berth) -> LaneStep:
        """Run the step of a plan it takes, whose joins and growth were applied."""
        if self._unread == len(self._places):
            raise RuntimeError(f"more than {len(self._places)} steps in flight")
        size = self.graphs.size_for(len(plan.slots))
        slots, starts = self.state.place(plan.slots, plan.starts, size)
        draws = Draws.serving(sampling.uses(slots), fused=sampling.fused)
        self.state.send(berth.staging)
        self.graphs.run(size, draws)
        self.state.counted(slots)
        if draws is Draws.LOGITS:
            return LaneStep(slots, starts + 1, logits=self._step.logits[: len(slots)])
        landing = berth.fetch(self._places[self._turn])
        self._unread += 1
        self._turn = (self._turn + 1) % len(self._places)
        return LaneStep(slots, starts + 1, drawn=Drawn(landing, len(slots)))

    def keep_up(self, berth: Berth) -> None:
        """A step of another kind: what changed does not pile up meanwhile."""
        self.state.send(berth.staging)

    def lost(self, slots: list[int]) -> None:
        """A step of these slots was begun, and nobody knows how far it came."""
        self.state.host_positions[slots] = _UNKNOWN
        self._step.turn_to(self._turn)

    def read(self, drawn: Drawn) -> tuple[list[int], npt.NDArray[np.float32]]:
        """Tokens and peaks of the oldest recorded step, after its berth was waited for."""
        self._unread -= 1
        return drawn.read()

    def close(self) -> None:
        self.graphs.close()
