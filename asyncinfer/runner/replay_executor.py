"""`ReplayExecutor`: the layers of decode steps on a CPU, by recorded calls of native code."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.adapters import AdapterPool
from asyncinfer.attention import FixedRows, KVCache, StateCache, reads_plain_pages
from asyncinfer.kernels.native import Arena, RecordedCalls, Recording
from asyncinfer.layers import ForwardPass
from asyncinfer.models import Decoder
from asyncinfer.runner.eager_executor import EagerExecutor
from asyncinfer.runner.input_batch import InputBatch, StepArrays
from asyncinfer.sampling import SamplingState, TokenHistory
from asyncinfer.scheduler import RunnerSpec

__all__ = ["ReplayExecutor"]

I64 = npt.NDArray[np.int64]

#: Steps of as many rows after which these are recorded: a recording takes as long as two.
_STEPS: Final = 4
#: Seconds of a replay above which the next one is made layer by layer, since a program may end
#: between two layers.
_LONG: Final = 0.25


class ReplayExecutor(EagerExecutor):
    """An `EagerExecutor` that replays the layers of steps in which each row has one query token,
    where a CPU's native code computes all of them. Python's part of such a step is
    longer than that of the numbers in a small model, and holds the GIL.

    Each number of rows has a recording of its own. It is used if it gives the bits that the layers
    themselves gave for the same rows; otherwise these are called in every step, as they are for all
    other steps.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: Sequence[KVCache | StateCache],
        spec: RunnerSpec,
        history: TokenHistory,
        sampling: SamplingState,
        adapters: AdapterPool | None = None,
        groups: Sequence[int] | None = None,
    ) -> None:
        super().__init__(decoder, kv, InputBatch(spec), history, sampling, adapters, groups)
        self._spec = spec
        self._can_record = _can_record(decoder, kv)
        self._most_threads = torch.get_num_threads()
        self._arena = Arena()
        self._inputs: FixedInputs | None = None
        #: By the number of rows: the recording and the hidden states that it leaves; None where
        #: there cannot be one.
        self._recorded: dict[int, tuple[RecordedCalls, torch.Tensor] | None] = {}
        #: Steps of so many rows that were not replayed.
        self._steps = Counter[int]()
        self._seconds = 0.0

    def forward(self, arrays: StepArrays) -> torch.Tensor:
        rows = len(arrays.seq_lens)
        decodes = arrays.decode_rows == rows and arrays.adapters is None
        if not decodes or not self._can_record:
            return super().forward(arrays)
        recorded = self._recorded.get(rows)
        if recorded is not None:
            calls, hidden = recorded
            self._replay(calls, arrays)
            return hidden
        hidden = super().forward(arrays)
        self._steps[rows] += 1
        if rows not in self._recorded and self._steps[rows] == _STEPS:
            self._recorded[rows] = self._record(arrays, hidden)
            if self._recorded[rows] is None:
                # The pages hold what the recording wrote.
                return super().forward(arrays)
        return hidden

    def _record(
        self, arrays: StepArrays, right: torch.Tensor
    ) -> tuple[RecordedCalls, torch.Tensor] | None:
        """Record the layers for the rows of a step that gave `right`; None if that cannot be done,
        or if the replay gives anything else."""
        if self._inputs is None:
            self._inputs = FixedInputs(self.decoder, self._paged, self._spec)
        rows, longest = len(arrays.seq_lens), self._spec.max_context
        self._send(arrays)
        recording = Recording(self._arena, self._most_threads)
        try:
            x, one = self._inputs.first(rows, longest)
            with recording.begun():
                for layer in self.decoder.layers:
                    x = layer(x, one)
                    recording.end_layer()
            calls = recording.made()
        except Exception:
            # `CannotRecord`, or an error of a family's own code, which is not to know of this.
            return None
        x.fill_(torch.nan)
        self._replay(calls, arrays)
        bits = torch.int32 if x.dtype is torch.float32 else torch.int16
        same = torch.equal(x.view(bits), right.contiguous().view(bits))
        return (calls, x) if same else None

    def _send(self, arrays: StepArrays) -> None:
        """Put the inputs of a step where recorded calls read them."""
        assert self._inputs is not None
        places = self.history.places(arrays.token_slots, arrays.positions)
        positions = torch.from_numpy(arrays.positions)
        tokens = self.history.at(torch.from_numpy(places))
        self._inputs.send(arrays, tokens, positions)

    def _replay(self, calls: RecordedCalls, arrays: StepArrays) -> None:
        self._send(arrays)
        threads = min(torch.get_num_threads(), self._most_threads)
        began, longest = time.perf_counter(), int(arrays.seq_lens.max())
        between = self.decoder.between_layers
        if self._seconds <= _LONG or between is None:
            calls.replay(threads, longest)
            if between is not None:
                between()
        else:
            for _ in calls.replay_layers(threads, longest):
                between()
        self._seconds = time.perf_counter() - began


