"""`ModelRunner`: a step's plan through the model and the sampler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from asyncinfer.attention import AttentionBatch, KVCache
from asyncinfer.config import Graphs
from asyncinfer.errors import RequestFailed
from asyncinfer.models import Decoder
from asyncinfer.runner.accelerator import Accelerator
from asyncinfer.runner.decode_lane import DecodeLane, Drawn
from asyncinfer.runner.device import is_out_of_memory
from asyncinfer.runner.downloads import Berth, Berths
from asyncinfer.runner.input_batch import InputBatch, StepArrays
from asyncinfer.runner.tiles import TiledDecoder
from asyncinfer.sampling import (
    PluginCall,
    PluginSamplers,
    Sampled,
    SamplingState,
    TokenHistory,
    row_logprobs,
    sample_apart,
    score_apart,
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

    #: Drawn tokens and peaks; the draws' scores, if any; the scores of each of `prompts`. On the
    #: host, once `berth` was waited for.
    results: list[torch.Tensor] = field(default_factory=list)
    #: Instead of them, for a step that was recorded.
    drawn: Drawn | None = None
    #: None where the host's memory is the device's.
    berth: Berth | None = None
    #: Row of the plan of each draw.
    draw_rows: list[int] = field(default_factory=list)
    #: Draws that asked for logprobs, with the number of alternatives.
    scored: dict[int, int] = field(default_factory=dict)
    #: Rows that asked for prompt logprobs, with the number of alternatives.
    prompts: dict[int, int] = field(default_factory=dict)
    #: What sampler plugins did; the verdicts on them come before the scores.
    calls: list[PluginCall] = field(default_factory=list)


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
        self._tiles = TiledDecoder(decoder, kv) if deterministic else None
        self._berths: Berths | None = None
        self._lane: DecodeLane | None = None
        if accelerator is None or graphs == "off" or deterministic:
            self._history = TokenHistory(spec.max_slots, self._device)
        else:
            # One slot for rows that fill up a batch, and never another place in memory.
            self._history = TokenHistory(
                spec.max_slots + 1, self._device, capacity=spec.max_context + 1
            )
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

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> object:
        """Start a step; the handle is for `collect`."""
        berth = None if self._berths is None else self._berths.take()
        self._apply(plan)
        try:
            return self._compute(plan, berth)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        # Only now: while the error lives, so do the tensors of every frame it came through. The
        # berth is let go: nobody will wait for the copies it has begun.
        if self._lane is not None:
            self._lane.lost(plan.slots)
        raise MemoryError(reason)

    def _compute(self, plan: StepPlan, berth: Berth | None) -> object:
        self._kv.copy_blocks(plan.copies)
        if not plan.slots:
            return self._flight(_Flight(), [torch.empty(0), torch.empty(0)], berth)
        if self._lane is not None and berth is not None:
            if self._lane.takes(plan):
                return self._launch_decode(self._lane, plan, berth)
            self._lane.keep_up(berth)

        arrays = self._inputs.build(plan)
        hidden = self._forward(arrays)
        results: list[torch.Tensor] = [torch.empty(0), torch.empty(0)]
        flight = _Flight(draw_rows=arrays.draw_rows.tolist(), prompts=dict(plan.prompt_logprobs))
        if len(arrays.draw_rows):
            results = self._keep(flight, self._draw(arrays, hidden))
        for row, top in plan.prompt_logprobs.items():
            results += self._score_prompt(plan, row, int(arrays.first_tokens[row]), hidden, top)
        return self._flight(flight, results, berth)

    def collect(self, handle: object) -> StepResult:
        """Wait for a step and give its result."""
        assert isinstance(handle, _Flight)
        if handle.berth is not None:
            handle.berth.wait()
        try:
            if handle.drawn is not None:
                return self._read(handle.drawn)
            return self._result(handle)
        finally:
            if handle.berth is not None and self._berths is not None:
                self._berths.give_back(handle.berth)

    def _read(self, drawn: Drawn) -> StepResult:
        """The result of a recorded step."""
        assert self._lane is not None
        tokens, peaks = self._lane.read(drawn)
        fine = np.isfinite(peaks)
        if fine.all():
            return StepResult(tokens)
        failed = {row: _failure(float(peaks[row])) for row in np.flatnonzero(~fine).tolist()}
        return StepResult(tokens, failed=failed)

    def _result(self, handle: _Flight) -> StepResult:
        tokens, peaks, *scores = handle.results
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
        if self._lane is not None:
            self._lane.close()
        del self._decoder, self._kv, self._history, self._sampling, self._inputs, self._tiles
        self._lane = self._berths = None
        if self._accelerator is not None:
            self._accelerator.close()

    def _apply(self, plan: StepPlan) -> None:
        """What changes before the rows are computed."""
        for slot in plan.leaves:
            self._sampling.leave(slot)
        for join in plan.joins:
            self._inputs.join(join)
            self._history.join(join.slot, join.token_ids)
            self._sampling.join(join.slot, join)
            if self._lane is not None:
                self._lane.join(join)
        self._inputs.grow(plan.grown)
        if self._lane is not None:
            self._lane.grow(plan.grown)

    def _launch_decode(self, lane: DecodeLane, plan: StepPlan, berth: Berth) -> _Flight:
        step = lane.launch(plan, self._sampling, berth)
        if step.logits is None:
            return _Flight(drawn=step.drawn, berth=berth)
        sampled = self._sampling.sample(step.logits, step.slots, step.positions)
        self._history.write(step.slots, step.positions, sampled.tokens)
        flight = _Flight(draw_rows=list(range(len(step.slots))))
        return self._flight(flight, self._keep(flight, sampled), berth)

    @staticmethod
    def _keep(flight: _Flight, sampled: Sampled) -> list[torch.Tensor]:
        """What of a draw the host has to see."""
        flight.scored, flight.calls = sampled.scored_rows, sampled.calls
        verdicts = [call.verdict for call in sampled.calls if call.verdict is not None]
        return [sampled.tokens, sampled.peak, *verdicts, *sampled.scores]

    @staticmethod
    def _flight(flight: _Flight, results: list[torch.Tensor], berth: Berth | None) -> _Flight:
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
        places_there, positions, slot_mapping, block_tables, seq_lens, query_starts = upload(
            self._device,
            places,
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
