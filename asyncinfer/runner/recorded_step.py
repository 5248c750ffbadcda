"""`RecordedStep`: a decode step as one function of what the device holds, for graphs to record."""

from __future__ import annotations

import torch

from asyncinfer.attention import DeviceBatch, KVCache
from asyncinfer.models import Decoder
from asyncinfer.runner.slot_state import SlotState
from asyncinfer.sampling import Draws, RecordedSampler, TokenHistory
from asyncinfer.scheduler.plan import RunnerSpec

__all__ = ["RecordedStep"]


class RecordedStep:
    """Embedding, layers, head and draw for the first rows of the batch in `SlotState`.

    All it reads and writes has its place for good; what it makes on the way is gone afterwards.
    The history needs a slot more than there are, for rows that fill up the batch, and room for all
    that a slot can hold.

    Args:
        rows: most rows of a batch.
        in_flight: most steps whose results wait to be fetched.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        spec: RunnerSpec,
        state: SlotState,
        history: TokenHistory,
        rows: int,
        in_flight: int,
    ) -> None:
        device = state.rows.device
        self._decoder = decoder
        self._kv = kv
        self._block_size = spec.block_size
        self._windowed = spec.window is not None
        self._vocab_size = spec.vocab_size
        self._state = state
        self._history = history
        self._sampler = RecordedSampler(spec.vocab_size, state.options)
        self._query_starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        #: int32 `[in_flight, 2, rows]`: tokens drawn and the bits of float32 peaks, one step after
        #: the other, round and round. A step's results stay until they were fetched while the next
        #: steps run.
        self.results = torch.zeros((in_flight, 2, rows), dtype=torch.int32, device=device)
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        #: float32 `[rows, vocab_size]`, for steps that end with their logits.
        self.logits = torch.zeros((rows, spec.vocab_size), dtype=torch.float32, device=device)

    def __call__(self, size: int, draws: Draws) -> None:
        """One step of the first `size` rows. Positions are put on by one. Unless it ends with the
        logits, the tokens go to the history and to the next place of `results`."""
        state, block = self._state, self._block_size
        slots = state.rows[:size]
        positions = state.positions.index_select(0, slots)
        real = positions >= 0
        at = positions.clamp(min=0).long()
        all_tables = state.tables.index_select(0, slots)
        index = torch.div(at, block, rounding_mode="floor")[:, None]

        def mapping(tables: torch.Tensor) -> torch.Tensor:
            pages = tables.gather(1, index)[:, 0]
            # Not `where`, which would bring the number from the host.
            return (pages * block + at % block).masked_fill_(~real, -1)

        tables, window_tables = all_tables, None
        if self._windowed:
            tables, window_tables = all_tables.chunk(2, dim=1)
        batch = DeviceBatch(
            block_tables=tables,
            seq_lens=positions + 1,
            query_starts=self._query_starts[: size + 1],
            slot_mapping=mapping(tables),
            block_size=block,
            decode_rows=size,
            window_tables=window_tables,
            window_mapping=None if window_tables is None else mapping(window_tables),
        )
        all_slots = slots.long()
        places = all_slots * self._history.capacity + at
        tokens = self._history.flat.index_select(0, places).long()
        hidden = self._decoder.forward(tokens, at, self._kv, batch)
        logits = self._decoder.logits(hidden)[:, : self._vocab_size]
        # Rows that fill up the batch share a slot, and all write the same there.
        state.positions.index_copy_(0, all_slots, torch.where(real, positions + 1, positions))
        if draws is Draws.LOGITS:
            self.logits[:size].copy_(logits)
            return
        drawn, peak = self._sampler(logits, slots, at + 1, draws)
        drawn = drawn.int()
        self._history.flat.index_copy_(0, places + 1, drawn)
        both = torch.stack((drawn, peak.view(torch.int32)))
        self.results[:, :, :size].index_copy_(0, self._turn, both[None])
        self._turn.add_(1).remainder_(len(self.results))

    def turn_to(self, place: int) -> None:
        """The next results go to this place."""
        self._turn.fill_(place)