class FixedInputs:
    """The inputs of decode rows, in tensors that stay where they are."""

    def __init__(
        self, decoder: Decoder, paged: Sequence[tuple[int, KVCache]], spec: RunnerSpec
    ) -> None:
        """`paged`: the caches, each with its group's number."""
        self._decoder = decoder
        self._paged = paged
        rows, hidden = spec.max_slots, decoder.config.hidden_size
        self._embedded = torch.empty(rows, hidden, dtype=decoder.dtype)
        angles = decoder.angles(torch.zeros(rows, dtype=torch.int64))
        self._angles = [tuple(each.contiguous().clone() for each in pair) for pair in angles]
        self._lengths = np.ones(rows, np.int32)
        #: By cache.
        self._tables = [np.zeros((rows, spec.table_width), np.int32) for _ in paged]
        self._slots = [np.zeros((2, rows * kv.storage.shape[3]), np.int64) for _, kv in paged]

    def send(self, arrays: StepArrays, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        """Put the rows of a step there: `tokens` and `positions`, int64 `[rows]`."""
        rows = len(positions)
        self._embedded[:rows].copy_(self._decoder.embedding(tokens, positions))
        for fixed, made in zip(self._angles, self._decoder.angles(positions), strict=True):
            for into, each in zip(fixed, made, strict=True):
                into[:rows].copy_(each)
        self._lengths[:rows] = arrays.seq_lens
        caches = zip(self._paged, self._tables, self._slots, strict=True)
        for (number, kv), tables, slots in caches:
            given, mapping = arrays.block_tables[number], arrays.slot_mapping[number]
            tables[:rows, : given.shape[1]] = given
            slots[:, : rows * kv.storage.shape[3]] = _slots(kv, mapping)
            # As `GatheredAttention` does: a later step may read a block to its end, and copies
            # would lack this step's tokens.
            begun = mapping[mapping % kv.block_size == 0] // kv.block_size
            if len(begun) and kv.block_size > 1:
                kv.clear(torch.from_numpy(begun))
            if kv.contiguous.groups:
                kv.contiguous.of([], [], kv.block_size)

    def first(self, rows: int, longest: int) -> tuple[torch.Tensor, ForwardPass]:
        """The input of the first layer, and what all layers are given, for so many rows of at most
        `longest` tokens."""
        attends: dict[int, FixedRows] = {}
        caches = zip(self._paged, self._tables, self._slots, strict=True)
        for (_, kv), tables, slots in caches:
            count = rows * kv.storage.shape[3]
            keys, values = (torch.from_numpy(each[:count]) for each in slots)
            lengths = torch.from_numpy(self._lengths[:rows])
            given = torch.from_numpy(tables[:rows])
            scale = self._decoder.config.query_scale
            fixed = FixedRows(kv, scale, given, lengths, (keys, values), longest)
            attends |= dict.fromkeys(kv.layers, fixed)
        angles = [(cos[:rows], sin[:rows]) for cos, sin in self._angles]
        return self._embedded[:rows], ForwardPass(angles, attends)


def _can_record(decoder: Decoder, kv: Sequence[KVCache | StateCache]) -> bool:
    """Whether layers of this model may be recorded: they are given nothing but angles, and
    attention to plain pages."""
    config = decoder.config
    rows = config.bidirectional, config.indexed, config.chunked_layers
    other = any((*rows, config.per_layer_inputs, config.temperatures, decoder.predictor))
    known = decoder.dtype in (torch.float32, torch.bfloat16)
    plain = known and decoder.device.type == "cpu"
    return plain and not other and all(isinstance(c, KVCache) and reads_plain_pages(c) for c in kv)


def _slots(kv: KVCache, mapping: I64) -> I64:
    """int64 `[2, tokens * kv_heads]`: where each token's heads lie in a layer's keys, and in its
    values, seen as `[2 * num_blocks * kv_heads * block_size, head_dim]`. `mapping` int64 `[tokens]`
    is `AttentionBatch.slot_mapping`."""
    _, _, blocks, kv_heads, size, _ = kv.storage.shape
    first = (mapping // size) * (kv_heads * size) + mapping % size
    keys = (first[:, None] + np.arange(0, kv_heads * size, size)).ravel()
    return np.stack((keys, keys + blocks * kv_heads * size))
