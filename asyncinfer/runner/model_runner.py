"""`ModelRunner`: a step's plan through the model and the sampler."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.attention import AttentionBatch, KVCache
from asyncinfer.config import Graphs
from asyncinfer.models import Decoder
from asyncinfer.runner.accelerator import Accelerator
from asyncinfer.runner.decode_lane import DecodeLane
from asyncinfer.runner.downloads import Berth, Berths
from asyncinfer.runner.flight import Flight, recorded_result
from asyncinfer.runner.input_batch import InputBatch, StepArrays
from asyncinfer.runner.tiles import TiledDecoder
from asyncinfer.sampling import (
    Sampled,
    SamplingState,
    TokenHistory,
    sample_apart,
    score_apart,
    score_tokens,
    upload,
)
from asyncinfer.scheduler.plan import RunnerSpec, StepPlan, StepResult
from asyncinfer.weights import is_out_of_memory

__all__ = ["ModelRunner"]

#: Prompt positions whose logits exist at once.
_SCORED_AT_ONCE = 256


class ModelRunner:
    """Computes steps with a decoder; see `StepRunner` for the order of calls.

    Drawn tokens stay on the device, in the history that the next step reads its inputs from, so
    that a step can be launched before the one that draws its tokens is collected. `launch` does
    not wait for the device.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        spec: RunnerSpec,
        *,
        sampler_timeout: float = 0.25,
        accelerator: Accelerator | None = None,
        graphs: Graphs = "lazy",
        graph_memory: int = 0,
        deterministic: bool = False,
    ) -> None:
        """
        Args:
            accelerator: None on a CPU.
            graphs: when decode steps are recorded on an accelerator.
            graph_memory: bytes set aside for what a recorded step makes on its way.
            deterministic: what a request gets is the same to the last bit whatever is computed with
                it. Nothing is recorded then.
        """
        self._spec = spec
        self._device = decoder.device
        self._decoder = decoder
        self._kv = kv
        self._accelerator = accelerator
        #: Computes what must not depend on the batch.
        self._tiles = TiledDecoder(decoder, kv, spec.max_context) if deterministic else None
        self._berths: Berths | None = None
        self._lane: DecodeLane | None = None
        if accelerator is None:
            # A host's memory is taken as it is first written.
            self._history = TokenHistory(spec.max_slots, self._device)
        else:
            # One slot for rows that fill up a batch, and never another place in memory: `memory.py`
            # counts on it, and graphs are recorded over it.
            self._history = TokenHistory(
                spec.max_slots + 1, self._device, capacity=spec.max_context + 1
            )
        if accelerator is not None and graphs != "off" and not deterministic:
            self._lane = DecodeLane(
                accelerator, decoder, kv, spec, self._history, hold=graph_memory
            )
        self._inputs = InputBatch(
            spec, None if self._lane is None else self._lane.state.host_tables
        )
        self._sampling = SamplingState(
            spec.max_slots, spec.vocab_size, self._history, sampler_timeout=sampler_timeout
        )
        if accelerator is not None:
            self._berths = Berths(accelerator)
            if self._lane is not None and graphs == "start":
                self._record_all(self._lane, self._berths)

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know of how its model was loaded."""
        return self._decoder.notes

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> object:
        """Start a step; the handle is for `collect`.

        Memory is taken in two parts, and where there is none the step is a `MemoryError`: before
        anything has changed (`_reserve`), and after everything has (`_compute`).
        """
        reason = ""
        joining: list[torch.Tensor] = []
        berth = None
        try:
            joining, berth = self._reserve(plan)
        except (MemoryError, RuntimeError) as error:
            reason = _no_room(error)
        self._apply(plan, joining)
        if not reason:
            try:
                flight = self._compute(plan, berth)
                if flight.calls:
                    self._sampling.keep()
                return flight
            except (MemoryError, RuntimeError) as error:
                reason = _no_room(error)
            # Only now: while the error lives, so do the tensors of every frame it came through. The
            # berth is let go: nobody will wait for the copies it has begun.
            self._sampling.take_back()
        if self._lane is not None:
            self._lane.lost(plan.slots)
        raise MemoryError(reason)

    def _reserve(self, plan: StepPlan) -> tuple[list[torch.Tensor], Berth | None]:
        """All memory that the plan's changes take: the tokens of each join on the device, and a
        place for the results."""
        self._history.reserve(max((len(join.token_ids) for join in plan.joins), default=0))
        joining = [self._history.stage(join.token_ids) for join in plan.joins]
        return joining, None if self._berths is None else self._berths.take()

    def _compute(self, plan: StepPlan, berth: Berth | None) -> Flight:
        self._kv.copy_blocks(plan.copies)
        if self._kv.window is not None:
            self._kv.window.copy_blocks(plan.copied_pages)
        if not plan.slots:
            return self._send(Flight(), [torch.empty(0), torch.empty(0)], berth)
        if self._lane is not None and berth is not None:
            if self._lane.takes(plan):
                return self._launch_decode(self._lane, plan, berth)
            self._lane.keep_up(berth)

        arrays = self._inputs.build(plan)
        hidden = self._forward(arrays)
        results: list[torch.Tensor] = [torch.empty(0), torch.empty(0)]
        flight = Flight(draw_rows=arrays.draw_rows.tolist(), prompts=dict(plan.prompt_logprobs))
        if len(arrays.draw_rows):
            results = flight.keep(self._draw(arrays, hidden))
        if 0 in plan.samples:
            results += self._look_at_chunks(flight, plan, arrays, hidden)
        for row, top in plan.prompt_logprobs.items():
            results += self._score_prompt(plan, row, int(arrays.first_tokens[row]), hidden, top)
        return self._send(flight, results, berth)

    def collect(self, handle: object) -> StepResult:
        """Wait for a step and give its result."""
        assert isinstance(handle, Flight)
        if handle.berth is not None:
            handle.berth.wait()
        try:
            if handle.drawn is not None and self._lane is not None:
                return recorded_result(*self._lane.read(handle.drawn))
            return handle.result()
        finally:
            if handle.berth is not None and self._berths is not None:
                self._berths.give_back(handle.berth)

    def close(self) -> None:
        """Drop everything that lives on the device and give its memory back."""
        if self._accelerator is not None:
            # Nothing is dropped that a step in flight uses: torch may hand it to another thread.
            # A device that has failed says so again, to whom nobody listens any more.
            with suppress(RuntimeError):
                self._accelerator.drain()
        if self._lane is not None:
            self._lane.close()
        del self._decoder, self._kv, self._history, self._sampling, self._inputs, self._tiles
        self._lane = self._berths = None
        if self._accelerator is not None:
            with suppress(RuntimeError):
                self._accelerator.close()

    def _apply(self, plan: StepPlan, joining: list[torch.Tensor]) -> None:
        """What changes before the rows are computed. `joining` are the tokens of the joins; without
        room for these nobody joins, and nobody is missed: who joins a step that is taken back
        leaves with the next one."""
        for slot in plan.leaves:
            self._sampling.leave(slot)
        for join, tokens in zip(plan.joins, joining, strict=False):
            self._inputs.join(join)
            self._history.put(join.slot, tokens)
            self._sampling.join(join.slot, join)
            if self._lane is not None:
                self._lane.join(join)
        self._inputs.grow(plan.grown)
        self._inputs.grow_pages(plan.grown_pages)
        if self._lane is not None:
            self._lane.grow(plan.grown)
            self._lane.grow_pages(plan.grown_pages)

    def _launch_decode(self, lane: DecodeLane, plan: StepPlan, berth: Berth) -> Flight:
        step = lane.launch(plan, self._sampling, berth)
        if step.logits is None:
            return Flight(drawn=step.drawn, berth=berth)
        sampled = self._sampling.sample(step.logits, step.slots, step.positions)
        self._history.write(step.slots, step.positions, sampled.tokens)
        flight = Flight(draw_rows=list(range(len(step.slots))))
        return self._send(flight, flight.keep(sampled), berth)

    @staticmethod
    def _send(flight: Flight, results: list[torch.Tensor], berth: Berth | None) -> Flight:
        flight.berth = berth
        flight.results = results if berth is None else berth.fetch_all(results)
        return flight

    @staticmethod
    @torch.inference_mode()
    def _record_all(lane: DecodeLane, berths: Berths) -> None:
        berth = berths.take()
        lane.record_all(berth)
        berth.fetch_all([])
        berth.wait()
        berths.give_back(berth)

    def _forward(self, arrays: StepArrays) -> torch.Tensor:
        """Hidden states of the step's query tokens, `[tokens, hidden]`."""
        if self._tiles is not None:
            tokens = self._history.read(arrays.token_slots, arrays.positions)
            return self._tiles.forward(tokens, arrays)
        places = self._history.places(arrays.token_slots, arrays.positions)
        window_arrays: list[npt.NDArray[Any]] = []
        if arrays.window_tables is not None and arrays.window_mapping is not None:
            window_arrays = [arrays.window_tables, arrays.window_mapping]
        places_there, positions, slot_mapping, block_tables, seq_lens, query_starts, *near = upload(
            self._device,
            places,
            arrays.positions,
            arrays.slot_mapping,
            arrays.block_tables,
            arrays.seq_lens,
            arrays.query_starts,
            *window_arrays,
        )
        window_tables, window_mapping = near or (None, None)
        batch = AttentionBatch(
            block_tables=block_tables,
            seq_lens=seq_lens,
            query_starts=query_starts,
            slot_mapping=slot_mapping,
            starts=arrays.starts,
            counts=arrays.counts,
            block_size=self._spec.block_size,
            decode_rows=arrays.decode_rows,
            sequences=arrays.sequences,
            window_tables=window_tables,
            window_mapping=window_mapping,
        )
        tokens = self._history.at(places_there)
        return self._decoder.forward(tokens, positions, self._kv, batch)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Padding of the model's vocabulary is cut off: no text stands for it."""
        logits = (self._tiles or self._decoder).logits(hidden)
        return logits[:, : self._spec.vocab_size]

    def _draw(self, arrays: StepArrays, hidden: torch.Tensor) -> Sampled:
        if not np.array_equal(arrays.draw_tokens, np.arange(len(hidden))):
            hidden = hidden.index_select(0, *upload(self._device, arrays.draw_tokens))
        sample = self._sampling.sample
        if self._tiles is not None:
            sample = partial(sample_apart, self._sampling)
        sampled = sample(self._logits(hidden), arrays.draw_slots, arrays.draw_positions)
        tokens, slots, positions = sampled.tokens, arrays.draw_slots, arrays.draw_positions
        if not arrays.draw_last.all():
            # Positions before a row's last are known already: those draws only verify them.
            new = np.flatnonzero(arrays.draw_last)
            tokens = tokens.index_select(0, *upload(self._device, new))
            slots, positions = slots[new], positions[new]
        self._history.write(slots, positions, tokens)
        return sampled

    def _look_at_chunks(
        self, flight: Flight, plan: StepPlan, arrays: StepArrays, hidden: torch.Tensor
    ) -> list[torch.Tensor]:
        """float32 `[rows]`: the largest number of the last hidden state of each row that draws
        nothing. What is not finite in a chunk reaches its last token, by attention."""
        rows = np.flatnonzero(np.array(plan.samples) == 0)
        flight.chunks = rows.tolist()
        last = arrays.first_tokens[rows] + np.array(plan.counts)[rows] - 1
        states = hidden.index_select(0, *upload(self._device, last))
        return [states.abs().amax(dim=-1).float()]

    def _score_prompt(
        self, plan: StepPlan, row: int, first: int, hidden: torch.Tensor, top: int
    ) -> list[torch.Tensor]:
        """`score_tokens` of the prompt tokens that follow each of the row's query tokens."""
        slot, start = plan.slots[row], plan.starts[row]
        last = int(self._inputs.prompt_lens[slot]) - 1
        count = max(0, min(plan.counts[row], last - start))
        positions = np.arange(start + 1, start + count + 1)
        tokens = self._history.read(np.full(count, slot), positions)
        score = score_tokens if self._tiles is None else score_apart
        parts = [
            score(
                self._logits(hidden[first + i : first + min(i + _SCORED_AT_ONCE, count)]),
                tokens[i : i + _SCORED_AT_ONCE],
                top,
            )
            for i in range(0, max(count, 1), _SCORED_AT_ONCE)
        ]
        return [torch.cat(column) for column in zip(*parts, strict=True)]


def _no_room(error: BaseException) -> str:
    """What to say of an error for memory that could not be had; any other is raised again."""
    if not is_out_of_memory(error):
        raise error
    return str(error) or "out of memory"
