"""`ReplayExecutor`: the layers of decode steps on a CPU, by recorded calls of native code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.adapters import AdapterPool
from asyncinfer.attention import (
    FEW_BESIDE_CODE,
    KVCache,
    StateCache,
)
from asyncinfer.kernels.native import (
    Arena,
    Recording,
    end_kernels,
    prepare_recording,
)
from asyncinfer.models import Decoder
from asyncinfer.runner.eager_executor import EagerExecutor
from asyncinfer.runner.fixed_inputs import MOST_CHUNK, FixedInputs, PromptChunk, can_record
from asyncinfer.runner.input_batch import InputBatch, StepArrays
from asyncinfer.runner.pending_step import PendingStep, StepBuffers
from asyncinfer.runner.recordings import RecordedHead, RecordedLayers, StepKind, same_bits
from asyncinfer.runner.replayer import Replayer
from asyncinfer.runner.step_queue import QueuedCalls, StepQueue, draws_largest
from asyncinfer.sampling import Sampled, SamplingState, TokenHistory
from asyncinfer.scheduler import RunnerSpec, Step

__all__ = ["ReplayExecutor"]

I64 = npt.NDArray[np.int64]

#: The number of the step of a kind that is recorded. A later one is computed twice.
_STEPS: Final = 4
#: The most rows whose head is recorded. The recordings of all numbers of rows share the memory of
#: so many rows' logits.
_HEAD_ROWS: Final = 32


class ReplayExecutor(EagerExecutor):
    """An `EagerExecutor` that replays the layers of steps in which each row has one query token, or
    all but a last one, with a chunk of a prompt, where a CPU's native code computes all of them.
    The head of few rows that decode is replayed with them, if native code computes it. Python's
    part of such a step is longer than that of the numbers in a small model, and holds the GIL.

    Each kind of steps has a recording of its own. The next step of the kind, of those with a chunk
    the next one of another number of tokens, is computed by both it and the layers. It is used from
    then on if they gave the same bits; otherwise the layers are called in every step, as they are
    for all other steps. Steps that draw their rows' largest logits may be queued, see `StepQueue`.
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
        self._can_record = can_record(decoder, kv)
        if self._can_record:
            prepare_recording(decoder.dtype)
        self._replay = Replayer(decoder)
        self._arena = Arena()
        self._inputs: FixedInputs | None = None
        #: None where there cannot be one.
        self._recorded: dict[StepKind, RecordedLayers | None] = {}
        #: Kinds whose recording gave the bits of the layers.
        self._trusted: set[StepKind] = set()
        #: Kinds of which a step was recorded or could not be -> the most tokens of another attempt.
        self._limits: dict[StepKind, int] = {}
        #: Steps that could have been recorded.
        self._steps = Counter[StepKind]()
        #: The hidden states of the last step's decode rows, and what the head made of them.
        self._computed: tuple[torch.Tensor, RecordedHead] | None = None
        self._has_plugin = False
        #: By their rows; None where there cannot be one.
        self._queued: dict[int, QueuedCalls | None] = {}
        self._queue = StepQueue(history, self._replay)

    @property
    def helps(self) -> bool:
        return self._replay.helps

    def settle(self, step: Step) -> None:
        if not self._queue.precede(step):
            self._queue.finish()

    def queue(self, step: Step, arrays: StepArrays, buffers: StepBuffers) -> PendingStep | None:
        calls = self._calls_of(step, arrays) if self._queue.pace.steps > 1 else None
        if calls is None:
            self._queue.finish()
            return None
        self._send(arrays, None, self._queue.place)
        return PendingStep(buffers, self._queue.add(step, arrays, calls))

    def close(self) -> None:
        self._queue.close()
        self._recorded.clear()
        self._queued.clear()
        self._inputs = None

    def drawn(self, hidden: torch.Tensor, tokens: I64) -> torch.Tensor:
        if self._computed is not None:
            rows = self._computed[0]
            if np.array_equal(tokens, np.arange(len(rows))):
                return rows
        return super().drawn(hidden, tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        computed, self._computed = self._computed, None
        if computed is not None and computed[0] is hidden:
            # A plugin may keep logits beyond its step, and the next one writes to the recorded.
            return computed[1].logits.to(torch.float32, copy=self._has_plugin)
        return super().logits(hidden)

    def greedy(self, hidden: torch.Tensor) -> Sampled | None:
        computed = self._computed
        if computed is None or computed[0] is not hidden or computed[1].largest is None:
            return None
        self._computed = None
        return computed[1].greedy

    def forward(self, arrays: StepArrays) -> torch.Tensor:
        self._computed, self._replay.helps = None, False
        kind = self._kind_of(arrays)
        if kind is None:
            return super().forward(arrays)
        recorded, tokens = self._recorded.get(kind), len(arrays.positions)
        if recorded is not None and tokens <= recorded.most_tokens:
            return self._recorded_step(kind, recorded, arrays)
        if tokens <= self._limits.get(kind, tokens):
            self._steps[kind] += 1
            # In a chunk of as many tokens as rows, a call's count would not tell which it counts.
            countable = not kind.chunk or arrays.counts[-1] != kind.rows
            if self._steps[kind] >= _STEPS and countable:
                self._recorded[kind] = made = self._made(kind, arrays)
                # A product of fewer rows may have native code. The limit bounds the attempts.
                self._limits[kind] = tokens // 2 if kind.chunk and made is None else 0
        return super().forward(arrays)

    def _calls_of(self, step: Step, arrays: StepArrays) -> QueuedCalls | None:
        """The calls of a step that may be queued; None where it is to be computed at once."""
        rows, kind = arrays.decode_rows, self._kind_of(arrays)
        if kind not in self._trusted or kind.chunk or self._replay.is_long:
            return None
        if not draws_largest(step) or self.sampling.uses(arrays.draw_slots):
            return None
        if rows not in self._queued:
            self._queued[rows] = None
            recorded, inputs = self._recorded[kind], self._inputs
            assert recorded is not None
            largest = recorded.head.largest if recorded.head else None
            if largest and inputs and (kernels := inputs.kernels) and self._replay.can_queue:
                given = inputs, kernels, recorded.calls, largest, self._replay.most_threads
                # As in `_made`.
                with suppress(Exception):
                    self._queued[rows] = QueuedCalls(*given)
        return self._queued[rows]

    def _recorded_step(
        self, kind: StepKind, recorded: RecordedLayers, arrays: StepArrays
    ) -> torch.Tensor:
        """The hidden states of a step for whose kind there is a recording."""
        tokens, trusted = len(arrays.positions), kind in self._trusted
        # To compare with, a chunk of other tokens than the recorded one shows most.
        replays = trusted or not kind.chunk or tokens != recorded.tokens
        chunk = self._chunk_of(arrays) if kind.chunk and replays else None
        if kind.chunk and chunk is None:
            return super().forward(arrays)
        self._send(arrays, chunk)
        longest, kv = int(arrays.seq_lens.max()), chunk.kv if chunk else None
        self._replay(recorded.calls, longest, kv)
        if chunk is not None:
            chunk.copy.added(chunk.start + chunk.tokens)
        else:
            self._queue.pace.computed(self._replay.seconds, self._replay.away)
        hidden = recorded.hidden[:tokens]
        if not trusted:
            return self._compared(kind, arrays, hidden, recorded.head, chunk)
        if recorded.head is not None:
            self._computed = hidden[: kind.rows], recorded.head
            self._has_plugin = self.sampling.calls_plugins(arrays.draw_slots)
        return hidden

    def _compared(
        self,
        kind: StepKind,
        arrays: StepArrays,
        found: torch.Tensor,
        head: RecordedHead | None,
        chunk: PromptChunk | None,
    ) -> torch.Tensor:
        """What the layers give for a step that was replayed. The recording is used from now on if
        it gave the same bits, and otherwise never again."""
        found, self._replay.helps = found.clone(), False
        hidden = super().forward(arrays)
        equal = same_bits(found, hidden)
        if equal and head is not None:
            logits = self.decoder.logits(hidden[: kind.rows], as_stored=True)
            equal = head.equals(logits, self.sampling.vocab_size)
        if equal:
            self._trusted.add(kind)
        else:
            self._recorded[kind] = None
            if chunk is not None:
                chunk.copy.added(chunk.start)
        return hidden

    def _kind_of(self, arrays: StepArrays) -> StepKind | None:
        """The kind of a step that may be recorded."""
        rows, decodes = len(arrays.seq_lens), arrays.decode_rows
        if not self._can_record or arrays.adapters is not None:
            return None
        if decodes == rows:
            return StepKind(rows)
        if decodes < rows - 1 or len(self._paged) > 1:
            return None
        # Shorter ones are computed as rows that decode.
        some = FEW_BESIDE_CODE < arrays.counts[-1] <= MOST_CHUNK
        return StepKind(decodes, chunk=True) if some else None

    def _chunk_of(self, arrays: StepArrays) -> PromptChunk | None:
        ((number, kv),) = self._paged
        return PromptChunk.of(arrays, number, kv)

    def _made(self, kind: StepKind, arrays: StepArrays) -> RecordedLayers | None:
        """A recording of the layers; None where there cannot be one."""
        chunk = self._chunk_of(arrays) if kind.chunk else None
        if kind.chunk and chunk is None:
            return None
        if self._inputs is None:
            self._inputs = FixedInputs(self.decoder, self._paged, self._spec)
        self._send(arrays, chunk)
        head = 0 < arrays.decode_rows <= _HEAD_ROWS
        for with_head in (True, False) if head else (False,):
            # `CannotRecord`, or an error of a family's own code, which is not to know of this.
            with suppress(Exception):
                return self._record(arrays.decode_rows, chunk, with_head=with_head)
        return None

    def _record(self, rows: int, chunk: PromptChunk | None, *, with_head: bool) -> RecordedLayers:
        """A recording of the layers for so many decode rows, and of the head. Raises `CannotRecord`
        where there cannot be one."""
        assert self._inputs is not None
        kv = chunk.kv if chunk else None
        recording = Recording(self._arena, self._replay.most_threads, kv, MOST_CHUNK)
        x, one = self._inputs.first(rows, self._spec.max_context, chunk)
        logits = largest = None
        kernels = end_kernels(self.decoder.dtype)
        with recording.begun():
            self._inputs.look_up(len(x))
            for layer in self.decoder.layers:
                x = layer(x, one)
                recording.end_layer()
            if with_head:
                recording.least_rows = _HEAD_ROWS
                logits = self.decoder.logits(x[:rows], as_stored=True)
                if kernels is not None:
                    largest = kernels.largest(logits[:, : self.sampling.vocab_size])
                recording.end_layer()
        calls, most = recording.made(), rows + MOST_CHUNK if chunk else rows
        hidden = x.as_strided((most, x.shape[1]), x.stride())
        found = None if largest is None else (largest[0].numpy(), largest[1].numpy())
        made = None if logits is None else RecordedHead(logits, found)
        return RecordedLayers(calls, hidden, made, len(x), min(most, calls.most_rows))

    def _send(self, arrays: StepArrays, chunk: PromptChunk | None, place: int = 0) -> None:
        """Put the inputs of a step where recorded calls read them. `place`: see `FixedInputs`."""
        assert self._inputs is not None
        tokens = None
        if not place:
            places = self.history.places(arrays.token_slots, arrays.positions)
            tokens = self.history.on_host(places)
        self._inputs.send(arrays, tokens, chunk, place)
        for _, kv in self._paged:
            if chunk is not None and arrays.sequences is not None:
                # Copies of other sequences are dropped, since this step adds nothing to them.
                end = chunk.start + chunk.tokens
                kv.contiguous.of([(arrays.sequences[-1],)], [end], kv.block_size, prompts=[end])
            elif kv.contiguous.groups:
                kv.contiguous.of([], [], kv.block_size)
