"""`DecoderRun`: runs sequences through a decoder, in any steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from asyncinfer.attention import AttentionBatch, StateCache
    from asyncinfer.models import Decoder

__all__ = ["DecoderRun"]

_BLOCK: Final = 16


class DecoderRun:
    """Sequences on pages scattered over a cache, which is NaN where nothing was written.
    `logits[row]` is float32 `[tokens, vocab]`, NaN for tokens that were not fed."""

    def __init__(self, decoder: Decoder, sequences: Sequence[Sequence[int]]) -> None:
        import torch

        from asyncinfer.attention import KVCache, StateCache

        self._decoder = decoder
        self._sequences = [torch.tensor(ids) for ids in sequences]
        counts = [-(-len(ids) // _BLOCK) for ids in sequences]
        blocks = list(range(sum(counts) + 3))
        random.Random(0).shuffle(blocks)
        self._tables = [[blocks.pop() for _ in range(count)] for count in counts]
        config, pages = decoder.config, sum(counts) + 3
        shapes = config.kv_shapes(config.kv_layers) or {config.layer_kv(0): ()}
        self._kv = [
            KVCache.allocate(shape, pages, _BLOCK, decoder.dtype, decoder.device, layers=layers)
            for shape, layers in shapes.items()
        ]
        #: None where no layer has one.
        self._states: StateCache | None = None
        tensors = [tensor for cache in self._kv for tensor in cache.tensors]
        if config.state_layers:
            self._states = StateCache(
                config.state, pages, _BLOCK, decoder.dtype, config.state_layers
            )
            tensors = [*tensors, *self._states.tensors]
        for tensor in tensors:
            tensor.fill_(float("nan"))
        self.done = [0] * len(sequences)
        self.logits = [
            torch.full((len(ids), decoder.config.vocab_size), torch.nan, dtype=torch.float32)
            for ids in sequences
        ]

    def share(self, row: int, other: int, tokens: int) -> None:
        """Sequence `row` begins with the blocks of `other` that hold these tokens: a prefix hit.
        Both begin with the same `tokens`, whole blocks of 16, and `row` has none yet."""
        self._tables[row][: tokens // _BLOCK] = self._tables[other][: tokens // _BLOCK]
        self.done[row] = tokens

    def step(self, counts: dict[int, int]) -> None:
        """Feed so many tokens of each sequence, in one step."""
        import torch

        from asyncinfer.attention import StatePass, StateRows

        # Rows of one token go first.
        rows = sorted(counts.items(), key=lambda row: row[1] > 1)
        spans = [(row, self.done[row], self.done[row] + count) for row, count in rows]
        ids = torch.cat([self._sequences[row][start:end] for row, start, end in spans])
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        with torch.inference_mode():
            batch = self._batch(spans)
            states: StatePass | None = None
            if self._states is not None:
                tables = batch.block_tables.numpy()
                lying = StateRows.of(batch.starts, batch.counts, tables, _BLOCK)
                states = StatePass(self._states, lying, [row for row, _, _ in spans])
            hidden = self._decoder.forward(
                ids, positions, self._kv, [batch] * len(self._kv), None, states
            )
            if states is not None:
                states.commit()
            logits = self._decoder.logits(hidden).float()
        parts = torch.split(logits, [end - start for _, start, end in spans])
        for (row, start, end), part in zip(spans, parts, strict=True):
            self.logits[row][start:end] = part
            self.done[row] = end

    def _batch(self, spans: Sequence[tuple[int, int, int]]) -> AttentionBatch:
        import torch

        from asyncinfer.attention import AttentionBatch

        counts = [end - start for _, start, end in spans]
        tables = [self._tables[row] for row, _, _ in spans]
        width = max(map(len, tables)) + 1
        slots = [
            self._tables[row][at // _BLOCK] * _BLOCK + at % _BLOCK
            for row, start, end in spans
            for at in range(start, end)
        ]
        batch = AttentionBatch(
            # Nothing may read what is behind a table's end.
            block_tables=torch.tensor(
                [[*table, *[-1] * (width - len(table))] for table in tables], dtype=torch.int32
            ),
            seq_lens=torch.tensor([end for _, _, end in spans], dtype=torch.int32),
            query_starts=torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            starts=[start for _, start, _ in spans],
            counts=counts,
            block_size=_BLOCK,
            decode_rows=next((at for at, count in enumerate(counts) if count > 1), len(counts)),
        )
        batch.sequences = [row for row, _, _ in spans]
        return batch
