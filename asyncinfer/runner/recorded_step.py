"""`RecordedStep`: a decode step as one function of device state, for graphs to record."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncinfer.adapters import AdapterPool
from asyncinfer.attention import DeviceBatch, KVCache, RecordedStates, StateCache
from asyncinfer.kernels import ops
from asyncinfer.models import Decoder
from asyncinfer.runner.slot_state import SlotState
from asyncinfer.sampling import Draws, RecordedSampler, TokenHistory
from asyncinfer.scheduler import RunnerSpec

__all__ = ["RecordedStep"]


class RecordedStep:
    """Embedding, layers, head and draw for the first rows of the batch in `SlotState`.

    Its inputs and results keep their addresses, as a graph requires. Its intermediate tensors live
    for one step. The history has an additional slot for padding rows, and the largest context in
    every slot.

    Args:
        kv: each KV group's pages.
        rows: most rows of a batch.
        in_flight: most steps whose results are not fetched yet.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: Sequence[KVCache | StateCache],
        spec: RunnerSpec,
        state: SlotState,
        history: TokenHistory,
        rows: int,
        in_flight: int,
        adapters: AdapterPool | None = None,
    ) -> None:
        device = state.rows.device
        self._decoder = decoder
        self._paged = [(at, cache) for at, cache in enumerate(kv) if isinstance(cache, KVCache)]
        self._kept = [(at, cache) for at, cache in enumerate(kv) if isinstance(cache, StateCache)]
        self._block_size = spec.block_size
        self._vocab_size = spec.vocab_size
        self._state = state
        self._history = history
        self._adapters = adapters
        self._sampler = RecordedSampler(spec.vocab_size, state.rows.device)
        self._query_starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        # Zero: every launch finds them so and leaves them so.
        counters = rows * decoder.config.num_heads
        self._arrivals = torch.zeros(counters, dtype=torch.int32, device=device)
        #: int32 `[in_flight, 2, rows]`: drawn tokens and the bits of float32 peaks. Steps take
        #: the places in turn, so that a step's results stay while the next steps run.
        self.results = torch.zeros((in_flight, 2, rows), dtype=torch.int32, device=device)
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        #: float32 `[rows, vocab_size]`, for steps that end with their logits.
        self.logits = torch.zeros((rows, spec.vocab_size), dtype=torch.float32, device=device)

    def __call__(self, size: int, draws: Draws, adapted: bool = False) -> None:
        """One step of the first `size` rows, which adds one to their positions. If it is `adapted`,
        some of them have an adapter. Unless `draws` asks for the logits, drawn tokens go to the
        history and to the next place of `results`."""
        state, rows = self._state, self._state.rows[:size]
        inputs = ops.decode_inputs(
            rows,
            state.positions,
            state.tables,
            state.options,
            self._history.table,
            self._block_size,
        )
        batches = [
            DeviceBatch(
                block_tables=inputs.block_tables[at],
                seq_lens=inputs.seq_lens,
                query_starts=self._query_starts[: size + 1],
                slot_mapping=inputs.slot_mapping[at],
                block_size=self._block_size,
                decode_rows=size,
                arrivals=self._arrivals,
            )
            for at, _ in self._paged
        ]
        states = None
        for at, cache in self._kept:
            states = RecordedStates(
                cache, inputs.block_tables[at], inputs.positions, inputs.seq_lens
            )
        lora = None
        if adapted and self._adapters is not None:
            lora = self._adapters.rows_on_device(state.adapters.index_select(0, rows))
        kv = [cache for _, cache in self._paged]
        hidden = self._decoder.forward(inputs.tokens, inputs.positions, kv, batches, lora, states)
        if states is not None:
            states.commit()
        as_stored = draws is Draws.LOGITS or self._sampler.fused
        logits = self._decoder.logits(hidden, as_stored=as_stored)[:, : self._vocab_size]
        if draws is Draws.LOGITS:
            self.logits[:size].copy_(logits)
            return
        keys = (inputs.options, inputs.seeds, inputs.draw_positions)
        tokens, peaks = self._sampler(logits, *keys, draws)
        # Padding rows share a slot, and nobody reads what they draw.
        ops.keep_draws(
            tokens, peaks, inputs.draw_places, self._history.flat, self.results, self._turn
        )

    def turn_to(self, place: int) -> None:
        """Let the next step write its results to this place."""
        self._turn.fill_(place)
