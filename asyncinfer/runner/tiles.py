"""Forward passes whose results do not depend on the batch: the tokens go through the decoder in
tiles of one size, the last one padded, so that every operator always sees the same shapes.

Libraries choose the order of a sum by shapes. A token's place in its tile may matter too: that is
tried when the engine opens, with the model's own weights, and if so a tile is a single token. With
a mixture of experts it always is, since an expert's share of a tile depends on the other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.adapters import AdapterPool
from asyncinfer.attention import AttentionBatch, KVCache, reads_pages
from asyncinfer.kernels.workspace import invariant_chunk
from asyncinfer.layers import LoraRows
from asyncinfer.models import Decoder
from asyncinfer.runner.input_batch import StepArrays
from asyncinfer.sampling import upload

__all__ = ["TILE", "TiledDecoder"]

I64 = npt.NDArray[np.int64]

#: Query tokens of a tile.
TILE: Final = 16


class TiledDecoder:
    """A decoder over `kv`, in tiles."""

    def __init__(
        self,
        decoder: Decoder,
        kv: Sequence[KVCache],
        max_context: int,
        adapters: AdapterPool | None = None,
    ) -> None:
        """No row is longer than `max_context`."""
        self._decoder = decoder
        self._kv = list(kv)
        self._adapters = adapters
        self._max_context = max_context
        self._chunk = invariant_chunk(max_context)
        # The paged kernels compute a row of one token by its length alone, longer ones otherwise.
        self._single_rows = all(map(reads_pages, kv))
        self.size = TILE
        if decoder.config.experts is not None or not self._same_in_every_place():
            self.size = 1

    def forward(self, tokens: torch.Tensor, arrays: StepArrays) -> torch.Tensor:
        """`[tokens, hidden]` of a step's query tokens, int64 `[tokens]`."""
        rows = np.repeat(np.arange(len(arrays.counts)), arrays.counts)
        parts = [
            self._tile(tokens[first : first + self.size], first, rows, arrays)
            for first in range(0, len(rows), self.size)
        ]
        return torch.cat(parts)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 `[n, vocab_size]` of `hidden` `[n, hidden]`."""
        parts = torch.split(hidden, self.size)
        return torch.cat([self._decoder.logits(self._filled(part))[: len(part)] for part in parts])

    def _tile(
        self, tokens: torch.Tensor, first: int, rows: I64, arrays: StepArrays
    ) -> torch.Tensor:
        count, lacking = len(tokens), self.size - len(tokens)
        span = slice(first, first + count)
        span_rows, positions = rows[span], arrays.positions[span]
        # Tokens that begin a row; all of them where each token is a row by itself.
        apart = np.diff(span_rows, prepend=-1) != 0
        if self._single_rows:
            apart[:] = True
        firsts = np.flatnonzero(apart)
        counts = np.diff(firsts, append=count)
        ends = positions[firsts] + counts
        starts = np.append(firsts, count).astype(np.int32)
        positions_there, slots, tables, lengths, query_starts = upload(
            tokens.device,
            np.pad(positions, (0, lacking)),
            np.pad(arrays.slot_mapping[:, span], ((0, 0), (0, lacking)), constant_values=-1),
            np.ascontiguousarray(arrays.block_tables[:, span_rows[firsts]]),
            ends.astype(np.int32),
            starts,
        )
        batches = [
            AttentionBatch(
                block_tables=tables[group],
                seq_lens=lengths,
                query_starts=query_starts,
                slot_mapping=slots[group],
                block_size=kv.block_size,
                decode_rows=len(firsts) if self._single_rows else 0,
                starts=positions[firsts].tolist(),
                counts=counts.tolist(),
                invariant=True,
                chunk=self._chunk,
            )
            for group, kv in enumerate(self._kv)
        ]
        filled = self._filled(tokens)
        lora = self._lora_rows(arrays.adapters, span, lacking)
        return self._decoder.forward(filled, positions_there, self._kv, batches, lora)[:count]

    def _lora_rows(self, slots: I64 | None, span: slice, lacking: int) -> LoraRows | None:
        if slots is None or self._adapters is None:
            return None
        slots = np.pad(slots[span], (0, lacking), constant_values=-1)
        if self._decoder.device.type == "cpu":
            return self._adapters.rows(slots, apart=True)
        # The kernel computes each of so few rows by itself.
        (there,) = upload(self._decoder.device, slots.astype(np.int32))
        return self._adapters.rows_on_device(there)

    def _filled(self, part: torch.Tensor) -> torch.Tensor:
        """`[size, ...]`, in memory of its own: where a vector lies in memory may count too."""
        filled = part.new_zeros(self.size, *part.shape[1:])
        filled[: len(part)] = part
        return filled

    @torch.inference_mode()
    def _same_in_every_place(self) -> bool:
        """Whether each of `TILE` tokens gets the same bits in several orders, and in every place of
        a tile."""
        real, size = self._kv, self._kv[0].block_size
        width = -(-6 * TILE // size)
        kv = KVCache.allocate(
            self._decoder.config,
            TILE + 1,
            size,
            self._decoder.dtype,
            self._decoder.device,
            format=real[0].format,
        )
        self._kv = [kv]
        try:
            numbers = np.random.default_rng(0)
            ids = numbers.integers(0, self._decoder.config.vocab_size, TILE)
            positions = numbers.permutation((5 * np.arange(TILE) + 1) % self._max_context)
            outs = []
            for order in (np.arange(TILE), np.arange(TILE)[::-1], np.roll(np.arange(TILE), 5)):
                outs.append(self._try(ids[order], positions[order], width))
                outs[-1] = outs[-1][torch.from_numpy(np.argsort(order)).to(outs[-1].device)]
            alone = self._try(ids[:1].repeat(TILE), positions[:1].repeat(TILE), width)
            return all(out.equal(outs[0]) for out in outs) and bool((alone == outs[0][:1]).all())
        finally:
            self._kv = real

    def _try(self, ids: I64, positions: I64, width: int) -> torch.Tensor:
        """Logits `[TILE, vocab]` of tokens with nothing but zeros before them."""
        for tensor in self._kv[0].tensors:
            tensor.zero_()
        own = np.arange(1, TILE + 1)
        size = self._kv[0].block_size
        tables = np.zeros((TILE, width), np.int32)
        tables[np.arange(TILE), positions // size] = own
        arrays = StepArrays.of_single_rows(positions, own * size + positions % size, tables)
        (there,) = upload(self._decoder.device, ids)
        return self.logits(self.forward(there, arrays))
